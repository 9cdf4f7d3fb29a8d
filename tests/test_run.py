"""The stages of a run, through the Python function and the command line, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests import tiny
from tuning.config.acceleration_configs import AttentionAndDistributedPackingConfig, PaddingFree
from tuning.config.configs import DataArguments, ModelArguments
from tuning.config.peft_config import LoraConfig
from tuning.errors import ConfigError
from tuning.run import max_sample_tokens, train
from tuning.trainers import arguments

ROOT = Path(__file__).parents[1]
ANSWERS = ("no", "yes, always", "a long answer " * 6, "42")
PADDING_FREE = AttentionAndDistributedPackingConfig(padding_free=PaddingFree())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer, and instruction rows of very different length."""
    path = tmp_path_factory.mktemp("run")
    tiny.build_model().save_pretrained(path / "model")
    tiny.build_tokenizer().save_pretrained(path / "model")
    rows = [{"input": f"question {i}" + "?" * (7 * i % 40), "output": ANSWERS[i % len(ANSWERS)]} for i in range(12)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def values(output, **more):
    return {
        "output_dir": str(output), "use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 4,
        "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3,
        **more,
    }  # fmt: skip


def run(folder, output, attention=None, peft=None, model="model", **more):
    return train(
        ModelArguments(model_name_or_path=str(folder / model)),
        DataArguments(training_data_path=str(folder / "rows.jsonl")),
        arguments.build(values(output, **more)),
        peft,
        attention_and_distributed_packing_config=attention,
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def command(*words, env=None, launcher=("-m",)):
    return subprocess.run(
        [sys.executable, *launcher, "tuning.sft_trainer", *words],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def test_padding_free_trains_as_padded_does(folder, tmp_path):
    padded, _ = run(folder, tmp_path / "padded")
    flat, metrics = run(folder, tmp_path / "flat", attention=PADDING_FREE)
    assert losses(flat) == pytest.approx(losses(padded), abs=1e-5)
    assert metrics["train_padding_share"] == 0.0
    assert metrics["train_real_tokens"] == padded.totals.real < padded.totals.slots


def test_the_final_folder_loads_as_an_ordinary_checkpoint(folder, tmp_path):
    trainer, _ = run(folder, tmp_path / "out", attention=PADDING_FREE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[1, 20, 30, 2]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, trainer.model(ids).logits)
    assert tokenizer.chat_template == tiny.build_tokenizer().chat_template


def test_two_runs_in_one_process_are_the_same_run(folder, tmp_path):
    first, _ = run(folder, tmp_path / "first", attention=PADDING_FREE)
    second, _ = run(folder, tmp_path / "second", attention=PADDING_FREE)
    assert losses(first) == losses(second)
    for (name, one), two in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_run_leaves_no_trace_on_the_model(folder, tmp_path):
    trainer, _ = run(folder, tmp_path / "out", attention=PADDING_FREE, gradient_checkpointing="true")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa")
    assert trainer.model.config._attn_implementation == "sdpa"
    assert "forward" not in trainer.model.__dict__
    tokenizer = tiny.build_tokenizer()
    inputs = tokenizer(["question 1", "a much longer question"], return_tensors="pt", padding=True, padding_side="left")
    expected = fresh.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(trainer.model.generate(**inputs, max_new_tokens=8, do_sample=False), expected)


def test_lora_trains_adapters_alone(folder, tmp_path):
    padded, _ = run(folder, tmp_path / "padded", peft=LoraConfig(r=4, lora_dropout=0.0))
    flat, _ = run(folder, tmp_path / "flat", attention=PADDING_FREE, peft=LoraConfig(r=4, lora_dropout=0.0))
    assert losses(flat) == pytest.approx(losses(padded), abs=1e-5)
    assert (tmp_path / "flat" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "flat" / "model.safetensors").exists()
    trainable = {name for name, parameter in flat.model.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)


def test_a_length_beyond_the_positions_is_refused(folder):
    config = LlamaConfig(max_position_embeddings=256)
    asked = DataArguments(training_data_path="rows.jsonl", max_seq_length=512)
    with pytest.raises(ConfigError) as error:
        max_sample_tokens(asked, config, None)
    assert str(error.value) == (
        "--max_seq_length 512 is more than the 256 positions of the model; lower it, or raise "
        "max_position_embeddings in the model's config.json if the model is meant to be extended"
    )
    assert max_sample_tokens(DataArguments(training_data_path="rows.jsonl"), config, None) == 256


def test_virtual_tokens_that_leave_no_room_for_a_sample(folder):
    config = tiny.build_model().config
    rows = DataArguments(training_data_path="rows.jsonl")
    assert max_sample_tokens(rows, config, SimpleNamespace(num_virtual_tokens=254)) == 2
    with pytest.raises(ConfigError) as error:
        max_sample_tokens(rows, config, SimpleNamespace(num_virtual_tokens=255))
    assert str(error.value) == (
        "--num_virtual_tokens 255 leaves no room for a sample in the 256 positions of the model; lower it"
    )


def test_the_python_function_refuses_what_the_command_line_refuses(folder, tmp_path):
    with pytest.raises(ConfigError, match="--packing"):
        run(folder, tmp_path / "out", attention=PADDING_FREE, packing=True)
    assert not (tmp_path / "out").exists()


def test_a_refusal_after_the_model_was_loaded_leaves_no_folder(folder, tmp_path):
    with pytest.raises(ConfigError, match="--lr_scheduler_type warmup_stable_decay"):
        run(folder, tmp_path / "out", lr_scheduler_type="warmup_stable_decay")
    assert not (tmp_path / "out").exists()
    # a folder of the user's stays, empty as it is
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="--optim_args speed=1"):
        run(folder, tmp_path / "mine", optim_args="speed=1")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.slow
def test_command_line_file_and_python_function_agree(folder, tmp_path):
    flags = {**values(tmp_path / "by_file"), "padding_free": "huggingface"}
    flags |= {"model_name_or_path": str(folder / "model"), "training_data_path": str(folder / "rows.jsonl")}
    (tmp_path / "run.json").write_text(json.dumps(flags), encoding="utf-8")
    by_file = command("--config", str(tmp_path / "run.json"))
    assert by_file.returncode == 0, by_file.stderr
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    by_flags = command(*words, "--output_dir", str(tmp_path / "by_flags"))
    assert by_flags.returncode == 0, by_flags.stderr
    trainer, _ = run(folder, tmp_path / "by_function", attention=PADDING_FREE)
    for name in ("by_file", "by_flags"):
        lines = (tmp_path / name / "training_logs.jsonl").read_text(encoding="utf-8").splitlines()
        logged = [entry["data"]["value"] for entry in map(json.loads, lines) if entry["name"] == "training_loss"]
        assert logged == losses(trainer), name


@pytest.mark.slow
def test_two_processes_log_the_losses_of_one(folder, tmp_path):
    flags = {**values(tmp_path / "two", per_device_train_batch_size=2), "padding_free": "huggingface"}
    flags |= {"model_name_or_path": str(folder / "model"), "training_data_path": str(folder / "rows.jsonl")}
    (tmp_path / "run.json").write_text(json.dumps(flags), encoding="utf-8")
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m")
    two = command("--config", str(tmp_path / "run.json"), launcher=launcher)
    assert two.returncode == 0, two.stderr[-3000:]
    lines = (tmp_path / "two" / "training_logs.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [entry["data"]["value"] for entry in map(json.loads, lines) if entry["name"] == "training_loss"]
    one, _ = run(folder, tmp_path / "one", attention=PADDING_FREE)
    assert logged == pytest.approx(losses(one), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_model_of_a_billion_parameters_trains_without_flash_attn(folder, tmp_path):
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    with torch.device("cuda"):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    result = command(
        "--model_name_or_path", str(tmp_path / "model"), "--training_data_path", str(folder / "rows.jsonl"),
        "--padding_free", "huggingface", "--output_dir", str(tmp_path / "out"), "--max_steps", "5",
        "--logging_steps", "1", "--report_to", "none", "--save_strategy", "no",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "torch" in result.stderr
    lines = (tmp_path / "out" / "training_logs.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [entry["data"]["value"] for entry in map(json.loads, lines) if entry["name"] == "training_loss"]
    assert len(logged) == 5
    assert logged[-1] < logged[0]
