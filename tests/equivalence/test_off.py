"""A flag that is off does what a flag does that does not exist, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests import tiny
from tests.equivalence.product import run_product, write_rows
from tests.trainers.test_fit import same, weights
from tuning.acceleration.plugins import BUILTIN

ROWS = [[20, 21, 22, 23, 24], [10, 30, 12], [40, 41], [7, 8, 9, 7, 8, 9, 7], [50, 52, 54, 56]]
# how each flag is said to be off, beside leaving it out
OFF = {
    "padding_free": [None, "none"],
    "multipack": [None, "none"],
    "bnb_qlora": [None, "none"],
    "auto_gptq": [None, "none"],
    "fast_kernels": [None, "none", ["False", "False", "False"]],
    "fused_lora": [None, "none", ["auto", "False"]],
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("off")
    return tiny.save(folder / "model"), write_rows(folder / "rows.jsonl", ROWS)


def two_epochs(paths, output, flags):
    values = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 0.01}
    run = run_product(*paths, str(output), flags=flags, optim="adamw_torch", **values)
    return run.logged("loss"), run.record.gradients, weights(run.trainer.model)


def is_same(left, right) -> bool:
    return (
        left[0] == right[0]
        and len(left[1]) == len(right[1])
        and all(same(*pair) for pair in zip(left[1], right[1], strict=True))
        and same(left[2], right[2])
    )


def test_every_flag_is_looked_at():
    assert set(OFF) == set(BUILTIN)


@pytest.mark.parametrize(("name", "off"), [(name, off) for name, spellings in OFF.items() for off in spellings])
def test_off_is_as_if_it_did_not_exist(paths, tmp_path, monkeypatch, name, off):
    found = two_epochs(paths, tmp_path / "off", {name: off})
    monkeypatch.setattr("tuning.run.BUILTIN", {flag: where for flag, where in BUILTIN.items() if flag != name})
    assert is_same(found, two_epochs(paths, tmp_path / "none", {}))


def test_the_comparison_sees_one_rounding(paths, tmp_path):
    losses, gradients, final = two_epochs(paths, tmp_path, {})
    name = next(iter(final))
    nudged = torch.nextafter(final[name], torch.full_like(final[name], torch.inf))
    assert is_same((losses, gradients, final), (losses, gradients, dict(final)))
    assert not is_same((losses, gradients, final), (losses, gradients, {**final, name: nudged}))
    assert not is_same((losses, gradients, final), (losses, gradients[1:] + gradients[:1], final))
