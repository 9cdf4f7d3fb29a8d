"""Rows that are tokens already: ``input_ids`` with labels or masks.

Nothing is added to such rows, no BOS and no EOS. Labels come from ``labels`` where there are any, from the ids
otherwise; ``completion_mask`` and ``assistant_masks`` (names of TRL) take out the tokens with a 0. Tokens with a 0 in
``attention_mask`` are padding and are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tuning.data import tables
from tuning.data.collators import IGNORE_INDEX
from tuning.data.limits import Flat
from tuning.errors import DataError

__all__ = ["COLUMNS", "read"]

COLUMNS = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks")
_MASKS = ("completion_mask", "assistant_masks")

Values = npt.NDArray[np.int64]


def read(
    table: pa.Table, *, start: int, vocab_size: int, train_on_all: bool, name_row: Callable[[int], str]
) -> tuple[Flat, int]:
    """Read a batch of rows.

    Args:
        table: Rows; every row must have what its columns are for.
        start: Number of its first row in the data set.
        vocab_size: Ids and labels must be below.
        train_on_all: Labels are the ids, whatever labels and masks say.
        name_row: Says where a row is from, for messages.

    Returns:
        The samples, and how many tokens of padding were left out.

    Raises:
        DataError: If a row has no ids, or ids, labels or masks that cannot be; names the row.
    """

    def where(row: int) -> str:
        return name_row(start + row)

    ids, lengths = _read_lists(table.column("input_ids"), "input_ids", where)
    if not lengths.all():
        raise DataError(f"{where(int((lengths == 0).argmax()))} has empty input_ids; remove the row")
    _check_range(ids, lengths, "input_ids", vocab_size=vocab_size, lowest=0, where=where)
    others = {}
    for name in COLUMNS[1:]:
        if name in table.column_names:
            others[name], counts = _read_lists(table.column(name), name, where)
            _check_lengths(counts, lengths, name, where)
    labels = ids.copy()
    if "labels" in others and not train_on_all:
        labels = others["labels"].copy()
        given = np.where(labels == IGNORE_INDEX, 0, labels)
        _check_range(given, lengths, "labels", vocab_size=vocab_size, lowest=0, where=where)
    for name in _MASKS:
        if name in others and not train_on_all:
            _check_range(others[name], lengths, name, vocab_size=2, lowest=0, where=where)
            labels[others[name] == 0] = IGNORE_INDEX
    num_padding = 0
    if "attention_mask" in others:
        mask = others["attention_mask"]
        _check_range(mask, lengths, "attention_mask", vocab_size=2, lowest=0, where=where)
        is_real = mask == 1
        num_padding = int(len(ids) - is_real.sum())
        if num_padding:
            lengths = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[is_real], minlength=len(lengths))
            ids, labels = ids[is_real], labels[is_real]
    flat = Flat(
        ids=ids.astype(np.int32),
        labels=labels.astype(np.int32),
        lengths=lengths.astype(np.int64),
        rows=np.arange(start, start + len(lengths), dtype=np.int64),
    )
    return flat, num_padding


def _read_lists(column: pa.ChunkedArray, name: str, where: Callable[[int], str]) -> tuple[Values, Values]:
    """Return all values of a column of lists, and how many each row has."""
    if tables.is_json(column.type) or column.null_count:
        _raise_bad_row(column, name, where)
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise DataError(f"The column {name!r} is of type {kind}, but must hold lists of integers; convert it")
    array = column.combine_chunks()
    array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    values = pc.list_flatten(array)
    if values.null_count:
        _raise_bad_row(column, name, where)
    counts = pc.list_value_length(array)
    return values.cast(pa.int64()).to_numpy(), counts.cast(pa.int64()).to_numpy()


def _raise_bad_row(column: pa.ChunkedArray, name: str, where: Callable[[int], str]) -> None:
    """Raise for the first row that is no list of integers."""
    for row, value in enumerate(tables.values(column)):
        if value is None:
            raise DataError(f"{where(row)} has no {name} (absent or null), but other rows have; give it to every row")
        if not isinstance(value, list):
            raise DataError(f"{where(row)} has {name} {_short(value)}; it must be a list of integers")
        bad = [item for item in value if type(item) is not int or abs(item) >= 1 << 63]
        if bad:
            raise DataError(f"{where(row)} has {_short(bad[0])} among its {name}; they must be integers of 64 bits")


def _check_lengths(counts: Values, lengths: Values, name: str, where: Callable[[int], str]) -> None:
    is_wrong = counts != lengths
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise DataError(
            f"{where(row)} has {lengths[row]} input_ids but {counts[row]} {name}; they must be equally many"
        )


def _check_range(
    values: Values, lengths: Values, name: str, *, vocab_size: int, lowest: int, where: Callable[[int], str]
) -> None:
    is_wrong = (values < lowest) | (values >= vocab_size)
    if is_wrong.any():
        place = int(is_wrong.argmax())
        row = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
        allowed = f"from {lowest} to {vocab_size - 1}" + (f", or {IGNORE_INDEX}" if name == "labels" else "")
        raise DataError(f"{where(row)} has {values[place]} among its {name}; allowed are integers {allowed}")


def _short(value: Any) -> str:  # noqa: ANN401 - any JSON value
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
