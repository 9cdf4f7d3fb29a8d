"""Rows survive Arrow exactly: absent keys, real nulls, mixed types, numbers."""

import json

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset, Json, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.data import tables
from tuning.errors import DataError

TOOLS = [
    {"tools": [{"name": "weather", "properties": {"city": {"type": "string"}}}], "id": 1},
    {"tools": [{"name": "root", "properties": {"x": {"type": "number", "default": None}}}], "id": 2},
    {"tools": None, "id": 3},
]


def build(*chunks):
    return tables.build(chunks, name_row=lambda row: f"row {row} of f.jsonl")


def rows_of(table):
    columns = {name: tables.values(table.column(name)) for name in table.column_names}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_absent_keys_stay_absent_and_nulls_stay(tmp_path):
    # https://github.com/modelscope/ms-swift/pull/10125
    rows = Dataset(build(TOOLS))
    assert rows.features == {"tools": Json(), "id": Value("int64")}
    assert rows.to_list() == TOOLS

    mapped = rows.map(lambda row: {**row, "id": row["id"] + 1})
    mapped.to_parquet(tmp_path / "x.parquet")
    again = Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "cache"))
    assert [row["tools"] for row in again] == [row["tools"] for row in TOOLS]
    mapped.save_to_disk(tmp_path / "saved")
    assert [row["tools"] for row in datasets.load_from_disk(tmp_path / "saved")] == [row["tools"] for row in TOOLS]

    # the check can fail: as a plain struct the first tool gains the second one's parameter
    plain = Dataset(pa.Table.from_pylist(TOOLS)).to_list()
    assert plain[0]["tools"][0]["properties"] == {"city": {"type": "string"}, "x": None}


def test_columns_are_as_narrow_as_exact():
    table = build(
        [
            {
                "s": "a",
                "i": 1,
                "f": 1.5,
                "b": True,
                "ids": [1, 2],
                "mask": [True],
                "none": None,
                "mixed": 1,
                "big": 2**70,
            },
            {"s": None, "i": 2, "f": None, "b": False, "ids": [], "mask": [], "none": None, "mixed": "1", "big": 1},
        ]
    )
    kinds = {name: table.schema.field(name).type for name in table.column_names}
    assert kinds.pop("mixed") == kinds.pop("big") == pa.json_()
    assert kinds == {
        "s": pa.string(),
        "i": pa.int64(),
        "f": pa.float64(),
        "b": pa.bool_(),
        "ids": pa.list_(pa.int64()),
        "mask": pa.list_(pa.bool_()),
        "none": pa.null(),
    }
    assert [row["mixed"] for row in rows_of(table)] == [1, "1"]
    assert [row["big"] for row in rows_of(table)] == [2**70, 1]


def test_nested_numbers_keep_all_their_digits():
    # datasets' own JSON reader rewrites such a number as 3.1415926536
    rows = [{"arguments": {"x": 3.14159265358979, "n": 2**70, "e": 1e-7}}]
    assert rows_of(build(rows)) == rows


def test_a_column_that_appears_late_or_changes_its_kind():
    first, second = [{"a": 1, "x": [1]}], [{"a": "one", "b": {"k": None}, "x": [1, None]}]
    table = build(first, second)
    assert rows_of(table) == [
        {"a": 1, "x": [1], "b": None},
        {"a": "one", "x": [1, None], "b": {"k": None}},
    ]


def test_tables_of_other_readers_are_put_together():
    a = pa.table({"s": pa.array(["a"], pa.large_string()), "i": pa.array([1], pa.int32()), "ids": pa.array([[1]])})
    b = pa.table({"s": ["b"], "i": [2], "ids": pa.array([[2]], pa.list_(pa.int32())), "extra": [{"k": 1}]})
    table = tables.concatenate([a, b])
    assert table.schema.field("s").type == pa.large_string()
    assert table.schema.field("i").type == pa.int64()
    assert table.schema.field("ids").type == pa.list_(pa.int64())
    assert rows_of(table) == [
        {"s": "a", "i": 1, "ids": [1], "extra": None},
        {"s": "b", "i": 2, "ids": [2], "extra": {"k": 1}},
    ]


def test_nulls_that_a_struct_has_for_absent_keys_are_left_out():
    column = pa.chunked_array([pa.array([[{"role": "user", "name": None}], [{"role": "tool", "name": "f"}]])])
    assert tables.values(column) == [[{"role": "user"}], [{"role": "tool", "name": "f"}]]
    # lists and scalars are not touched
    assert tables.values(pa.chunked_array([pa.array([[1, None], None])])) == [[1, None], None]


@pytest.mark.parametrize("row", [{"text": "half \ud83d"}, {"messages": [{"content": "half \ud83d"}]}])
def test_half_a_surrogate_pair_names_the_row(row):
    with pytest.raises(DataError) as caught:
        build([{"text": "a"}, {"text": "b"}], [{"text": "c"}, row])
    assert str(caught.value) == (
        "row 3 of f.jsonl holds half of a surrogate pair (\\ud83d), which is no character; mend the text, often an "
        "emoji cut in two"
    )


def test_rows_without_columns_are_still_counted():
    assert build([{}, {}]).num_rows == 2
    assert rows_of(build([{}], [{"a": 1}])) == [{"a": None}, {"a": 1}]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text('aü🙂\n\\"', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.dictionaries(st.sampled_from("abc"), json_values, max_size=3), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_any_rows_come_back_as_they_were(chunks):
    table = build(*chunks)
    names = dict.fromkeys(name for chunk in chunks for row in chunk for name in row)
    expected = [{name: row.get(name) for name in names} for chunk in chunks for row in chunk]
    got = rows_of(table)
    if names:
        # compared as JSON text: 1, 1.0 and true are different there
        assert [json.dumps({name: row[name] for name in names}) for row in got] == [json.dumps(row) for row in expected]
    assert table.num_rows == len(expected)


def test_json_columns_are_recognised():
    assert tables.is_json(pa.json_())
    assert not tables.is_json(pa.string())
    assert Dataset(build([{"a": [{"b": 1}]}])).features["a"] == Json()
    assert Dataset(build([{"a": [1]}])).features["a"] == List(Value("int64"))
