"""Which checkpoint a run goes on from, when a job was killed while it saved.

Public reports: https://github.com/foundation-model-stack/fms-hf-tuning/issues/432 and
https://github.com/huggingface/transformers/issues/35782. Hugging Face's own search returns the incomplete folder.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from transformers.trainer_utils import get_last_checkpoint

from tests.tiny import build_bigram, build_model, build_tokenizer
from tests.trainers.harness import make_trainer
from tests.trainers.test_fit import ROWS, StopAt, build_lora, same, weights
from tuning.errors import CheckpointError
from tuning.trainers.checkpoints import (
    RunState,
    find_fault,
    find_resume,
    read_run_state,
    write_added_tokens,
    write_run_state,
    writing,
)
from tuning.trainers.fit import fit
from tuning.trainers.metrics import Counts

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train to 12 steps with a checkpoint every 4, stopping after the first."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(
        folder, build_model(), ROWS, save_strategy="steps", save_steps=4, seats={"callbacks": (StopAt(4),)}
    )
    trainer.train()
    return folder


@pytest.fixture
def out(run, tmp_path):
    """Return a copy of that run's output folder."""
    shutil.copytree(run, tmp_path / "out")
    return tmp_path / "out"


def cut(path: Path, size: int = 100) -> None:
    path.write_bytes(path.read_bytes()[:size])


def break_newest(out: Path, *, only_weights: bool = False) -> Path:
    """Make what a job leaves that is killed while it writes checkpoint-8."""
    newest = out / "checkpoint-8"
    shutil.copytree(out / "checkpoint-4", newest)
    cut(newest / "model.safetensors")
    if not only_weights:
        (newest / "trainer_state.json").unlink()
        (newest / "optimizer.pt").unlink()
    return newest


# ---- automatic ----


@pytest.mark.parametrize("only_weights", [False, True])
def test_a_broken_newest_checkpoint_is_passed_over(out, caplog, only_weights):
    newest = break_newest(out, only_weights=only_weights)
    assert get_last_checkpoint(str(out)) == str(newest)  # what upstream takes
    with caplog.at_level(logging.WARNING, logger="tuning"):
        assert find_resume(str(out), None) == str(out / "checkpoint-4")
    fault = "model.safetensors is cut short" if only_weights else "trainer_state.json is missing"
    assert caplog.messages == [f"{newest} is incomplete ({fault}) and is passed over"]


def test_the_run_ends_as_an_unbroken_one(out, tmp_path):
    break_newest(out)
    whole, resumed = build_model(), build_model()
    values = {"save_strategy": "steps", "save_steps": 4}
    fit(make_trainer(tmp_path / "whole", whole, ROWS, **values), None)
    trainer = make_trainer(out, resumed, ROWS, **values)
    fit(trainer, find_resume(str(out), "true"))
    assert trainer.state.global_step == 12
    assert same(weights(whole), weights(resumed))
    assert find_fault(out / "checkpoint-8") is None  # written anew


def test_only_broken_ones_start_from_the_beginning_with_a_word(out, caplog):
    newest = break_newest(out)
    shutil.rmtree(out / "checkpoint-4")
    with caplog.at_level(logging.WARNING, logger="tuning"):
        assert find_resume(str(out), "true") is None
    assert caplog.messages == [
        f"{newest} is incomplete (trainer_state.json is missing) and is passed over",
        f"{out} holds no complete checkpoint: the run starts from the beginning",
    ]


def test_the_newest_is_by_number_and_is_told(out, caplog):
    for step in (10, 9):
        shutil.copytree(out / "checkpoint-4", out / f"checkpoint-{step}")
    (out / "checkpoint-99").write_text("a file")
    (out / "checkpoint-final").mkdir()
    with caplog.at_level(logging.INFO, logger="tuning"):
        assert find_resume(str(out), None) == str(out / "checkpoint-10")
    assert caplog.messages == [
        f"resuming from {out}/checkpoint-10; to start over, pass --resume_from_checkpoint false or another output_dir"
    ]


@pytest.mark.parametrize("word", ["false", "False", "none", " ", "FALSE"])
def test_a_run_may_start_over(out, word):
    assert find_resume(str(out), word) is None


