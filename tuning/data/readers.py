"""One path to its rows, and what is done with rows: put together, split, mixed, streamed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset
from datasets.exceptions import DatasetsError

from tuning.data import cache, files, mixture, tables
from tuning.data.origin import Origin
from tuning.errors import DataError
from tuning.logs import logger

__all__ = ["Part", "load", "mix", "split", "stream"]

_log = logger(__name__)
_MAX_BYTES_IN_MEMORY = 1 << 28  # larger files are mapped from the cache, once for all ranks of a machine
_STREAMED_ROWS = 256
# what datasets and huggingface_hub raise for a data set they cannot get; anything else is our fault
_HUB_ERRORS = (OSError, ValueError, RuntimeError, DatasetsError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows and where they are from."""

    rows: Dataset
    origin: Origin


def load(path: str, *, asked: str, cache_dir: str | None) -> Part:
    """Read all rows behind a file, a folder or a hub name.

    Args:
        path: What the user gave.
        asked: Flag and value, for messages.
        cache_dir: Folder for large files that are mapped from disk; None: that of ``datasets``.

    Raises:
        DataError: If there are none or one cannot be read.
    """
    if not files.is_local(path, asked=asked):
        return _of_dataset(_load_hub(path, asked=asked, cache_dir=cache_dir), path, asked=asked)
    if files.is_saved(Path(path)):
        return _of_dataset(_load_saved(path, asked=asked), path, asked=asked)
    found = files.find(Path(path), asked=asked)
    if len(found) > 1:
        _log.info("%s: reading %d files", asked, len(found))
    return _concatenate([_load_file(file, cache_dir=cache_dir) for file in found])


def split(part: Part, share: float, *, seed: int, asked: str) -> tuple[Part, Part]:
    """Hold out a share of the rows for evaluation, drawn at random; both keep the order of the files.

    Args:
        part: All rows.
        share: Above 0, below 1; one row at least is held out.
        seed: Chooses the rows.
        asked: Flag and value, for messages.

    Returns:
        The rows to train on, the rows to evaluate on.

    Raises:
        DataError: If no row is left to train on.
    """
    num_rows = len(part.rows)
    num_held_out = max(1, round(share * num_rows))
    if num_held_out >= num_rows:
        raise DataError(f"{asked} of {num_rows} row(s) leaves none to train on; lower it, or give more rows")
    order = np.random.default_rng(seed).permutation(num_rows)
    return _pick(part, np.sort(order[num_held_out:])), _pick(part, np.sort(order[:num_held_out]))


def mix(path: Path, *, seed: int, cache_dir: str | None) -> tuple[Part, Part | None]:
    """Read the data sets of a mixture file and mix them.

    Args:
        path: The file of ``--data_config_path``.
        seed: Of the draws and splits, unless the file has one.
        cache_dir: As in :func:`load`.

    Returns:
        The rows to train on, and those held out by ``split``, or None if there are none.

    Raises:
        DataError: As :func:`load`, and for a column to rename that is not there.
    """
    plan = mixture.load(path)
    seed = seed if plan.seed is None else plan.seed
    train, held_out = [], []
    for entry in plan.datasets:
        parts = [load(p, asked=mixture.asked(path, entry.name, p), cache_dir=cache_dir) for p in entry.data_paths]
        part = _rename(_concatenate(parts), entry.rename_columns, asked=f"{entry.name!r} in --data_config_path {path}")
        if entry.validation:
            asked = f"The split of {entry.name!r} in --data_config_path {path}"
            part, evaluation = split(part, entry.validation, seed=seed, asked=asked)
            held_out.append(evaluation)
        train.append(part)
    mixed = _concatenate(train)
    shares = [entry.sampling for entry in plan.datasets if entry.sampling is not None]
    if shares:
        sizes = [len(part.rows) for part in train]
        mixed = _pick(mixed, mixture.draw(sizes, shares, stop_at_first=plan.stop_at_first, seed=seed))
    return mixed, _concatenate(held_out) if held_out else None


def stream(path: str, *, asked: str) -> tuple[IterableDataset, Origin]:
    """Return rows that are read as they are asked for; file by file, so that they can be shared out by file.

    Returns:
        ``{"row": row}`` a row, since rows may differ in their columns; and where they are from.

    Raises:
        DataError: Here or on iteration, as :func:`load`.
    """
    if not files.is_local(path, asked=asked):
        return _wrap(_load_hub(path, asked=asked, cache_dir=None, streaming=True)), _streamed_origin(path)
    if files.is_saved(Path(path)):
        return _wrap(_load_saved(path, asked=asked).to_iterable_dataset()), _streamed_origin(path)
    found = [str(file) for file in files.find(Path(path), asked=asked)]
    rows = IterableDataset.from_generator(_iter_files, gen_kwargs={"paths": found})
    return rows, _streamed_origin(found[0] if len(found) == 1 else path)


def _wrap(rows: IterableDataset) -> IterableDataset:
    return rows.map(lambda row: {"row": row}, remove_columns=rows.column_names, features=None)


def _streamed_origin(name: str) -> Origin:
    return Origin(files=((name, 0),), fingerprint="")


