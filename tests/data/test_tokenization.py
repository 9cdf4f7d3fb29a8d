"""From files to samples: what comes out, and the ways there: processes, cache, streaming."""

import contextlib
import logging

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value

from tests import tiny
from tuning.config.configs import DataArguments
from tuning.data import cache, sources, tokenization, workers
from tuning.data.collators import IGNORE_INDEX
from tuning.errors import DataError

X = IGNORE_INDEX
A, B, C, D = tiny.ids("abcd")


def read_and_tokenize(path, tmp_path, tokenizer=None, *, max_seq_length=256, main_first=None, **flags):
    config = DataArguments(training_data_path=path, **flags)
    return tokenization.tokenize(
        sources.read(config, seed=0, cache_dir=str(tmp_path / "cache")),
        tokenizer or tiny.build_tokenizer(),
        config,
        max_seq_length=max_seq_length,
        cache_dir=str(tmp_path / "cache"),
        main_first=main_first,
    )


CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "hey"},
            {"role": "assistant", "content": "sup"},
        ]
    },
]


@pytest.mark.parametrize("split", [0.0, 0.5])
def test_rows_of_several_kinds_are_told_apart(prepare, write, split):
    path = write([{"input": "a", "output": "b", "id": 1}, {"prompt": "a", "completion": "b", "id": 2}])
    with pytest.raises(DataError) as caught:
        prepare(path, validation_split=split)
    # whichever kind the columns are taken for, the other row is named with what it has
    assert str(caught.value) == (
        f"row 0 of {path}: there is nothing (absent or null) in prompt, completion, which other rows have; it has "
        "input, output, id; all rows must be of one kind"
    )


def test_files_of_several_kinds_are_told_apart(prepare, write, tmp_path):
    write([{"messages": CHATS[0]["messages"]}], "folder/a.jsonl")
    other = write([{"text": "ab"}], "folder/b.jsonl")
    with pytest.raises(DataError) as caught:
        prepare(str(tmp_path / "folder"))
    assert str(caught.value) == (
        f"row 0 of {other}: there is nothing (absent or null) in messages, which other rows have; it has text; all "
        "rows must be of one kind"
    )


# ---- what comes out ----


def test_columns_types_and_lengths(prepare):
    data = prepare([{"text": "a" * length, "id": length} for length in (3, 1, 7)])
    assert data.train.features == Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
    assert data.lengths.tolist() == [4, 2, 8] == [len(ids) for ids in data.train["input_ids"]]
    assert data.lengths.dtype == np.int64
    assert "columns not used: id" in str(data.report)
    assert data.report.kind == "texts in text; trained on: all"


def test_lengths_of_chosen_and_joined_samples(prepare):
    samples = prepare([{"text": "a" * length} for length in (3, 1, 7)]).train
    assert tokenization.sample_lengths(samples.select([2, 0])).tolist() == [8, 4]
    assert tokenization.sample_lengths(samples.select(range(1, 3))).tolist() == [2, 8]
    assert tokenization.sample_lengths(samples.select([])).tolist() == []


def test_batches_and_processes_change_nothing(prepare, monkeypatch):
    rows = [{"prompt": "q" * (row % 7), "completion": "" if row % 5 == 4 else "a" * (row % 3 + 1)} for row in range(40)]
    whole = prepare(rows)
    monkeypatch.setattr(tokenization, "_BATCH_ROWS", 7)
    # the code's version is in the key: another key makes it do the work again
    for number, flags in enumerate(({}, {"preprocessing_num_workers": 3})):
        monkeypatch.setattr(cache, "code_version", lambda number=number: str(number))
        other = prepare(rows, **flags)
        assert other.train[:] == whole.train[:]
        assert other.report.counts == whole.report.counts
        assert "read from the cache" not in str(other.report)


def test_large_sets_are_spread_over_processes(prepare, monkeypatch):
    asked = []
    plain = workers.map_ordered

    def watch(work, items, *, num_workers):
        asked.append(num_workers)
        return plain(work, items, num_workers=num_workers)

    monkeypatch.setattr(workers, "map_ordered", watch)
    monkeypatch.setattr(tokenization, "_MIN_ROWS_TO_FORK", 3)
    for num_cores, num_rows, flags in (
        (64, 2, {}),
        (64, 3, {}),
        (4, 4, {}),
        (2, 5, {}),
        (64, 6, {"preprocessing_num_workers": 3}),
    ):
        monkeypatch.setattr(workers, "num_cores", lambda num_cores=num_cores: num_cores)
        prepare([{"text": "a"}] * num_rows, **flags)
    assert asked == [1, 16, 4, 1, 3]


def test_validation_rows_go_the_same_way(prepare, write):
    validation = write([{"text": "abcd", "other": 1}], "validation.jsonl")
    data = prepare([{"text": "ab"}], validation_data_path=validation)
    assert data.eval["input_ids"][:] == [[A, B, C, D, 2]]
    assert data.report.counts["eval"].tokens == 5
    with pytest.raises(DataError, match=f"^No row of {validation}".replace(".", r"\.")):
        prepare([{"text": "ab"}], validation_data_path=write([{"text": " "}], "validation.jsonl"))


# ---- cache ----


