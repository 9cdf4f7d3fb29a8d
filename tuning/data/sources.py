"""Files, folders and hub names to raw rows.

A row keeps what its file says: nested values (messages, tools) stay JSON, so that a key that is absent stays absent
and a null stays null (:mod:`tuning.data.tables`). Every row can be named by file and number
(:class:`tuning.data.origin.Origin`) however it was split, drawn or shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuning.config.configs import DataArguments
from tuning.data import files, mixture
from tuning.data.origin import Origin
from tuning.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

__all__ = ["RawData", "check", "read"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawData:
    """Rows before tokenization.

    Attributes:
        train: Rows to train on; nested columns have the type ``datasets.Json``. Iterable of
            ``{"row": row}`` when streaming was asked for.
        eval: Rows to evaluate on, or None.
        train_origin: Where the rows of ``train`` are from.
        eval_origin: Where those of ``eval`` are from; None without them.
    """

    train: Dataset | IterableDataset
    eval: Dataset | None
    train_origin: Origin
    eval_origin: Origin | None


def check(config: DataArguments) -> None:
    """Refuse data that cannot be there, in milliseconds: paths, empty files, first rows. Loads no library.

    Raises:
        DataError: With flag, file and, where there is one, line.
    """
    _check_combination(config)
    for flag, path in (
        ("--training_data_path", config.training_data_path),
        ("--validation_data_path", config.validation_data_path),
    ):
        if path is not None:
            _check_path(path, asked=f"{flag} {path}")
    if config.data_config_path is not None:
        for entry in mixture.load(Path(config.data_config_path)).datasets:
            for path in entry.data_paths:
                _check_path(path, asked=mixture.asked(config.data_config_path, entry.name, path))


def read(config: DataArguments, *, seed: int, cache_dir: str | None = None) -> RawData:
    """Read the rows that the flags ask for.

    Args:
        config: Paths, split and mixture.
        seed: Chooses the rows of ``validation_split`` and the draws of a mixture.
        cache_dir: Folder for large files that are mapped from disk; default: that of ``datasets``.

    Raises:
        DataError: With flag, file, line or row.
    """
    from tuning.data import readers  # noqa: PLC0415 - loads datasets, which check() does without

    check(config)
    train_path, eval_path = config.training_data_path, config.validation_data_path
    train_asked = f"--training_data_path {train_path}"
    evaluation = None
    if eval_path is not None:
        evaluation = readers.load(eval_path, asked=f"--validation_data_path {eval_path}", cache_dir=cache_dir)
    if config.streaming and train_path is not None:
        train_set, train_origin = readers.stream(train_path, asked=train_asked)
    else:
        if train_path is not None:
            train = readers.load(train_path, asked=train_asked, cache_dir=cache_dir)
        else:
            train, held_out = readers.mix(Path(str(config.data_config_path)), seed=seed, cache_dir=cache_dir)
            evaluation = evaluation or held_out
        if config.validation_split:
            asked = f"--validation_split {config.validation_split}"
            train, evaluation = readers.split(train, config.validation_split, seed=seed, asked=asked)
        train_set, train_origin = train.rows, train.origin
    return RawData(
        train=train_set,
        eval=None if evaluation is None else evaluation.rows,
        train_origin=train_origin,
        eval_origin=None if evaluation is None else evaluation.origin,
    )


def _check_combination(config: DataArguments) -> None:
    if config.training_data_path is None and config.data_config_path is None:
        raise DataError("No training data was given; give --training_data_path or --data_config_path")
    if config.training_data_path is not None and config.data_config_path is not None:
        raise DataError("--training_data_path and --data_config_path both name the training data; keep one of them")
    if not 0 <= config.validation_split < 1:
        raise DataError(f"--validation_split is {config.validation_split}; it must be from 0 to below 1")
    if config.validation_split and config.validation_data_path is not None:
        raise DataError("--validation_split and --validation_data_path both make the evaluation set; keep one of them")
    if config.validation_split and config.data_config_path is not None:
        raise DataError(
            "--validation_split does not say which data set of --data_config_path it splits; give split in that file"
        )
    if config.streaming and (config.validation_split or config.data_config_path is not None):
        flag = "--validation_split" if config.validation_split else "--data_config_path"
        raise DataError(f"{flag} needs all rows at hand, which --streaming does not have; drop one of them")


def _check_path(path: str, *, asked: str) -> None:
    if files.is_local(path, asked=asked) and not files.is_saved(Path(path)):
        for file in files.find(Path(path), asked=asked):
            files.check(file)
