import os

import pytest

from tests.config.inputs import argv_of, broken_rules, launch, read, valid_flags
from tuning.config.validation import check, resolve
from tuning.errors import ConfigError


def problems(flags):
    config = resolve(read(*argv_of(flags)), launch())
    try:
        check(config, launch())
    except ConfigError as error:
        return list(error.problems)
    return []


def test_what_must_be_given():
    assert problems({}) == [
        "--model_name_or_path is not given; name a folder, a hub model or a .gguf file",
        "--training_data_path is not given; name a file, a folder or a hub data set",
        "--output_dir is not given; name a folder for checkpoints and the model",
    ]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("model_name_or_path", "./gone",
         "--model_name_or_path ./gone does not exist; correct the path or give a hub name"),
        ("model_name_or_path", "gone.gguf",
         "--model_name_or_path gone.gguf does not exist; correct the path or give a hub name"),
        ("model_name_or_path", "a/b/c",
         "--model_name_or_path a/b/c does not exist; correct the path or give a hub name"),
        ("tokenizer_name_or_path", "/gone",
         "--tokenizer_name_or_path /gone does not exist; correct the path or give a hub name"),
        ("training_data_path", "gone.jsonl", "--training_data_path gone.jsonl does not exist; correct the path"),
        ("training_data_path", "../gone", "--training_data_path ../gone does not exist; correct the path"),
        ("validation_data_path", "gone.parquet", "--validation_data_path gone.parquet does not exist; correct "
                                                 "the path"),
        ("deepspeed", "gone.json", "--deepspeed gone.json does not exist; correct the path or give a JSON object"),
        ("fsdp_config", "gone.json", "--fsdp_config gone.json does not exist; correct the path or give a JSON object"),
        ("accelerator_config", "x", "--accelerator_config x does not exist; correct the path or give a JSON object"),
    ],
)  # fmt: skip
def test_a_path_that_is_not_there(tmp_path, name, value, problem):
    assert problems(valid_flags(tmp_path) | {name: value}) == [problem]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_name_or_path", "org/model-1.5B"),
        ("model_name_or_path", "gpt2"),
        ("training_data_path", "org/data"),
        ("deepspeed", "auto"),
        ("deepspeed", '{"zero_optimization": {"stage": 2}}'),
    ],
)
def test_a_hub_name_is_no_path(tmp_path, name, value):
    assert problems(valid_flags(tmp_path) | {name: value}) == []


def test_data_config_path_in_place_of_training_data_path(tmp_path):
    flags = valid_flags(tmp_path)
    config = tmp_path / "data.yaml"
    assert problems(flags | {"data_config_path": str(config)}) == [
        "--training_data_path and --data_config_path both name the training data; keep one",
        f"--data_config_path {config} does not exist; correct the path",
    ]
    config.write_text("datasets: []")
    del flags["training_data_path"]
    assert problems(flags | {"data_config_path": str(config)}) == []


def test_a_gguf_file_twice(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert problems(valid_flags(tmp_path) | {"model_name_or_path": str(path), "gguf_file": "model.gguf"}) == [
        "--gguf_file names a file inside a folder, but --model_name_or_path is a .gguf file; keep one"
    ]


def test_output_dir_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    assert problems(valid_flags(tmp_path) | {"output_dir": str(path)}) == [
        f"--output_dir {path} is a file, not a folder; name a folder"
    ]
    assert problems(valid_flags(tmp_path) | {"output_dir": str(path / "below" / "it")}) == [
        f"--output_dir {path / 'below' / 'it'} cannot be made, since {path} is a file; name another folder"
    ]
    assert problems(valid_flags(tmp_path) | {"save_model_dir": str(path)}) == [
        f"--save_model_dir {path} is a file, not a folder; name a folder"
    ]


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A folder nobody can write to, also for root, whom permissions do not bind."""
    folder = tmp_path / "locked"
    folder.mkdir()
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: real(path, mode) and not (str(path) == str(folder) and mode & os.W_OK)
    )
    return folder


def test_output_dir_that_cannot_be_written(tmp_path, read_only):
    assert problems(valid_flags(tmp_path) | {"output_dir": str(read_only)}) == [
        f"--output_dir {read_only} cannot be written, since it is read-only; change permissions or name another folder"
    ]
    below = read_only / "a" / "b"
    assert problems(valid_flags(tmp_path) | {"output_dir": str(below)}) == [
        f"--output_dir {below} cannot be written, since its parent {read_only} is read-only; change permissions "
        f"or name "
        "another folder"
    ]


def test_data_that_cannot_be_read(tmp_path, monkeypatch):
    path = str(tmp_path / "data.jsonl")
    real = os.access
    monkeypatch.setattr(os, "access", lambda name, mode: str(name) != path and real(name, mode))
    assert broken_rules(tmp_path) == [
        f"--training_data_path {path} cannot be read; change its permissions or name another"
    ]


def test_nothing_is_made(tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert problems(valid_flags(tmp_path) | {"output_dir": str(tmp_path / "x" / "y")}) == []
    assert sorted({path.name for path in tmp_path.iterdir()} - set(before)) == ["data.jsonl", "model"]


@pytest.mark.parametrize("name", ["model_name_or_path", "tokenizer_name_or_path"])
def test_a_model_that_may_not_be_looked_into(tmp_path, monkeypatch, name):
    flags = valid_flags(tmp_path)
    folder = str(tmp_path / "private")
    os.mkdir(folder)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != folder and real(path, mode))
    assert problems(flags | {name: folder}) == [
        f"--{name} {folder} cannot be read; change its permissions or name another"
    ]
