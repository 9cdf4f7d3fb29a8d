"""Every kind of file and folder gives the same rows; splits and mixtures lose none."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from tuning.data import readers
from tuning.errors import DataError

ROWS = [{"input": "one", "output": "1"}, {"input": "two", "output": "2"}, {"input": "drei ü", "output": "3"}]
CHAT = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"f": 1}]}]},
    {"messages": [{"role": "user", "content": "b", "name": "n"}]},
]


@pytest.fixture
def load(tmp_path):
    def load_(path):
        return readers.load(str(path), asked="--training_data_path P", cache_dir=str(tmp_path / "cache"))

    return load_


def save(rows, folder, kind):
    """Write rows in one of the formats that are not text, and return the path."""
    path = folder / f"rows.{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "stream.arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "saved":
        Dataset.from_list(rows).save_to_disk(path)
    elif kind == "saved dict":
        DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:1])}).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream.arrow", "saved", "saved dict"])
def test_formats_of_other_libraries(load, tmp_path, kind):
    path = save(ROWS, tmp_path, kind)
    part = load(path)
    assert part.rows.to_list() == ROWS
    assert part.origin.name(2) == f"row 2 of {path}"


def test_a_parquet_file_under_another_suffix(load, tmp_path):
    path = save(ROWS, tmp_path, "parquet").rename(tmp_path / "rows.json")
    assert load(path).rows.to_list() == ROWS


def test_glob_signs_in_a_path_mean_themselves(load, write):
    assert load(write(ROWS, "data[1]*/rows?.jsonl")).rows.to_list() == ROWS


def test_a_folder_of_files_of_several_formats(load, write, tmp_path):
    folder = tmp_path / "folder"
    write(ROWS, "folder/a.jsonl")
    write("input,output\nfour,4\n", "folder/b.csv")
    save(ROWS[:1], folder, "parquet")
    part = load(folder)
    assert part.rows.to_list() == [*ROWS, {"input": "four", "output": "4"}, ROWS[0]]
    assert [part.origin.name(row) for row in (0, 3, 4)] == [
        f"row 0 of {folder}/a.jsonl",
        f"row 0 of {folder}/b.csv",
        f"row 0 of {folder}/rows.parquet",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"PAR1 cut off"), "{path} is a damaged parquet file: "),
        (lambda path: path.write_bytes(b"ARROW1 cut off"), "{path} is a damaged arrow file: "),
        (lambda path: pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path),
         "{path} holds no rows; it must hold one or more"),
    ],
)  # fmt: skip
def test_damaged_and_empty_files(load, tmp_path, make, message):
    path = tmp_path / "rows.parquet"
    make(path)
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(message.format(path=path))


def test_damaged_and_unsuitable_saved_folders(load, tmp_path):
    path = save(ROWS, tmp_path, "saved")
    (path / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match=r"^--training_data_path P is a damaged folder of a saved data set: "):
        load(path)
    DatasetDict({"test": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "dict")
    with pytest.raises(DataError) as caught:
        load(tmp_path / "dict")
    assert str(caught.value) == (
        "--training_data_path P has the splits test but no train; give the folder of one of them"
    )


def test_a_hub_name_that_cannot_be_had(load, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("Couldn't reach\n'owner/name'")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError) as caught:
        load("owner/name")
    assert str(caught.value) == (
        "--training_data_path P is neither a file nor a folder here, and the hub gives no data set of that name: "
        "Couldn't reach 'owner/name'"
    )


def test_a_hub_name(load, monkeypatch):
    asked = {}

    def give(name, **kwargs):
        asked.update(name=name, **kwargs)
        return Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", give)
    assert load("owner/name").rows.to_list() == ROWS
    assert (asked["name"], asked["split"], asked["streaming"]) == ("owner/name", "train", False)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Dataset.from_list(ROWS).select([]))
    with pytest.raises(DataError, match=r"^--training_data_path P holds no rows; it must hold one or more$"):
        load("owner/name")


def test_large_files_are_mapped_from_the_cache_and_change_with_the_content(load, write, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_MAX_BYTES_IN_MEMORY", 10)
    path = write(CHAT)
    assert load(path).rows.to_list() == CHAT
    kept = list((tmp_path / "cache" / "packtune").iterdir())
    assert [file.suffix for file in kept] == [".arrow"]
    stamp = kept[0].stat().st_mtime_ns
    assert load(path).rows.to_list() == CHAT
    assert kept[0].stat().st_mtime_ns == stamp
    # the same size, and the same time if the disk's clock is coarse: the content decides
    changed = json.loads(json.dumps(CHAT).replace('"a"', '"z"'))
    write(changed)
    assert load(path).rows.to_list() == changed
    assert [file.name for file in Path(path).parent.iterdir() if file.is_file()] == ["rows.jsonl"]


def test_split_keeps_every_row_once_and_its_name(load, write):
    part = load(write([{"text": str(row)} for row in range(20)]))
    train, held_out = readers.split(part, 0.25, seed=3, asked="--validation_split 0.25")
    assert (len(train.rows), len(held_out.rows)) == (15, 5)
    texts = train.rows["text"][:] + held_out.rows["text"][:]
    assert sorted(map(int, texts)) == list(range(20))
    assert held_out.rows["text"][:] == sorted(held_out.rows["text"][:], key=int)
    for half in (train, held_out):
        names = [half.origin.name(row) for row in range(len(half.rows))]
        assert [name.split()[1] for name in names] == half.rows["text"][:]
    again = readers.split(part, 0.25, seed=3, asked="")[1]
    other = readers.split(part, 0.25, seed=4, asked="")[1]
    assert again.rows["text"][:] == held_out.rows["text"][:] != other.rows["text"][:]
    assert again.origin.fingerprint == held_out.origin.fingerprint != train.origin.fingerprint


def test_a_split_that_leaves_nothing(load, write):
    with pytest.raises(DataError) as caught:
        readers.split(load(write(ROWS[:1])), 0.1, seed=0, asked="--validation_split 0.1")
    assert str(caught.value) == (
        "--validation_split 0.1 of 1 row(s) leaves none to train on; lower it, or give more rows"
    )


def mix(write, config, seed=0):
    return readers.mix(Path(write(json.dumps(config), "mix.json")), seed=seed, cache_dir=None)


def test_sets_follow_one_another_without_sampling(write):
    a, b = write(ROWS, "a.jsonl"), write([{"question": "four", "answer": "4"}], "b.jsonl")
    config = {
        "datasets": [
            {"name": "a", "data_paths": [a]},
            {"name": "b", "data_paths": [b], "rename_columns": {"question": "input", "answer": "output"}},
        ]
    }
    train, held_out = mix(write, config)
    assert train.rows.to_list() == [*ROWS, {"input": "four", "output": "4"}]
    assert train.origin.name(3) == f"row 0 of {b}"
    assert held_out is None


def test_sets_are_drawn_by_share_and_named(write):
    a = write([{"text": f"a{row}"} for row in range(30)], "a.jsonl")
    b = write([{"text": f"b{row}"} for row in range(10)], "b.jsonl")
    config = {
        "datasets": [
            {"name": "a", "data_paths": [a], "sampling": 0.5, "split": {"train": 0.9, "validation": 0.1}},
            {"name": "b", "data_paths": [b], "sampling": 0.5},
        ]
    }
    train, held_out = mix(write, config)
    texts = train.rows["text"][:]
    assert len(held_out.rows) == 3
    assert not set(texts) & set(held_out.rows["text"][:])
    assert len(set(texts)) == 37
    for row, text in enumerate(texts):
        assert train.origin.name(row) == f"row {text[1:]} of {a if text[0] == 'a' else b}"
    for row, text in enumerate(held_out.rows["text"][:]):
        assert held_out.origin.name(row) == f"row {text[1:]} of {a}"
    assert mix(write, config, seed=1)[0].rows["text"][:] != texts
    seeded = {**config, "dataprocessor": {"seed": 5}}
    assert mix(write, seeded, seed=1)[0].rows["text"][:] == mix(write, seeded, seed=2)[0].rows["text"][:]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"qustion": "input"},
            "rename_columns of 'a' in --data_config_path {path} names the column 'qustion', which is not there; it has "
            "input, output",
        ),
        (
            {"input": "output"},
            "rename_columns of 'a' in --data_config_path {path} would make two columns 'output'; rename or drop one of "
            "them",
        ),
    ],
)
def test_renames_that_cannot_be(write, tmp_path, names, message):
    config = {"datasets": [{"name": "a", "data_paths": [write(ROWS, "a.jsonl")], "rename_columns": names}]}
    with pytest.raises(DataError) as caught:
        mix(write, config)
    assert str(caught.value) == message.format(path=tmp_path / "mix.json")


def test_renaming_and_order_change_the_fingerprint(write):
    a, b = write(ROWS, "a.jsonl"), write(ROWS[:2], "b.jsonl")
    plain = {"datasets": [{"name": "a", "data_paths": [a, b]}]}
    renamed = {"datasets": [{"name": "a", "data_paths": [a, b], "rename_columns": {"input": "x"}}]}
    swapped = {"datasets": [{"name": "a", "data_paths": [b, a]}]}
    prints = {mix(write, config)[0].origin.fingerprint for config in (plain, renamed, swapped)}
    assert len(prints) == 3
    assert mix(write, plain)[0].origin.fingerprint in prints


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "folder", "saved"])
def test_streamed_rows_are_the_same(write, tmp_path, kind):
    rows = CHAT if kind == "jsonl" else ROWS
    if kind == "jsonl":
        path = write(rows)
    elif kind == "folder":
        write(ROWS[:2], "folder/a.jsonl")
        write(ROWS[2:], "folder/b.jsonl")
        path = tmp_path / "folder"
    else:
        path = save(ROWS, tmp_path, kind)
    stream, origin = readers.stream(str(path), asked="--training_data_path P")
    assert [item["row"] for item in stream] == rows
    assert origin.name(1) == f"row 1 of {path}"
