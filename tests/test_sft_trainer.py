"""The entry point with the run itself replaced."""

import logging
import sys
import types

import pytest

from tests.config.inputs import argv_of, valid_flags
from tuning import sft_trainer
from tuning.errors import DataError


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TERMINATION_LOG_FILE", "SFT_TRAINER_CONFIG_JSON_PATH"):
        monkeypatch.delenv(name, raising=False)
    root = logging.getLogger("tuning")
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


@pytest.fixture
def run(monkeypatch):
    """Put a module in place of tuning.run; returns the calls, and takes an error to raise."""
    module = types.ModuleType("tuning.run")
    module.calls, module.error = [], None

    def run_it(config, launch):
        module.calls.append((config, launch))
        if module.error is not None:
            raise module.error

    module.run, module.train = run_it, "the function"
    monkeypatch.setitem(sys.modules, "tuning.run", module)
    monkeypatch.setattr("tuning.run", module, raising=False)
    return module


def test_a_run_that_ends_well(tmp_path, run, capsys):
    argv = [*argv_of(valid_flags(tmp_path)), "--max_length", "64", "--fast_kernels", "none"]
    assert sft_trainer.main(argv) == 0
    config, launch = run.calls[0]
    assert config.data.max_seq_length == 64  # resolved
    assert launch.world_size == 1
    assert "--fast_kernels none asks for nothing, so it is off" in capsys.readouterr().err


def test_the_command_line_of_the_process(tmp_path, run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sft_trainer", *argv_of(valid_flags(tmp_path))])
    assert sft_trainer.main() == 0
    assert len(run.calls) == 1


def test_an_argument_error_is_the_message_alone(run, capsys):
    assert sft_trainer.main(["--max_step", "3"]) == 1
    assert capsys.readouterr().err == "--max_step is no flag; did you mean max_steps?\n"
    assert run.calls == []


def test_broken_rules_are_told_before_anything_is_loaded(tmp_path, run, capsys):
    assert sft_trainer.main([*argv_of(valid_flags(tmp_path)), "--fp16", "--bf16", "--seed", "-1"]) == 1
    assert capsys.readouterr().err == (
        "--fp16 and --bf16 are both true; keep one\n"
        "--seed is -1, but takes a whole number from 0 to 4294967295; correct the value\n"
    )
    assert run.calls == []


def test_other_ranks_are_silent_and_end_too(run, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sft_trainer.main(["--max_step", "3"]) == 1
    assert capsys.readouterr().err == ""


def test_an_error_of_the_run_on_another_rank_is_told(tmp_path, run, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run.error = DataError("rows.jsonl, row 3: no text")
    assert sft_trainer.main(argv_of(valid_flags(tmp_path))) == 1
    assert capsys.readouterr().err == "[rank 1] rows.jsonl, row 3: no text\n"


def test_an_internal_error_has_a_traceback_and_203(tmp_path, run, capsys):
    run.error = KeyError("x")
    assert sft_trainer.main(argv_of(valid_flags(tmp_path))) == 203
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("KeyError: 'x'\n")


def test_an_interrupt_is_130(tmp_path, run, capsys):
    run.error = KeyboardInterrupt()
    assert sft_trainer.main(argv_of(valid_flags(tmp_path))) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_launch_variable_that_is_no_number(run, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "first")
    assert sft_trainer.main(["--max_steps", "3"]) == 1
    text = capsys.readouterr().err
    assert "RANK" in text
    assert "Traceback" not in text


def test_ranks_that_the_launcher_did_not_start_are_started_after_the_checks(tmp_path, run, monkeypatch):
    started = []

    def start(num_processes, argv):
        started.append((num_processes, list(argv)))
        raise SystemExit(0)

    monkeypatch.setattr(sft_trainer, "find_missing_processes", lambda: 2)
    monkeypatch.setattr(sft_trainer, "relaunch", start)
    argv = argv_of(valid_flags(tmp_path))
    assert sft_trainer.main([*argv, "--seed", "-1"]) == 1
    with pytest.raises(SystemExit):
        sft_trainer.main(argv)
    assert started == [(2, argv)]
    assert run.calls == []


def test_the_last_error_goes_to_the_termination_log(tmp_path, run, monkeypatch, capsys):
    log = tmp_path / "termination.log"
    monkeypatch.setenv("TERMINATION_LOG_FILE", str(log))
    sft_trainer.main(["--max_step", "3"])
    assert log.read_text() == "--max_step is no flag; did you mean max_steps?\n"
    run.error = ZeroDivisionError("by zero")
    sft_trainer.main(argv_of(valid_flags(tmp_path)))
    assert log.read_text().endswith("ZeroDivisionError: by zero\n")
    monkeypatch.setenv("TERMINATION_LOG_FILE", str(tmp_path))
    capsys.readouterr()
    assert sft_trainer.main(["--max_step", "3"]) == 1
    assert capsys.readouterr().err == (
        "--max_step is no flag; did you mean max_steps?\n"
        f"TERMINATION_LOG_FILE {tmp_path} cannot be written: [Errno 21] Is a directory: '{tmp_path}'\n"
    )


def test_the_file_by_environment_variable(tmp_path, run, monkeypatch):
    import json

    path = tmp_path / "run.json"
    path.write_text(json.dumps({**valid_flags(tmp_path), "max_steps": "2"}))
    monkeypatch.setenv("SFT_TRAINER_CONFIG_JSON_PATH", str(path))
    assert sft_trainer.main([]) == 0
    assert run.calls[0][0].train["max_steps"] == 2


@pytest.mark.parametrize(
    ("asked", "level"), [(None, logging.INFO), ("passive", logging.INFO), ("detail", logging.DEBUG), ("error", 40)]
)
def test_log_level(tmp_path, run, asked, level):
    sft_trainer.main([*argv_of(valid_flags(tmp_path)), *(["--log_level", asked] if asked else [])])
    assert logging.getLogger("tuning").level == level


def test_names_that_are_imported_late(run):
    assert sft_trainer.train == "the function"
    with pytest.raises(AttributeError, match=r"^module 'tuning.sft_trainer' has no attribute 'gone'$"):
        sft_trainer.gone  # noqa: B018 - the access is the test
