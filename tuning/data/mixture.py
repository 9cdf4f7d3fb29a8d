"""``--data_config_path``: several data sets, renamed columns, splits and sampling shares.

The file is JSON or YAML::

    dataprocessor:
      sampling_stopping_strategy: all_exhausted   # or first_exhausted
      seed: 42                                    # default: the run's
    datasets:
      - name: instructions
        data_paths: [a.jsonl, more/]
        sampling: 0.7
        rename_columns: {question: input, answer: output}
        split: {train: 0.9, validation: 0.1}

A key that is not known is refused by name. Without ``sampling`` the sets follow one another, each row once. With it,
rows are drawn by share from each set in a shuffled order, starting over where a set is used up, until every set
(``all_exhausted``) or the first (``first_exhausted``) has been used up.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tuning.errors import DataError

__all__ = ["DatasetEntry", "Mixture", "asked", "draw", "load"]

_STRATEGIES = ("all_exhausted", "first_exhausted")
# what fms-hf-tuning has under these names is a flag here
_FLAGS = {
    "chat_template": "use --chat_template",
    "data_handlers": "use the flags that name columns and templates, listed in docs/data.md",
    "streaming": "use --streaming",
}
_MIN_DRAWS = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetEntry:
    """One data set of a mixture.

    Attributes:
        name: For messages.
        data_paths: Files, folders or hub names.
        sampling: Share of the rows drawn, any positive number; None where no set has one.
        rename_columns: Old name to new name.
        validation: Share of rows held out for evaluation, 0 to below 1.
    """

    name: str
    data_paths: tuple[str, ...]
    sampling: float | None
    rename_columns: Mapping[str, str]
    validation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Data sets and how they are mixed.

    Attributes:
        datasets: One or more.
        stop_at_first: Stop when the first set is used up, not the last.
        seed: Of the draws; None: the run's.
    """

    datasets: tuple[DatasetEntry, ...]
    stop_at_first: bool
    seed: int | None


def load(path: Path) -> Mixture:
    """Read a mixture file.

    Raises:
        DataError: If it cannot be read or has a key or value that is not known.
    """
    where = f"--data_config_path {path}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror}; give a JSON or YAML file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text; give a JSON or YAML file") from error
    except yaml.YAMLError as error:
        raise DataError(f"{where} is neither JSON nor YAML: {_one_line(error)}") from error
    content = _mapping(content, where, ("datasets", "dataprocessor"))
    processor = _mapping(
        content.get("dataprocessor") or {},
        f"{where}: dataprocessor",
        ("type", "sampling_stopping_strategy", "seed"),
    )
    _one_of(processor.get("type", "default"), ("default",), f"{where}: dataprocessor.type")
    strategy = processor.get("sampling_stopping_strategy", _STRATEGIES[0])
    _one_of(strategy, _STRATEGIES, f"{where}: dataprocessor.sampling_stopping_strategy")
    seed = processor.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise DataError(f"{where}: dataprocessor.seed is {seed!r}; it must be an integer from 0")
    entries = content.get("datasets")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where} lists no data set; datasets must be a list of one or more")
    datasets = tuple(_entry(entry, f"{where}: datasets[{index}]", index) for index, entry in enumerate(entries))
    without = [entry.name for entry in datasets if entry.sampling is None]
    if without and len(without) < len(datasets):
        raise DataError(
            f"{where} gives sampling to some data sets but not to {without[0]!r}; give it to all or to none"
        )
    return Mixture(datasets=datasets, stop_at_first=strategy == "first_exhausted", seed=seed)


def asked(config_path: Path | str, name: str, path: str) -> str:
    """Return how a message names one data path of a mixture."""
    return f"The data path {path} of {name!r} in --data_config_path {config_path}"


def draw(
    sizes: Sequence[int], shares: Sequence[float], *, stop_at_first: bool, seed: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw the rows of a mixture.

    Args:
        sizes: Rows of each set.
        shares: Positive weight of each set.
        stop_at_first: Stop when the first set is used up, not the last.
        seed: Of the draws.

    Returns:
        Row numbers in the concatenation of the sets, int64. Each set is walked in shuffled order, over and over.
    """
    rng = np.random.default_rng(seed)
    weights = np.asarray(shares, dtype=np.float64)
    weights /= weights.sum()
    needed = np.asarray(sizes, dtype=np.int64)
    drawn = np.zeros(0, dtype=np.int64)
    while True:
        drawn = np.concatenate([drawn, rng.choice(len(sizes), size=max(_MIN_DRAWS, sum(sizes)), p=weights)])
        # where in the sequence of draws each set is used up; beyond the end if it is not yet
        ends = [_position_of(drawn, which, count) for which, count in enumerate(needed)]
        end = min(ends) if stop_at_first else max(ends)
        if end <= len(drawn):
            break
    drawn = drawn[:end]
    starts = np.cumsum(needed) - needed
    rows = np.empty(end, dtype=np.int64)
    for which, size in enumerate(needed):
        places = np.flatnonzero(drawn == which)
        rounds = [rng.permutation(size) for _ in range(-(-len(places) // size))]
        rows[places] = starts[which] + np.concatenate([*rounds, np.zeros(0, dtype=np.int64)])[: len(places)]
    return rows


def _position_of(drawn: np.ndarray[Any, Any], which: int, count: int) -> int:
    places = np.flatnonzero(drawn == which)
    return int(places[count - 1]) + 1 if len(places) >= count else len(drawn) + 1


def _entry(value: object, where: str, index: int) -> DatasetEntry:
    known = ("name", "data_paths", "sampling", "rename_columns", "split")
    entry = _mapping(value, where, known)
    paths = entry.get("data_paths")
    if isinstance(paths, str):
        paths = [paths]
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise DataError(f"{where}.data_paths is {paths!r}; it must be a list of files, folders or hub names")
    sampling = entry.get("sampling")
    if sampling is not None and not (_is_number(sampling) and sampling > 0):
        raise DataError(f"{where}.sampling is {sampling!r}; it must be a number above 0")
    renames = entry.get("rename_columns") or {}
    if not isinstance(renames, dict) or not all(isinstance(name, str) for pair in renames.items() for name in pair):
        raise DataError(f"{where}.rename_columns is {renames!r}; it must map old column names to new ones")
    return DatasetEntry(
        name=str(entry.get("name", f"datasets[{index}]")),
        data_paths=tuple(paths),
        sampling=None if sampling is None else float(sampling),
        rename_columns=renames,
        validation=_validation_share(entry.get("split"), f"{where}.split"),
    )


def _validation_share(value: object, where: str) -> float:
    if value is None:
        return 0.0
    split = _mapping(value, where, ("train", "validation"))
    train, validation = split.get("train"), split.get("validation", 0.0)
    train = 1 - validation if train is None and _is_number(validation) else train
    if (
        not (_is_number(train) and _is_number(validation))
        or not 0 <= validation < 1
        or abs(train + validation - 1) > 1e-9
    ):
        raise DataError(f"{where} is {value!r}; train and validation must be shares that add up to 1, train above 0")
    return float(validation)


def _mapping(value: object, where: str, known: Collection[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {value!r}; it must be a mapping with the keys {', '.join(known)}")
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            advice = _FLAGS.get(key) or (f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}")
            raise DataError(f"{where} has the key {key!r}, which is not known; {advice}")
    return value


def _one_of(value: object, allowed: Sequence[str], where: str) -> None:
    if value not in allowed:
        raise DataError(f"{where} is {value!r}; it must be {' or '.join(allowed)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
