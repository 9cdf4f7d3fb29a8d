"""Two processes on the CPU (gloo) do what one does.

Public reports of the faults: https://github.com/huggingface/transformers/issues/34242 and
https://github.com/huggingface/transformers/issues/39392 (a mean of the ranks' means).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from tests.distributed.scenarios import C19, one_step
from tests.trainers.harness import BAD, GOOD
from tests.trainers.test_fit import ROWS
from tests.trainers.test_sft import RAGGED, exact_loss

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 480  # four ranks may share one core


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def launch(folder: Path, world_size: int, module: str = "tests.distributed.scenarios") -> list[dict]:
    """Run all scenarios of ``module`` on ``world_size`` ranks and return what each of them wrote."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    ranks = []
    for rank in range(world_size):
        variables = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", module, str(folder)]
        with (folder / f"log{rank}.txt").open("w") as log:
            ranks.append(subprocess.Popen(command, env=variables, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = "\n".join((folder / f"log{rank}.txt").read_text()[-3000:] for rank in range(world_size))
    assert codes == [0] * world_size, logs
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return launch(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture
def both(ranks, request):
    """Return what both ranks found in the scenario a test is named after."""
    name = request.node.originalname.removeprefix("test_")
    for number, results in enumerate(ranks):
        assert results["world_size"] == 2
        assert name in results, f"rank {number} did not come to {name}: {list(results.values())[-1]}"
        assert not (isinstance(results[name], dict) and "error" in results[name]), results[name]["error"]
    assert ranks[0][name] == ranks[1][name]
    return ranks[0][name]


def check_one_step(result):
    # a mean of the ranks' means would be 2.767273, 0.0495748 and 4.0029762
    assert result["loss"] == pytest.approx([1.167273], abs=1e-5)
    assert result["weights"] == pytest.approx([0.0099150, 4.0053572], abs=1e-6)


def test_padded(both):
    check_one_step(both)


def test_flattened(both):
    check_one_step(both)


@pytest.mark.parametrize("collator", ["padded", "flattened"])
def test_one_rank_gives_the_same(tmp_path, collator):
    torch.set_num_threads(1)
    check_one_step(one_step(tmp_path, collator))


def test_accumulated(both):
    assert both == pytest.approx([(2 * BAD + 9 * GOOD) / 11], abs=1e-5)


def test_a_rank_without_target(both):
    assert both["loss"] == pytest.approx([GOOD], abs=1e-5)
    assert both["finite"]


def test_no_rank_has_a_target(both):
    assert both == {"loss": [0.0], "still": True}


def test_evaluation(both):
    tokens = sum(map(len, RAGGED))
    assert len(both) == 8
    for name, (loss, num_tokens) in both.items():
        assert loss == pytest.approx(exact_loss(RAGGED), abs=1e-5), name
        assert num_tokens == tokens, name


def test_metrics_of_rows(both):
    for name, (first, lengths) in both.items():
        assert first == [row[0] + 1 for row in RAGGED], name
        assert lengths == [len(row) - 1 for row in RAGGED], name


def test_collectives(both):
    # the first step has what is done once; the others the count of targets, and nothing a micro-step
    assert len(both["steps"]) == both["micro_steps"] // 3
    for step in both["steps"][1:]:
        assert sum(step.values()) <= 1, both
    # a log line: the loss and the operations, which upstream gathers, and one for all the meters together
    assert both["lines"][0] == {"all_gather": 2, "all_reduce": 1}


def test_meters(both):
    tokens = sum(map(len, ROWS))
    # a line after 2 of 3 steps of 4 rows, and one at the end
    assert both["lines"] == [sum(map(len, ROWS[:8])), tokens]
    assert both["train_real_tokens"] == tokens
    assert both["train_supervised_tokens"] == tokens - len(ROWS)
    slots = sum(2 * max(map(len, ROWS[start : start + 2])) for start in range(0, len(ROWS), 2))
    assert both["train_padding_share"] == pytest.approx(1 - tokens / slots)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="it loads the optimizer to cpu:0, which torch refuses"
)
def test_resumed(both):
    assert both == {"same": True, "tokens": 2 * sum(map(len, ROWS))}


def test_empty_seat(both):
    # step 1: two rows on rank 0 and one on rank 1; step 2: one row, and a filler that counts for nothing
    for loss, tokens in both.values():
        assert loss == pytest.approx([(2 * BAD + 10 * GOOD) / 12, GOOD], abs=1e-5)
        assert tokens == 3 + 9 + 2 + 3


def test_the_case_is_the_published_one():
    assert exact_loss(C19) == pytest.approx(1.167273, abs=1e-6)
