"""Two processes killed in the middle of the second epoch go on with the very batches they would have had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.equivalence.product import write_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NUM_ROWS = 23
# exact: 23 samples, 2 ranks, accumulation 2 are 6 steps an epoch; budget: about as many
STEP = 8


def start(folder: Path, name: str, **request) -> subprocess.CompletedProcess:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**request, "result": str(folder / name)}), encoding="utf-8")
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "-m", "tests.distributed.killed_run", str(path),
        ],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["exact", "budget"])
def test_killed_and_resumed(tmp_path, mode):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (NUM_ROWS,), generator=draw).tolist()
    rows = [torch.randint(8, tiny.NUM_TOKENS, (length,), generator=draw).tolist() for length in lengths]
    run = {
        "model": tiny.save(tmp_path / "model"), "data": write_rows(tmp_path / "rows.jsonl", rows), "mode": mode,
        "kill_in_step": None, "resume": "false",
    }  # fmt: skip
    whole = start(tmp_path, "whole", **run, output=str(tmp_path / "a"))
    assert whole.returncode == 0, whole.stderr[-3000:]
    killed = start(tmp_path, "killed", **{**run, "kill_in_step": STEP}, output=str(tmp_path / "b"))
    assert killed.returncode != 0
    assert not list(tmp_path.glob("killed.[0-9]"))
    resumed = start(tmp_path, "resumed", **{**run, "resume": "true"}, output=str(tmp_path / "b"))
    assert resumed.returncode == 0, resumed.stderr[-3000:]

    for rank in range(2):
        expected, found = (torch.load(tmp_path / f"{name}.{rank}") for name in ("whole", "resumed"))
        steps = expected["batches"][-1][0] + 1
        # inside the second of three epochs
        assert steps // 3 < STEP < 2 * steps // 3
        later = [batch for batch in expected["batches"] if batch[0] >= STEP]
        assert len(found["batches"]) == len(later)
        for left, right in zip(found["batches"], later, strict=True):
            assert left[0] == right[0]
            assert torch.equal(left[1], right[1])
            assert torch.equal(left[2], right[2])
        assert found["loss"] == expected["loss"]
        for name, weight in expected["weights"].items():
            assert torch.equal(found["weights"][name], weight), name
