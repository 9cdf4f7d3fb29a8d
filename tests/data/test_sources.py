"""Flags to rows, the pre-flight, and the flags that contradict each other."""

import json
import subprocess
import sys

import pytest

from tuning.config.configs import DataArguments
from tuning.data import sources
from tuning.errors import DataError

ROWS = [{"input": str(row), "output": "x"} for row in range(10)]


def read(tmp_path, seed=0, **flags):
    return sources.read(DataArguments(**flags), seed=seed, cache_dir=str(tmp_path / "cache"))


def test_training_and_validation_files(write, tmp_path):
    train, validation = write(ROWS), write(ROWS[:2], "validation.jsonl")
    raw = read(tmp_path, training_data_path=train, validation_data_path=validation)
    assert raw.train.to_list() == ROWS
    assert raw.eval.to_list() == ROWS[:2]
    assert raw.train_origin.name(9) == f"row 9 of {train}"
    assert raw.eval_origin.name(1) == f"row 1 of {validation}"


def test_validation_split(write, tmp_path):
    raw = read(tmp_path, training_data_path=write(ROWS), validation_split=0.2)
    assert (len(raw.train), len(raw.eval)) == (8, 2)
    held_out = raw.eval["input"][:]
    assert [raw.eval_origin.name(row).split()[1] for row in range(2)] == held_out
    other = read(tmp_path, seed=5, training_data_path=write(ROWS), validation_split=0.2)
    assert other.eval["input"][:] != held_out


def test_no_validation(write, tmp_path):
    raw = read(tmp_path, training_data_path=write(ROWS))
    assert raw.eval is None
    assert raw.eval_origin is None


def test_a_mixture_and_its_validation(write, tmp_path):
    config = {"datasets": [{"name": "a", "data_paths": [write(ROWS)], "split": {"validation": 0.3}}]}
    path = write(json.dumps(config), "mix.json")
    raw = read(tmp_path, data_config_path=path)
    assert (len(raw.train), len(raw.eval)) == (7, 3)
    # a validation file takes the place of the held-out rows
    raw = read(tmp_path, data_config_path=path, validation_data_path=write(ROWS[:1], "v.jsonl"))
    assert (len(raw.train), len(raw.eval)) == (7, 1)


def test_streaming(write, tmp_path):
    flags = {"training_data_path": write(ROWS), "validation_data_path": write(ROWS[:2], "v.jsonl")}
    raw = read(tmp_path, streaming=True, **flags)
    assert [item["row"] for item in raw.train] == ROWS
    assert raw.eval.to_list() == ROWS[:2]


@pytest.mark.parametrize("content", [b"", b"{", b"\0"])
def test_the_pre_flight_says_what_reading_would(write, content):
    config = DataArguments(training_data_path=write(content))
    with pytest.raises(DataError) as early:
        sources.check(config)
    with pytest.raises(DataError) as late:
        sources.read(config, seed=0)
    assert str(early.value) == str(late.value)


def test_the_pre_flight_looks_at_every_path(write, tmp_path):
    good, empty = write(ROWS), write("", "empty.jsonl")
    mix = write(json.dumps({"datasets": [{"name": "a", "data_paths": [good, "no.jsonl"]}]}), "mix.json")
    sources.check(DataArguments(training_data_path=good))
    for flags, message in (
        ({"training_data_path": good, "validation_data_path": empty},
         f"{empty} is empty; it must hold one row or more"),
        ({"training_data_path": "no.jsonl"}, "--training_data_path no.jsonl does not exist; give a file, a folder of "
         "files, or the name of a hub data set"),
        ({"data_config_path": mix}, f"The data path no.jsonl of 'a' in --data_config_path {mix} does not exist; give a "
         "file, a folder of files, or the name of a hub data set"),
    ):  # fmt: skip
        with pytest.raises(DataError) as caught:
            sources.check(DataArguments(**flags))
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "No training data was given; give --training_data_path or --data_config_path"),
        (
            {"training_data_path": "a", "data_config_path": "b"},
            "--training_data_path and --data_config_path both name the training data; keep one of them",
        ),
        (
            {"training_data_path": "a", "validation_split": 1.0},
            "--validation_split is 1.0; it must be from 0 to below 1",
        ),
        (
            {"training_data_path": "a", "validation_split": -0.1},
            "--validation_split is -0.1; it must be from 0 to below 1",
        ),
        (
            {"training_data_path": "a", "validation_split": 0.1, "validation_data_path": "b"},
            "--validation_split and --validation_data_path both make the evaluation set; keep one of them",
        ),
        (
            {"data_config_path": "a", "validation_split": 0.1},
            "--validation_split does not say which data set of --data_config_path it splits; give split in that file",
        ),
        (
            {"training_data_path": "a", "validation_split": 0.1, "streaming": True},
            "--validation_split needs all rows at hand, which --streaming does not have; drop one of them",
        ),
        (
            {"data_config_path": "a", "streaming": True},
            "--data_config_path needs all rows at hand, which --streaming does not have; drop one of them",
        ),
    ],
)
def test_flags_that_contradict_each_other(flags, message):
    with pytest.raises(DataError) as caught:
        sources.check(DataArguments(**flags))
    assert str(caught.value) == message


def test_the_pre_flight_loads_no_library(write):
    code = (
        "import sys\n"
        "from tuning.config.configs import DataArguments\n"
        "from tuning.data import sources\n"
        f"sources.check(DataArguments(training_data_path={write(ROWS)!r}))\n"
        "print({'datasets', 'pyarrow', 'torch', 'transformers', 'trl'} & set(sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
