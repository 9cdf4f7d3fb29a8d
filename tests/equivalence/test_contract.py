"""The contract of the project: however a step is computed, its loss and every gradient are the same.

The data set has as many rows as an optimizer step takes, so that every variant trains on the same rows in its first
step, whatever its order. The reference is one padded process without accumulation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.equivalence.one_step import one_step

ROWS = 8
LOSS, GRADIENT = 1e-5, 1e-4  # fp32: absolute error of the loss, relative error of each gradient
LENGTHS = (5, 31, 2, 17, 64, 9, 3, 40)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny model, and eight rows of very different length, some tokens of which are not trained on."""
    folder = tmp_path_factory.mktemp("contract")
    tiny.build_model().save_pretrained(folder / "model")
    tiny.build_tokenizer().save_pretrained(folder / "model")
    draw = torch.Generator().manual_seed(1)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(8, tiny.NUM_TOKENS, (length,), generator=draw).tolist()
        prompt = length // 3
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"model": str(folder / "model"), "data": str(folder / "rows.jsonl"), "folder": folder}


@pytest.fixture(scope="module")
def reference(inputs):
    return one_step(
        inputs["model"], inputs["data"], str(inputs["folder"] / "reference"),
        flags={}, per_device_train_batch_size=ROWS,
    )  # fmt: skip


def check_equal(result, reference):
    assert abs(result["loss"] - reference["loss"]) <= LOSS
    assert set(result["gradients"]) == set(reference["gradients"])
    for name, expected in reference["gradients"].items():
        error = (result["gradients"][name] - expected).norm() / expected.norm()
        assert error <= GRADIENT, f"{name}: relative error {error:.2e}"


VARIANTS = {
    "padded, accumulation 4": ({}, 2, 4),
    "padding_free": ({"padding_free": True}, 8, 1),
    "padding_free, accumulation 2": ({"padding_free": True}, 4, 2),
    "padding_free, accumulation 8": ({"padding_free": True}, 1, 8),
    "multipack exact": ({"padding_free": True, "multipack": {"mode": "exact"}}, 8, 1),
    "multipack exact, accumulation 4": ({"padding_free": True, "multipack": {"mode": "exact"}}, 2, 4),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_one_process(name, inputs, reference, tmp_path):
    flags, batch, accumulation = VARIANTS[name]
    result = one_step(
        inputs["model"], inputs["data"], str(tmp_path / "out"),
        flags=flags, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    check_equal(result, reference)


TWO_PROCESSES = {
    "padded": ({}, 4, 1),
    "padding_free, accumulation 2": ({"padding_free": True}, 2, 2),
    "multipack exact, accumulation 2": ({"padding_free": True, "multipack": {"mode": "exact"}}, 2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(name, inputs, reference, tmp_path):
    flags, batch, accumulation = TWO_PROCESSES[name]
    request = tmp_path / "request.json"
    step = {
        "model": inputs["model"], "data": inputs["data"], "output": str(tmp_path / "out"), "flags": flags,
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    request.write_text(json.dumps({"step": step, "result": str(tmp_path / "result.pt")}), encoding="utf-8")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "-m", "tests.equivalence.one_step", str(request),
        ],
        cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    result = torch.load(tmp_path / "result.pt")
    assert result["world_size"] == 2
    check_equal(result, reference)


def test_a_mean_of_means_breaks_the_contract(inputs, reference, tmp_path, monkeypatch):
    """The mutation: a loss averaged a micro-step, as it was before num_items_in_batch, must be seen."""
    from tuning.trainers.sft import SFTTrainer

    exact = SFTTrainer.compute_loss

    def mean_of_means(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = exact(self, model, inputs, return_outputs=return_outputs)
        return loss / self.current_gradient_accumulation_steps

    monkeypatch.setattr(SFTTrainer, "compute_loss", mean_of_means)
    result = one_step(
        inputs["model"], inputs["data"], str(tmp_path / "out"),
        flags={}, per_device_train_batch_size=2, gradient_accumulation_steps=4,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        check_equal(result, reference)


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_recomputed_activations(kwargs, inputs, reference, tmp_path):
    result = one_step(
        inputs["model"], inputs["data"], str(tmp_path / "out"), flags={"padding_free": True},
        per_device_train_batch_size=8, gradient_checkpointing="true", gradient_checkpointing_kwargs=kwargs,
    )  # fmt: skip
    check_equal(result, reference)