def test_nothing_to_resume_from_is_no_warning(tmp_path, caplog):
    assert find_resume(str(tmp_path / "new"), None) is None
    (tmp_path / "empty").mkdir()
    assert find_resume(str(tmp_path / "empty"), "True") is None
    assert caplog.messages == []


# ---- by name ----


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_resume("unused", str(folder))
    return str(caught.value)


def test_a_broken_checkpoint_by_name(out):
    newest = break_newest(out)
    assert refusal(newest) == (
        f"--resume_from_checkpoint {newest} cannot be resumed from: trainer_state.json is missing; name a complete "
        "checkpoint, or pass true to take the newest complete one"
    )
    assert "cannot be resumed from: the folder does not exist;" in refusal(out / "checkpoint-5")


def test_a_complete_checkpoint_by_name(out):
    break_newest(out)
    assert find_resume("unused", str(out / "checkpoint-4")) == str(out / "checkpoint-4")


# ---- faults ----


@pytest.mark.parametrize(
    ("name", "size", "fault"),
    [
        ("trainer_state.json", None, "trainer_state.json is missing"),
        ("trainer_state.json", 50, "trainer_state.json is cut short"),
        ("model.safetensors", None, "its weights are missing"),
        ("model.safetensors", 0, "model.safetensors is cut short"),
        ("model.safetensors", 7, "model.safetensors is cut short"),
        ("model.safetensors", 100, "model.safetensors is cut short"),
        ("model.safetensors", -1, "model.safetensors is cut short"),
        ("optimizer.pt", None, "optimizer.pt is missing"),
        ("optimizer.pt", 0, "optimizer.pt is cut short"),
        ("optimizer.pt", -100, "optimizer.pt is cut short"),
        ("scheduler.pt", None, "scheduler.pt is missing"),
    ],
)
def test_each_fault_by_its_file(out, name, size, fault):
    folder = out / "checkpoint-4"
    assert find_fault(folder) is None
    if size is None:
        (folder / name).unlink()
    else:
        cut(folder / name, size)
    assert find_fault(folder) == fault


def test_a_header_that_is_no_header(out):
    path = out / "checkpoint-4" / "model.safetensors"
    for header in (b"[1, 2]", b'{"a": 1}', b'{"a": {"data_offsets": 3}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert find_fault(path.parent) == "model.safetensors is cut short"


def test_sharded_weights(out):
    folder = out / "checkpoint-4"
    (folder / "model.safetensors").unlink()
    build_model().save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert find_fault(folder) is None
    cut(shards[1])
    assert find_fault(folder) == f"{shards[1].name} is cut short"
    shards[1].unlink()
    assert find_fault(folder) == f"{shards[1].name} is missing"
    cut(folder / "model.safetensors.index.json", 60)
    assert find_fault(folder) == "model.safetensors.index.json is cut short"


def test_adapter_weights(tmp_path):
    trainer = make_trainer(tmp_path, build_lora(), ROWS[:2], save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    assert not (folder / "model.safetensors").exists()
    assert find_fault(folder) is None
    cut(folder / "adapter_model.safetensors")
    assert find_fault(folder) == "adapter_model.safetensors is cut short"


def test_torch_weights(out):
    folder = out / "checkpoint-4"
    (folder / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(9)}, folder / "pytorch_model.bin")
    assert find_fault(folder) is None
    cut(folder / "pytorch_model.bin", 200)
    assert find_fault(folder) == "pytorch_model.bin is cut short"


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "global_step4"])
def test_state_that_each_rank_writes_for_itself_is_taken_as_it_is(out, name):
    folder = out / "checkpoint-4"
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.pt").unlink()
    (folder / name).mkdir()
    assert find_fault(folder) is None


def test_checkpoints_of_weights_alone(out, caplog):
    folder = out / "checkpoint-4"
    (folder / "optimizer.pt").unlink()
    assert find_fault(folder, model_only=True) is None
    with caplog.at_level(logging.WARNING, logger="tuning"):
        assert find_resume(str(out), None, model_only=True) == str(folder)
        assert find_resume(str(out), str(folder), model_only=True) == str(folder)
    assert (
        caplog.messages
        == [f"{folder} holds weights alone (optimizer.pt is missing): optimizer and learning rate start afresh"] * 2
    )
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is missing"):
        find_resume(str(out), str(folder))


