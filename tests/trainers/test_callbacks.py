"""The log file, the progress bar, the clock and the sampler's epoch."""

from __future__ import annotations

import datetime
import json
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from tests.tiny import build_bigram, build_tokenizer
from tests.trainers.harness import EIGHT_GOOD, TWO_BAD, make_trainer
from tuning.trainers.callbacks import AddedTokens, LogFile, Progress, SamplerEpoch, StepClock
from tuning.trainers.fit import fit
from tuning.trainers.metrics import Stopwatch


def log(folder, logs, *, is_main=True, step=3):
    state = TrainerState(global_step=step, is_world_process_zero=is_main)
    LogFile().on_log(SimpleNamespace(output_dir=str(folder)), state, TrainerControl(), logs=logs)


def read(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "training_logs.jsonl").read_text().splitlines()]


def test_a_training_line(tmp_path):
    logs = {
        "loss": 1.25,
        "epoch": 0.123456,
        "learning_rate": 0.1,
        "num_tokens": 12.0,
        "supervised_tokens": 10.0,
        "padding_share": 0.25,
        "tokens_per_second": 99.5,
        "peak_memory_gib": 1.5,
        "grad_norm": 2.0,
    }
    log(tmp_path / "new", logs)
    loss, meters = read(tmp_path / "new")
    when = loss["data"].pop("timestamp")
    assert datetime.datetime.fromisoformat(when).tzinfo is not None
    assert loss == {"name": "training_loss", "data": {"epoch": 0.12, "step": 3, "value": 1.25}}
    assert meters["data"].pop("timestamp") == when
    assert meters == {
        "name": "training_meters",
        "data": {
            "epoch": 0.12,
            "step": 3,
            "num_tokens": 12.0,
            "supervised_tokens": 10.0,
            "padding_share": 0.25,
            "tokens_per_second": 99.5,
            "peak_memory_gib": 1.5,
            "grad_norm": 2.0,
        },
    }


def test_lines_are_appended(tmp_path):
    log(tmp_path, {"loss": 1.0})
    log(tmp_path, {"eval_loss": 2.0, "epoch": 1.0}, step=4)
    assert [(line["name"], line["data"]["value"], line["data"]["step"]) for line in read(tmp_path)] == [
        ("training_loss", 1.0, 3),
        ("validation_loss", 2.0, 4),
    ]


@pytest.mark.parametrize(
    ("logs", "is_main"), [({"loss": 1.0}, False), (None, True), ({}, True), ({"train_runtime": 3.0}, True)]
)
def test_what_is_not_written(tmp_path, logs, is_main):
    log(tmp_path, logs, is_main=is_main)
    assert not (tmp_path / "training_logs.jsonl").exists()


def test_a_real_run_writes_each_logged_step(tmp_path):
    fit(make_trainer(tmp_path, build_bigram(), [TWO_BAD, EIGHT_GOOD] * 2, logging_steps=2, learning_rate=0.0), None)
    losses = [line["data"] for line in read(tmp_path) if line["name"] == "training_loss"]
    assert [line["step"] for line in losses] == [2, 4]
    # two optimizer steps of one row each: the mean of their losses
    assert [line["value"] for line in losses] == [pytest.approx((4.767273 + 0.767273) / 2, abs=1e-5)] * 2
    meters = [line["data"] for line in read(tmp_path) if line["name"] == "training_meters"]
    assert [line["num_tokens"] for line in meters] == [12, 24]


def test_the_users_metadata_come_first(tmp_path):
    fit(make_trainer(tmp_path, build_bigram(), [TWO_BAD]), None, metadata={"who": "ä", "run": 7})
    first, second, *_ = read(tmp_path)
    assert first == {"name": "exp_metadata", "data": {"who": "ä", "run": 7}}
    assert second["name"] == "training_loss"


@pytest.mark.parametrize(
    ("values", "logged"),
    [({"logging_steps": 10}, [3]), ({"logging_steps": 2}, [2, 3]), ({"logging_strategy": "no"}, [])],
)
def test_a_run_ends_with_a_line(tmp_path, values, logged):
    trainer = make_trainer(tmp_path, build_bigram(), [TWO_BAD, EIGHT_GOOD, EIGHT_GOOD], learning_rate=0.0, **values)
    fit(trainer, None)
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line["step"] for line in lines] == logged
    if logged == [3]:
        assert lines[0]["loss"] == pytest.approx((4.767273 + 2 * 0.767273) / 3, abs=1e-5)


class Bar:
    def __init__(self):
        self.texts = []

    def set_postfix_str(self, text):
        self.texts.append(text)

    def write(self, text):
        self.texts.append(("line", text))


def test_the_bar_shows_real_tokens_a_second():
    progress = Progress()
    progress.training_bar = Bar()
    state = TrainerState(is_world_process_zero=True)
    progress.on_log(SimpleNamespace(), state, TrainerControl(), logs={"loss": 1.0, "tokens_per_second": 12345.6})
    assert progress.training_bar.texts[0] == "12,346 real tokens/s"
    assert progress.training_bar.texts[1][0] == "line"
    progress.on_log(SimpleNamespace(), state, TrainerControl(), logs={"eval_loss": 1.0})
    assert len(progress.training_bar.texts) == 3


def test_other_ranks_have_no_bar():
    progress = Progress()
    progress.on_log(SimpleNamespace(), TrainerState(is_world_process_zero=False), TrainerControl(), logs={"loss": 1.0})


def test_the_bar_of_a_real_run(tmp_path, capsys):
    fit(make_trainer(tmp_path, build_bigram(), [TWO_BAD, EIGHT_GOOD], disable_tqdm=False), None)
    assert "real tokens/s" in capsys.readouterr().err


def test_the_clock_runs_while_training(tmp_path):
    watch = Stopwatch()
    clock = StepClock(watch)
    clock.on_train_begin(None, None, None)
    assert watch._started is not None
    clock.on_train_end(None, None, None)
    assert watch._started is None
    assert watch.lap() > 0


@pytest.mark.parametrize(("epoch", "expected"), [(None, 0), (0, 0), (1.0, 1), (1.75, 1)])
def test_the_sampler_is_told_the_epoch(epoch, expected):
    told = []
    callback = SamplerEpoch(SimpleNamespace(set_epoch=told.append))
    callback.on_epoch_begin(None, TrainerState(epoch=epoch), None)
    assert told == [expected]
    SamplerEpoch([[0]]).on_epoch_begin(None, TrainerState(epoch=epoch), None)  # without epochs


def test_added_tokens_need_a_checkpoint_and_the_main_rank(tmp_path):
    callback = AddedTokens(build_tokenizer(), ("<|user|>",))
    args = SimpleNamespace(output_dir=str(tmp_path))
    callback.on_save(args, TrainerState(global_step=2, is_world_process_zero=True), None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "checkpoint-2").mkdir()
    callback.on_save(args, TrainerState(global_step=2, is_world_process_zero=False), None)
    assert list((tmp_path / "checkpoint-2").iterdir()) == []
    callback.on_save(args, TrainerState(global_step=2, is_world_process_zero=True), None)
    assert json.loads((tmp_path / "checkpoint-2" / "added_tokens_info.json").read_text())["num_new_tokens"] == 1
