"""Rows of tokens: labels and masks in all their combinations, and every number that cannot be."""

import pyarrow as pa
import pytest

from tuning.data import pretokenized, tables
from tuning.errors import DataError

X = -100


def read(rows, *, start=0, vocab_size=64, train_on_all=False):
    """Read rows as they come from JSON."""
    table = tables.build([rows], name_row=str)
    return read_table(table, start=start, vocab_size=vocab_size, train_on_all=train_on_all)


def read_table(table, *, start=0, vocab_size=64, train_on_all=False):
    flat, num_padding = pretokenized.read(
        table,
        start=start,
        vocab_size=vocab_size,
        train_on_all=train_on_all,
        name_row=lambda row: f"row {row} of f.jsonl",
    )
    assert flat.rows.tolist() == list(range(start, start + table.num_rows))
    return flat.ids.tolist(), flat.labels.tolist(), flat.lengths.tolist(), num_padding


def test_ids_alone_are_all_labels():
    assert read([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}], start=10) == ([5, 6, 7, 8], [5, 6, 7, 8], [3, 1], 0)


def test_labels_are_taken_as_they_are():
    rows = [{"input_ids": [5, 6, 7], "labels": [X, 6, 9]}]
    assert read(rows) == ([5, 6, 7], [X, 6, 9], [3], 0)
    assert read(rows, train_on_all=True) == ([5, 6, 7], [5, 6, 7], [3], 0)


@pytest.mark.parametrize("mask", [[0, 1, 1], [False, True, True]])
@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_masks_take_labels_out(name, mask):
    rows = [{"input_ids": [5, 6, 7], name: mask}]
    assert read(rows) == ([5, 6, 7], [X, 6, 7], [3], 0)
    assert read(rows, train_on_all=True) == ([5, 6, 7], [5, 6, 7], [3], 0)
    assert read([{**rows[0], "labels": [5, 6, X]}])[1] == [X, 6, X]


def test_both_masks_together():
    rows = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}]
    assert read(rows)[1] == [X, 6, X]


def test_padding_is_left_out():
    rows = [
        {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "labels": [X, X, 5, 6]},
        {"input_ids": [7, 8, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [7, 8, X, X]},
        {"input_ids": [9, 9], "attention_mask": [1, 1], "labels": [9, 9]},
    ]
    assert read(rows) == ([5, 6, 7, 8, 9, 9], [5, 6, 7, 8, 9, 9], [2, 2, 2], 4)
    assert read([{"input_ids": [1, 2], "attention_mask": [0, 0], "labels": [1, 2]}, rows[2]])[2] == [0, 2]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int8()), pa.list_(pa.uint32()), pa.large_list(pa.int64()), pa.list_(pa.int16(), 2)]
)
def test_lists_of_any_integer_type(kind):
    table = pa.table({"input_ids": pa.chunked_array([pa.array([[5, 6]], kind), pa.array([[7, 8]], kind)])})
    assert read_table(table) == ([5, 6, 7, 8], [5, 6, 7, 8], [2, 2], 0)


def test_a_slice_of_a_table():
    table = pa.table({"input_ids": [[1], [2, 3], [4]], "labels": [[X], [2, 3], [4]]}).slice(1, 2)
    assert read_table(table) == ([2, 3, 4], [2, 3, 4], [2, 1], 0)


GOOD = {"input_ids": [1, 2], "labels": [1, 2]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 64], "labels": [1, 2]}, "has 64 among its input_ids; allowed are integers from 0 to 63"),
        ({"input_ids": [-1, 2], "labels": [1, 2]}, "has -1 among its input_ids; allowed are integers from 0 to 63"),
        ({"input_ids": [X, 2], "labels": [1, 2]}, "has -100 among its input_ids; allowed are integers from 0 to 63"),
        ({"input_ids": [1, 2], "labels": [1, 64]},
         "has 64 among its labels; allowed are integers from 0 to 63, or -100"),
        ({"input_ids": [1, 2], "labels": [-1, 2]},
         "has -1 among its labels; allowed are integers from 0 to 63, or -100"),
        ({"input_ids": [1, 2], "labels": [1, 2, 3]}, "has 2 input_ids but 3 labels; they must be equally many"),
        ({"input_ids": [1, 2], "labels": [1]}, "has 2 input_ids but 1 labels; they must be equally many"),
        ({"input_ids": [1, 2], "labels": []}, "has 2 input_ids but 0 labels; they must be equally many"),
        ({"input_ids": [], "labels": []}, "has empty input_ids; remove the row"),
        ({"input_ids": None, "labels": [1]},
         "has no input_ids (absent or null), but other rows have; give it to every row"),
        ({"labels": [1]}, "has no input_ids (absent or null), but other rows have; give it to every row"),
        ({"input_ids": [1, 2]}, "has no labels (absent or null), but other rows have; give it to every row"),
        ({"input_ids": [1, None], "labels": [1, 2]}, "has None among its input_ids; they must be integers of 64 bits"),
        ({"input_ids": [1, 2], "labels": [1, None]}, "has None among its labels; they must be integers of 64 bits"),
        ({"input_ids": [1.5, 2], "labels": [1, 2]}, "has 1.5 among its input_ids; they must be integers of 64 bits"),
        ({"input_ids": ["1", 2], "labels": [1, 2]}, "has '1' among its input_ids; they must be integers of 64 bits"),
        ({"input_ids": [[1, 2]], "labels": [1]}, "has [1, 2] among its input_ids; they must be integers of 64 bits"),
        ({"input_ids": "1 2", "labels": [1]}, "has input_ids '1 2'; it must be a list of integers"),
        ({"input_ids": 2**70, "labels": [1]}, "has input_ids 1180591620717411303424; it must be a list of integers"),
        ({"input_ids": [2**70], "labels": [1]},
         "has 1180591620717411303424 among its input_ids; they must be integers of 64 bits"),
        ({"input_ids": [True, 2], "labels": [1, 2]}, "has True among its input_ids; they must be integers of 64 bits"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be(row, message):
    with pytest.raises(DataError) as caught:
        read([GOOD, GOOD, row, GOOD], start=10)
    assert str(caught.value) == f"row 12 of f.jsonl {message}"


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "attention_mask"])
def test_masks_hold_0_and_1(name):
    with pytest.raises(DataError) as caught:
        read([{"input_ids": [1, 2], name: [1, 2]}])
    assert str(caught.value) == f"row 0 of f.jsonl has 2 among its {name}; allowed are integers from 0 to 1"


def test_a_column_of_texts():
    with pytest.raises(DataError) as caught:
        read([{"input_ids": "[1, 2]"}])
    assert str(caught.value) == "The column 'input_ids' is of type string, but must hold lists of integers; convert it"