def test_a_second_run_reads_the_cache_and_says_so(write, tmp_path, monkeypatch):
    path = write([{"text": "ab"}, {"text": ""}])
    first = read_and_tokenize(path, tmp_path)
    monkeypatch.setattr(workers, "map_ordered", None)
    second = read_and_tokenize(path, tmp_path)
    assert second.train[:] == first.train[:]
    assert second.report.counts == first.report.counts
    assert "train: read from the cache" in str(second.report)
    assert "train: 1 row dropped, empty text: row 1 of " in str(second.report)
    # nothing is written beside the user's file
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["rows.jsonl"]


def test_whatever_changes_samples_changes_the_key(write, tmp_path):
    rows = [{"text": "a:b", "other": "c:d"}]
    path = write(rows)
    read_and_tokenize(path, tmp_path)

    def is_made_anew(path=path, tokenizer=None, **flags):
        return "read from the cache" not in str(read_and_tokenize(path, tmp_path, tokenizer, **flags).report)

    assert not is_made_anew()
    assert not is_made_anew(preprocessing_num_workers=1)
    assert is_made_anew(max_seq_length=3)
    assert is_made_anew(max_seq_length_policy="drop")
    assert is_made_anew(response_template=":")
    assert is_made_anew(dataset_text_field="other")
    assert is_made_anew(train_on_input=True)
    assert is_made_anew(tokenizer=tiny.build_tokenizer(adds_bos=True))
    assert is_made_anew(tokenizer=tiny.build_tokenizer(chat_template=None))
    tokenizer = tiny.build_tokenizer()
    tokenizer.eos_token = "<|end|>"
    assert is_made_anew(tokenizer=tokenizer)
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_tokens(["a:"])
    assert is_made_anew(tokenizer=tokenizer)
    # the same size and name, written within the tick of a coarse clock
    write([{"text": "a:c", "other": "c:d"}])
    assert is_made_anew()
    assert not is_made_anew()


def test_calls_of_the_tokenizer_between_runs_do_not_change_the_key(write, tmp_path):
    tokenizer = tiny.build_tokenizer()
    path = write([{"text": "ab"}])
    read_and_tokenize(path, tmp_path, tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert "read from the cache" in str(read_and_tokenize(path, tmp_path, tokenizer).report)


def test_a_cache_that_cannot_be_written(write, tmp_path, caplog):
    (tmp_path / "cache").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        data = read_and_tokenize(write([{"text": "ab"}]), tmp_path)
    assert data.train["input_ids"][:] == [[A, B, 2]]
    assert "prepared data cannot be cached" in caplog.text


def test_one_rank_may_go_first(write, tmp_path):
    entered = []

    @contextlib.contextmanager
    def main_first():
        entered.append("in")
        try:
            yield
        finally:
            entered.append("out")

    read_and_tokenize(write([{"text": "ab"}]), tmp_path, main_first=main_first())
    assert entered == ["in", "out"]
    with pytest.raises(DataError):
        read_and_tokenize(write([{"text": ""}]), tmp_path, main_first=main_first())
    # the others are let go when the first one fails
    assert entered == ["in", "out"] * 2


# ---- streaming ----


def test_streamed_samples_are_the_same(prepare, caplog, monkeypatch):
    monkeypatch.setattr(tokenization, "_STREAMED_ROWS", 3)
    rows = [{"prompt": "q" * row, "completion": "" if row == 4 else "a", "id": row} for row in range(8)]
    streamed = prepare(rows, streaming=True)
    with caplog.at_level(logging.WARNING):
        assert list(streamed.train) == list(prepare(rows).train)
    assert "1 row(s) dropped, empty answer: row 4 of " in caplog.text
    assert streamed.lengths.tolist() == []
    assert "train is streamed: what is dropped of it is logged as training goes" in str(streamed.report)
    # a second pass gives the same again
    assert len(list(streamed.train)) == len(list(streamed.train)) == 7


def test_streamed_columns_that_come_late(prepare, monkeypatch):
    monkeypatch.setattr(tokenization, "_STREAMED_ROWS", 2)
    tokenizer = tiny.build_tokenizer(chat_template=tiny.RAW_TEMPLATE)
    rows = [CHATS[0], CHATS[0], {**CHATS[0], "tools": [{"name": "f"}]}]
    streamed = list(prepare(rows, tokenizer, streaming=True).train)
    assert streamed == list(prepare(rows, tokenizer).train)
    assert len(streamed[2]["input_ids"]) > len(streamed[0]["input_ids"])


@pytest.mark.parametrize("batch_rows", [1, 2])
def test_streamed_tokens(prepare, monkeypatch, batch_rows):
    monkeypatch.setattr(tokenization, "_STREAMED_ROWS", batch_rows)
    bare, labelled = {"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [X, 2]}
    assert [row["labels"] for row in prepare([bare, bare, bare], streaming=True).train] == [[X, 2]] * 3
    assert [row["labels"] for row in prepare([labelled] * 3, streaming=True).train] == [[X, 2]] * 3
    with pytest.raises(DataError, match=r"row 1 of .* has no labels \(absent or null\), but other rows have"):
        list(prepare([labelled, bare], streaming=True).train)


def test_a_saved_data_set_with_features_of_its_own(prepare, tmp_path):
    Dataset.from_list([{"text": "ab"}, {"text": "cd"}]).select([1]).save_to_disk(tmp_path / "saved")
    assert prepare(str(tmp_path / "saved")).train["input_ids"][:] == [[C, D, 2]]
