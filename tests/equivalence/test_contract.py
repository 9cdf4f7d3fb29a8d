"""The contract of the project: however a step is computed, its loss and every gradient are the same.

The data set has as many rows as an optimizer step takes, so that every variant trains on the same rows in its first
step, whatever its order. The reference is one padded process without accumulation.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.equivalence.one_step import one_step
from tests.equivalence.product import run_product
from tuning.config.peft_config import LoraConfig

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


# ---- several steps, adapters, kernels, other losses, evaluation: through the same door ----

KERNELS = ("rms_norm", "rope", "swiglu")
HEADS = ("cross_entropy", "linear_cross_entropy")
LAYOUTS = {
    "padded": {},
    "padding_free": {"padding_free": True},
    "multipack exact": {"padding_free": True, "multipack": {"mode": "exact"}},
}


def check_gradients(found, expected):
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        # an adapter's A has no gradient while its B is zero
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-8)
        assert error <= GRADIENT, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_epoch_of_full_packs(inputs, reference, tmp_path, accumulation):
    """Steps of a budget hold other samples than the plain run's, but all of them together the same."""
    run = run_product(
        inputs["model"], inputs["data"], str(tmp_path), num_train_epochs=1, learning_rate=0.0,
        flags={"padding_free": True, "multipack": {"mode": "budget", "max_tokens": 64}},
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    totals = [0, *run.logged("supervised_tokens")]
    tokens = [after - before for before, after in itertools.pairwise(totals)]
    assert len(tokens) > 1
    loss = sum(loss * count for loss, count in zip(run.logged("loss"), tokens, strict=True)) / sum(tokens)
    assert abs(loss - reference["loss"]) <= LOSS
    summed = {name: torch.zeros_like(gradient) for name, gradient in reference["gradients"].items()}
    for gradients, count in zip(run.record.gradients, tokens, strict=True):
        for name, gradient in gradients.items():
            summed[name] += gradient * (count / sum(tokens))
    check_gradients(summed, reference["gradients"])


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels(inputs, reference, tmp_path, layout, head):
    run = run_product(
        inputs["model"], inputs["data"], str(tmp_path), max_steps=1, learning_rate=0.0, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, flags={**LAYOUTS[layout], "fast_kernels": [head, *KERNELS]},
    )  # fmt: skip
    assert abs(run.logged("loss")[0] - reference["loss"]) <= LOSS
    check_gradients(run.record.gradients[0], reference["gradients"])


def two_steps(inputs, output, flags, **values):
    """Two steps on all rows: adapters start at zero, so only the second shows every gradient."""
    return run_product(
        inputs["model"], inputs["data"], str(output), flags=flags, max_steps=2, learning_rate=0.1,
        per_device_train_batch_size=ROWS, **values,
    )  # fmt: skip


@pytest.fixture(scope="module")
def adapted(inputs, tmp_path_factory):
    return two_steps(inputs, tmp_path_factory.mktemp("adapted"), {}, peft=LoraConfig(r=4, lora_dropout=0.0))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [None, ["linear_cross_entropy", *KERNELS]], ids=["plain", "kernels"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters(inputs, adapted, tmp_path, layout, kernels):
    flags = {**LAYOUTS[layout], "fast_kernels": kernels}
    run = two_steps(inputs, tmp_path, flags, peft=LoraConfig(r=4, lora_dropout=0.0))
    assert run.logged("loss") == pytest.approx(adapted.logged("loss"), abs=LOSS)
    for found, expected in zip(run.record.gradients, adapted.record.gradients, strict=True):
        check_gradients(found, expected)


@pytest.fixture(scope="module")
def smoothed(inputs, tmp_path_factory):
    return two_steps(inputs, tmp_path_factory.mktemp("smoothed"), {}, label_smoothing_factor=0.1)


@pytest.mark.parametrize("head", [None, *HEADS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_label_smoothing(inputs, reference, smoothed, tmp_path, layout, head):
    run = two_steps(inputs, tmp_path, {**LAYOUTS[layout], "fast_kernels": head and [head]}, label_smoothing_factor=0.1)
    assert run.logged("loss") == pytest.approx(smoothed.logged("loss"), abs=LOSS)
    assert abs(run.logged("loss")[0] - reference["loss"]) > 100 * LOSS
    for found, expected in zip(run.record.gradients, smoothed.record.gradients, strict=True):
        check_gradients(found, expected)


@pytest.mark.parametrize("layout", ["padding_free", "multipack exact"])
def test_dynamic_fine_tuning(inputs, tmp_path, layout):
    padded = two_steps(inputs, tmp_path / "padded", {}, loss_type="dft")
    run = two_steps(inputs, tmp_path / "flat", LAYOUTS[layout], loss_type="dft")
    assert run.logged("loss") == pytest.approx(padded.logged("loss"), abs=LOSS)
    for found, expected in zip(run.record.gradients, padded.record.gradients, strict=True):
        check_gradients(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", [None, *HEADS])
def test_evaluation_loss(inputs, reference, tmp_path, layout, head):
    """The rows themselves are evaluated, before a step has changed anything: the loss is that of the step."""
    for size in (1, 3, 8):
        run = run_product(
            inputs["model"], inputs["data"], str(tmp_path / str(size)), evaluation=inputs["data"], max_steps=1,
            learning_rate=0.0, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=size,
            flags={**LAYOUTS[layout], "fast_kernels": head and [head]},
        )  # fmt: skip
        assert run.logged("eval_loss") == pytest.approx([reference["loss"]], abs=LOSS)
        assert run.logged("eval_num_tokens") == [sum(LENGTHS)]