def _iter_files(paths: Sequence[str]) -> Iterator[dict[str, Any]]:
    for path in map(Path, paths):
        kind = files.holds(path)
        if kind in ("parquet", "arrow"):
            for batch in _read_table(path, kind).to_batches(max_chunksize=_STREAMED_ROWS):
                table = pa.Table.from_batches([batch])
                columns = {name: tables.values(table.column(name)) for name in table.column_names}
                for row in range(table.num_rows):
                    yield {"row": {name: column[row] for name, column in columns.items()}}
        else:
            for rows in files.iter_rows(path, kind, chunk_rows=_STREAMED_ROWS):
                yield from ({"row": row} for row in rows)


def _load_file(path: Path, *, cache_dir: str | None) -> Part:
    kind = files.holds(path)
    content = _content_hash(path)
    if path.stat().st_size <= _MAX_BYTES_IN_MEMORY:
        rows = Dataset(_read_table(path, kind))
    else:
        kept = cache.folder(cache_dir) / f"rows-{cache.key(content, kind, cache.code_version())}.arrow"
        found = cache.find(kept)
        if found is None:
            table = _read_table(path, kind)
            found = cache.store(kept, table.schema, table.to_batches())
        rows = found
    if not len(rows):
        raise DataError(f"{path} holds no rows; it must hold one or more")
    origin = Origin(files=((str(path), len(rows)),), fingerprint=cache.key(content, str(path)))
    return Part(rows=rows, origin=origin)


def _read_table(path: Path, kind: str) -> pa.Table:
    try:
        if kind == "parquet":
            return pq.read_table(path, partitioning=None)
        if kind == "arrow":
            with pa.memory_map(str(path)) as source:
                try:
                    return pa.ipc.open_stream(source).read_all()
                except pa.ArrowInvalid:
                    return pa.ipc.open_file(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is a damaged {kind} file: {_one_line(error)}; write it anew") from error
    return tables.build(files.iter_rows(path, kind), name_row=lambda row: f"row {row} of {path}")


def _load_hub(name: str, *, asked: str, cache_dir: str | None, streaming: bool = False) -> Dataset | IterableDataset:
    try:
        return datasets.load_dataset(name, split="train", cache_dir=cache_dir, streaming=streaming)
    except _HUB_ERRORS as error:
        raise DataError(
            f"{asked} is neither a file nor a folder here, and the hub gives no data set of that name: "
            f"{_one_line(error)}"
        ) from error


def _load_saved(path: str, *, asked: str) -> Dataset:
    try:
        saved = datasets.load_from_disk(path)
    except (pa.ArrowException, *_HUB_ERRORS) as error:
        raise DataError(f"{asked} is a damaged folder of a saved data set: {_one_line(error)}; save it anew") from error
    if isinstance(saved, Mapping):
        if "train" not in saved:
            raise DataError(f"{asked} has the splits {', '.join(saved)} but no train; give the folder of one of them")
        return saved["train"]
    return saved


def _of_dataset(dataset: Dataset, name: str, *, asked: str) -> Part:
    if not len(dataset):
        raise DataError(f"{asked} holds no rows; it must hold one or more")
    origin = Origin(files=((name, len(dataset)),), fingerprint=cache.key(name, dataset._fingerprint))
    return Part(rows=dataset, origin=origin)


def _concatenate(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    rows = [part.rows for part in parts]
    if all(part.features == rows[0].features for part in rows):
        joined = datasets.concatenate_datasets(rows)
    else:
        joined = Dataset(tables.concatenate([part.with_format("arrow")[:] for part in rows]))
    picks = None
    if any(part.origin.picks is not None for part in parts):
        sizes = [sum(count for _, count in part.origin.files) for part in parts]
        starts = np.cumsum([0, *sizes[:-1]])
        picks = np.concatenate(
            [
                start + (np.arange(len(part.rows)) if part.origin.picks is None else part.origin.picks)
                for start, part in zip(starts, parts, strict=True)
            ]
        )
    origin = Origin(
        files=tuple(file for part in parts for file in part.origin.files),
        picks=picks,
        fingerprint=cache.key(*(part.origin.fingerprint for part in parts)),
    )
    return Part(rows=joined, origin=origin)


def _pick(part: Part, rows: np.ndarray[Any, Any]) -> Part:
    before = part.origin.picks
    origin = dataclasses.replace(
        part.origin,
        picks=rows if before is None else before[rows],
        fingerprint=cache.key(part.origin.fingerprint, rows.astype(np.int64).tobytes()),
    )
    return Part(rows=part.rows.select(rows), origin=origin)


def _rename(part: Part, names: Mapping[str, str], *, asked: str) -> Part:
    if not names:
        return part
    columns = part.rows.column_names
    missing = [name for name in names if name not in columns]
    if missing:
        raise DataError(
            f"rename_columns of {asked} names the column {missing[0]!r}, which is not there; it has "
            f"{', '.join(columns)}"
        )
    renamed = [names.get(name, name) for name in columns]
    twice = [name for name in renamed if renamed.count(name) > 1]
    if twice:
        raise DataError(f"rename_columns of {asked} would make two columns {twice[0]!r}; rename or drop one of them")
    origin = dataclasses.replace(part.origin, fingerprint=cache.key(part.origin.fingerprint, *renamed))
    return Part(rows=part.rows.rename_columns(dict(names)), origin=origin)


def _content_hash(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; mend the path or its permissions") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
