"""Rows to Arrow columns and back, exactly.

Arrow gives a nested column the union of all keys, so that a tool would gain the parameters of other tools as nulls.
Nested values are therefore kept as the JSON text they were read from, in the type ``datasets.Json``, which survives
``map``, parquet and reload. Lists of integers (token ids) or of booleans (masks) stay lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from tuning.errors import DataError

__all__ = ["build", "concatenate", "is_json", "values"]

_IDS = pa.list_(pa.int64())
_SCALARS: dict[frozenset[type], pa.DataType] = {
    frozenset(): pa.null(),
    frozenset({str}): pa.string(),
    frozenset({bool}): pa.bool_(),
    frozenset({int}): pa.int64(),
    frozenset({float}): pa.float64(),
}


def build(chunks: Iterable[list[dict[str, Any]]], *, name_row: Callable[[int], str]) -> pa.Table:
    """Build a table of rows; a key that a row lacks is null there.

    Args:
        chunks: Rows, in lists.
        name_row: Says where a row is from, for messages; takes its number, from 0.

    Raises:
        DataError: If a text holds half a surrogate pair, which no encoding can store.
    """
    pieces = []
    start = 0
    for rows in chunks:
        names = dict.fromkeys(chain.from_iterable(rows))
        try:
            columns = {name: _encode([row.get(name) for row in rows]) for name in names}
        except UnicodeEncodeError as error:
            bad = next(index for index, row in enumerate(rows) if not _can_be_stored(row))
            raise DataError(
                f"{name_row(start + bad)} holds half of a surrogate pair (\\u{ord(error.object[error.start]):04x}), "
                "which is no character; mend the text, often an emoji cut in two"
            ) from error
        # without a column the number of rows would be lost
        pieces.append(pa.table(columns) if columns else pa.table({"": pa.nulls(len(rows))}))
        start += len(rows)
    return concatenate(pieces)


def concatenate(tables: Sequence[pa.Table]) -> pa.Table:
    """Put tables one below the other; a column of two kinds becomes JSON, one that a table lacks is null there."""
    names = dict.fromkeys(chain.from_iterable(table.column_names for table in tables))
    if len(names) > 1:
        names.pop("", None)
    columns = {}
    for name in names:
        pieces = [table.column(name) if name in table.column_names else None for table in tables]
        target = _common_type([piece.type for piece in pieces if piece is not None])
        chunks: list[pa.Array] = []
        for table, piece in zip(tables, pieces, strict=True):
            if piece is None:
                chunks.append(_nulls(table.num_rows, target))
            else:
                chunks.extend(_cast(chunk, target) for chunk in piece.chunks)
        columns[name] = pa.chunked_array(chunks, type=target)
    return pa.table(columns)


def values(column: pa.ChunkedArray) -> list[Any]:
    """Return the Python values of a column: JSON decoded, and nulls that a struct has for absent keys left out."""
    if is_json(column.type):
        texts = chain.from_iterable(chunk.storage.to_pylist() for chunk in column.chunks)
        return [None if text is None else json.loads(text) for text in texts]
    plain: list[Any] = column.to_pylist()
    return [_without_nulls(value) for value in plain] if _has_struct(column.type) else plain


def is_json(kind: pa.DataType) -> bool:
    """Say whether a column of this type holds JSON text."""
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def _encode(column: list[Any]) -> pa.Array:
    """Return the narrowest array that holds the values exactly."""
    types = frozenset(map(type, column)) - {type(None)}
    try:
        if types in _SCALARS:
            return pa.array(column, _SCALARS[types])
        if types == {list}:
            inner = set(map(type, chain.from_iterable(filter(None, column))))
            if inner <= {int}:
                return pa.array(column, _IDS)
            if inner == {bool}:
                return pa.array(column, pa.list_(pa.bool_()))
    except OverflowError:  # an integer beyond 64 bits
        pass
    return _json_array(column)


def _json_array(column: list[Any]) -> pa.Array:
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in column]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def _can_be_stored(row: dict[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _common_type(types: list[pa.DataType]) -> pa.DataType:
    kinds = {kind for kind in types if not pa.types.is_null(kind)}
    if len(kinds) <= 1:
        return kinds.pop() if kinds else pa.null()
    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in kinds):
        return pa.large_string()
    if all(pa.types.is_integer(kind) for kind in kinds):
        return pa.int64()
    if all(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type) for kind in kinds):
        return _IDS
    return pa.json_()


def _cast(chunk: pa.Array, target: pa.DataType) -> pa.Array:
    if chunk.type == target:
        return chunk
    if pa.types.is_null(chunk.type):
        return _nulls(len(chunk), target)
    if is_json(target):
        return _json_array(values(pa.chunked_array([chunk])))
    return chunk.cast(target)


def _nulls(count: int, target: pa.DataType) -> pa.Array:
    if is_json(target):
        return pa.ExtensionArray.from_storage(target, pa.nulls(count, pa.string()))
    return pa.nulls(count, target)


def _has_struct(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return True
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and _has_struct(kind.value_type))


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