def test_a_run_that_saves_weights_alone_can_go_on(tmp_path):
    values = {"save_strategy": "steps", "save_steps": 4, "save_only_model": True}
    fit(make_trainer(tmp_path, build_model(), ROWS, seats={"callbacks": (StopAt(4),)}, **values), None)
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()
    trainer = make_trainer(tmp_path, build_model(), ROWS, **values)
    metrics = fit(trainer, find_resume(str(tmp_path), None, model_only=True))
    assert trainer.state.global_step == 12
    assert metrics["train_real_tokens"] == sum(map(len, ROWS))


# ---- our part of a checkpoint ----


def test_our_state_is_read_as_it_was_written(tmp_path):
    counts = Counts(nll_sum=1.5, supervised=7.0, real=9.0, slots=12.0)
    write_run_state(tmp_path / "checkpoint-1", counts=counts, sampler={"epoch": 3})
    assert read_run_state(tmp_path / "checkpoint-1") == RunState(counts=counts, sampler={"epoch": 3})
    write_run_state(tmp_path / "checkpoint-1", counts=counts, sampler=None)
    assert read_run_state(tmp_path / "checkpoint-1").sampler is None


def test_a_checkpoint_without_our_state(tmp_path):
    assert read_run_state(tmp_path) is None


@pytest.mark.parametrize("text", ['{"counts": {', "{}", '{"counts": {"unheard_of": 1}, "sampler": null}', "[]"])
def test_our_state_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "packtune_state.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_run_state(tmp_path)
    assert str(caught.value).startswith(f"{path} cannot be read (")
    assert str(caught.value).endswith("); resume from an earlier checkpoint")


def test_our_state_is_there_before_the_state_that_says_complete(tmp_path):
    order = []

    class Trainer(type(make_trainer(tmp_path, build_model(), ROWS[:1]))):
        def save_model(self, *args, **kwargs):
            order.append(sorted(path.name for path in (tmp_path / "checkpoint-1").iterdir()))
            return super().save_model(*args, **kwargs)

    trainer = make_trainer(tmp_path, build_model(), ROWS[:1], save_strategy="steps", save_steps=1)
    trainer.__class__ = Trainer
    trainer.train()
    assert order == [["packtune_state.json"]]


def test_added_tokens(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<ä>"], special_tokens=True)
    write_added_tokens(tmp_path / "new", tokenizer, ("<ä>", "<|user|>"))
    text = (tmp_path / "new" / "added_tokens_info.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"num_new_tokens": 2, "added_tokens": {"<ä>": 266, "<|user|>": 4}}
    assert "<ä>" in text
    write_added_tokens(tmp_path / "none", tokenizer, ())
    assert not (tmp_path / "none").exists()


# ---- a disk that is full or gone ----


def test_a_full_disk_is_told_with_what_is_free(tmp_path, monkeypatch):
    def write(error):
        with writing(tmp_path / "checkpoint-4"):
            raise error

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=300_000))
    for error, why in [
        (OSError(28, "No space left on device"), "No space left on device"),
        (SafetensorError("I/O error: No space left on device (os error 28)"),
         "I/O error: No space left on device (os error 28)"),
        # what torch says of a file that it could not write to the end
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 118208 vs 118100\nframe #0"),
         "[enforce fail at inline_container.cc:672] . unexpected pos 118208 vs 118100"),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            write(error)
        assert str(caught.value) == (
            f"{tmp_path / 'checkpoint-4'} cannot be written: {why} (0.3 MB are free there); make room or mend the "
            "folder, and start the same command again: it goes on from the last complete checkpoint"
        )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        write(RuntimeError("a fault of ours"))


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, build_bigram(), [[1, 2, 3]] * 4, save_strategy="steps", save_steps=1)

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", refuse)
    with pytest.raises(CheckpointError, match="checkpoint-1 cannot be written: No space left on device"):
        trainer.train()
    assert find_resume(str(tmp_path), None) is None
