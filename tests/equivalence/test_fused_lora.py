"""Whole runs with ``--fused_lora`` give the losses of runs without it: over any base, with other plugins, resumed."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.quantize_gptq import quantize_checkpoint
from tests import tiny
from tuning.config.acceleration_configs import (
    AttentionAndDistributedPackingConfig,
    FastKernelsConfig,
    FusedLoraConfig,
    FusedOpsAndKernelsConfig,
    MultiPack,
    PaddingFree,
    QuantizedLoraConfig,
)
from tuning.config.configs import DataArguments, ModelArguments
from tuning.config.peft_config import LoraConfig
from tuning.models.gptq import GPTQFormat
from tuning.run import train
from tuning.trainers import arguments

ROOT = Path(__file__).parents[2]
has_bnb = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
BASES = {
    "auto": {},
    "auto_gptq": {"auto_gptq": "triton_v2"},
    "bitsandbytes": {"bnb_qlora": "nf4"},
}


@pytest.fixture(autouse=True)
def _without_the_interpreter(monkeypatch):
    monkeypatch.setattr("tuning.kernels.gptq.can_launch", lambda x: x.is_cuda)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fused")
    model = tiny.build_model(hidden_size=64)
    tiny.save(path / "plain", model=model)
    quantize_checkpoint(model, GPTQFormat(group_size=32), path / "gptq", {})
    tiny.build_tokenizer().save_pretrained(path / "gptq")
    rows = [{"input": f"question {i}" + "?" * (7 * i % 40), "output": "yes, always" * (1 + i % 3)} for i in range(16)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(folder, output, *, base="auto", fused=None, kernels=None, multipack=None, dropout=0.2, **more):
    values = {
        "output_dir": str(output), "use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 4,
        "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3,
        "gradient_checkpointing": False, **more,
    }  # fmt: skip
    return train(
        ModelArguments(model_name_or_path=str(folder / ("gptq" if base == "auto_gptq" else "plain"))),
        DataArguments(training_data_path=str(folder / "rows.jsonl")),
        arguments.build(values),
        LoraConfig(r=4, lora_dropout=dropout),
        quantized_lora_config=QuantizedLoraConfig(**BASES[base]),
        fusedops_kernels_config=FusedOpsAndKernelsConfig(
            fused_lora=FusedLoraConfig(base_layer=fused) if fused else None, fast_kernels=kernels
        ),
        attention_and_distributed_packing_config=AttentionAndDistributedPackingConfig(
            padding_free=PaddingFree(), multipack=multipack
        ),
    )[0]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapters(trainer):
    return {name: p.detach() for name, p in trainer.model.named_parameters() if "lora_" in name}


def assert_same_run(trainer, expected):
    assert losses(trainer) == pytest.approx(losses(expected), abs=1e-4)
    for name, parameter in adapters(trainer).items():
        # AdamW's steps are as large for the smallest gradient, so a rounding may show in single elements
        assert float((parameter - adapters(expected)[name]).norm() / adapters(expected)[name].norm()) < 1e-3, name


@pytest.mark.parametrize("base", ["auto", "auto_gptq", pytest.param("bitsandbytes", marks=has_bnb)])
def test_a_fused_run_learns_the_same(folder, tmp_path, base):
    # dropout draws from one stream of random numbers, in the same order; bitsandbytes' own layers draw as peft's
    expected = run(folder, tmp_path / "a", base=base)
    trainer = run(folder, tmp_path / "b", base=base, fused=base)
    assert_same_run(trainer, expected)
    assert losses(expected)[-1] < losses(expected)[0]
    assert not any("forward" in part.__dict__ for part in trainer.model.modules())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_with_gradient_checkpointing(folder, tmp_path, use_reentrant):
    expected = run(folder, tmp_path / "a")
    trainer = run(
        folder, tmp_path / "b", fused="auto", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )  # fmt: skip
    assert_same_run(trainer, expected)


def test_with_multipack_and_fast_kernels(folder, tmp_path):
    expected = run(folder, tmp_path / "a", multipack=MultiPack(num_processes=1))
    trainer = run(
        folder, tmp_path / "b", fused="auto", multipack=MultiPack(num_processes=1),
        kernels=FastKernelsConfig(kernels=("swiglu", "rms_norm")),
    )  # fmt: skip
    assert_same_run(trainer, expected)


@pytest.mark.parametrize("base", ["auto_gptq", pytest.param("bitsandbytes", marks=has_bnb)])
def test_a_resumed_run_ends_as_an_unbroken_one(folder, tmp_path, base):
    options = {"base": base, "fused": base, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    expected = run(folder, tmp_path / "whole", **options)
    run(folder, tmp_path / "broken", **options, max_steps=2)
    trainer = run(folder, tmp_path / "broken", **options)
    assert trainer.state.global_step == 4
    assert_same_run(trainer, expected)


def test_another_seed_of_dropout_would_be_seen(folder, tmp_path):
    with pytest.raises(AssertionError):
        assert_same_run(
            run(folder, tmp_path / "b", fused="auto", dropout=0.3), run(folder, tmp_path / "a", dropout=0.2)
        )


FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}  # fmt: skip


def run_two_ranks(output, model, rows, more):
    """Run the command line on two processes and return the losses."""
    flags = (
        "--use_cpu true --report_to none --logging_steps 1 --peft_method lora --r 4 --lora_dropout 0 --padding_free "
        "huggingface --max_steps 3 --learning_rate 1e-3 --per_device_train_batch_size 2 --disable_tqdm true"
    )
    paths = {"model_name_or_path": model, "training_data_path": rows, "output_dir": output}
    words = [sys.executable, "-m", "tuning.sft_trainer", *flags.split(), *more]
    words += [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            words, cwd=ROOT, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs[0][-3000:]
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "more"),
    [
        ("auto_gptq", ["--auto_gptq", "triton_v2"]),
        ("auto", ["--fsdp", "true"]),
        pytest.param("bitsandbytes", ["--bitsandbytes", "nf4", "--fsdp", "true"], marks=has_bnb),
    ],
    ids=["DDP over GPTQ", "FSDP2 with checkpointing", "FSDP2 over 4 bits with checkpointing"],
)
def test_two_ranks_learn_as_one(folder, tmp_path, base, more):
    if "--fsdp" in more:
        (tmp_path / "fsdp.json").write_text(json.dumps(FSDP))
        more = [*more, "--fsdp_config", str(tmp_path / "fsdp.json")]
    model = folder / ("gptq" if base == "auto_gptq" else "plain")
    got = run_two_ranks(tmp_path / "two", model, folder / "rows.jsonl", [*more, "--fused_lora", base, "True"])
    one = run(folder, tmp_path / "one", base=base, dropout=0.0, max_steps=3)
    expected = [(entry["loss"], entry["grad_norm"]) for entry in one.state.log_history if "loss" in entry]
    assert torch.tensor(got).flatten().tolist() == pytest.approx(torch.tensor(expected).flatten().tolist(), rel=1e-4)
    assert expected[0][0] - expected[-1][0] > 1e-2
