"""``--multipack`` through the whole product on one, two and four processes (gloo, CPU).

Public reports of the faults: ranks with different numbers of batches that hang
(https://github.com/axolotl-ai-cloud/axolotl/issues/494), a rank without a sample
(https://github.com/instructlab/training/pull/112), a length that promises more than comes
(https://github.com/huggingface/sentence-transformers/issues/3348), the same batches in every epoch
(https://github.com/huggingface/sentence-transformers/issues/3069), a rank-aware sampler sharded a second time
(https://github.com/huggingface/accelerate/issues/4075).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest

from tests.distributed.multipack_scenarios import MODES, RAGGED, SIXTEEN, TWELVE, UNEVEN
from tests.distributed.test_two_ranks import launch
from tests.tiny import VOCAB_SIZE, bigram_losses
from tuning.data.sampler import plain_order

pytestmark = pytest.mark.slow
GOOD, BAD = bigram_losses(vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(tmp_path_factory, request) -> list[dict]:
    return launch(tmp_path_factory.mktemp("multipack"), request.param, "tests.distributed.multipack_scenarios")


@pytest.fixture(params=MODES)
def every(ranks, request) -> list:
    """Return what each rank found in the scenario a test is named after, in one mode."""
    name = f"{request.node.originalname.removeprefix('test_')} {request.param}"
    for number, results in enumerate(ranks):
        assert results["world_size"] == len(ranks)
        assert name in results, f"rank {number} did not come to {name}: {list(results.values())[-1]}"
        assert not (isinstance(results[name], dict) and "error" in results[name]), results[name]["error"]
    return [results[name] for results in ranks]


def epochs_of(every) -> list[list[int]]:
    """Return the first ids of each epoch over all ranks, and check that all ranks had equally many batches."""
    planned = every[0]["planned"]
    assert len({len(result["ids"]) for result in every}) == 1
    found: list[list[int]] = []
    for micro_step, seats in enumerate(zip(*(result["ids"] for result in every), strict=True)):
        if micro_step % planned == 0:
            found.append([])
        assert len({step for step, _ in seats}) == 1
        found[-1] += [i for _, ids in seats for i in ids]
    return found


def check_schedule(every, *, steps: int, rate: float = 2e-5):
    """Check that the run ends where it said, and that the learning rate is 0 then and not before."""
    for result in every:
        assert result["steps"] == [steps, steps]
        assert result["rates"] == pytest.approx([rate * (steps - step) / steps for step in range(steps)])
        assert result["last_rate"] == 0.0
        assert result["loss"] == every[0]["loss"]


def steps_of(every) -> dict[int, Counter]:
    """Return the samples of each optimizer step over all ranks."""
    steps: dict[int, Counter] = defaultdict(Counter)
    for result in every:
        for step, ids in result["ids"]:
            steps[step].update(ids)
    return steps


def mode_of(request) -> str:
    return request.node.callspec.params["every"]


def test_epochs(every, request):
    found = epochs_of(every)
    assert [sorted(epoch) for epoch in found] == [list(range(10, 22))] * 3
    assert all(left != right for left, right in itertools.combinations(found, 2))
    check_schedule(every, steps=3 * -(-12 // (2 * len(every))))
    if mode_of(request) == "exact":
        per_step = 2 * len(every)
        plain = [i for epoch in range(3) for i in plain_order(12, seed=42, epoch=epoch)]
        expected = [plain[12 * e :][:12][s : s + per_step] for e in range(3) for s in range(0, 12, per_step)]
        assert [sorted(step) for _, step in sorted(steps_of(every).items())] == [
            sorted(10 + i for i in step) for step in expected
        ]


def test_another_seed(every, ranks, request):
    found = epochs_of(every)
    assert sorted(found[0]) == list(range(10, 22))
    assert found[0] != epochs_of([results[f"epochs {mode_of(request)}"] for results in ranks])[0]


def test_no_second_sharding(every):
    assert [len(result["ids"]) for result in every] == [8 // len(every)] * len(every)
    assert sorted(epochs_of(every)[0]) == [row[0] for row in SIXTEEN]


def test_lengths_and_schedule(every):
    found = epochs_of(every)
    assert [sorted(epoch) for epoch in found] == [[20 + i for i in range(len(UNEVEN))]] * 2
    check_schedule(every, steps=2 * -(-every[0]["planned"] // 2))
    assert all(result["tokens"] == 2 * sum(map(len, UNEVEN)) for result in every)


def test_accumulation_beyond_the_epoch(every):
    assert [sorted(epoch) for epoch in epochs_of(every)] == [list(range(10, 22))] * 2
    check_schedule(every, steps=2)


def test_half_an_epoch_more(every):
    first, half = epochs_of(every)
    assert sorted(first) == [row[0] for row in SIXTEEN]
    assert len(set(half)) == len(half) == 8
    check_schedule(every, steps=24 // len(every))


def test_max_steps_inside_the_second_epoch(every):
    first, rest = epochs_of(every)
    assert sorted(first) == [row[0] for row in TWELVE]
    assert len(rest) == len(every)
    check_schedule(every, steps=12 // len(every) + 1)


def test_uneven_packs(every, request):
    assert sorted(epochs_of(every)[0]) == list(range(10, 18))
    if mode_of(request) == "budget":
        # four full packs, and one of the short ones
        assert every[0]["planned"] == -(-5 // len(every))


def test_one_sample(every):
    assert epochs_of(every) == [[10], [10]]
    check_schedule(every, steps=2)
    assert every[0]["loss"][0] == pytest.approx(GOOD, abs=1e-5)
    assert all(result["tokens"] == 6 for result in every)


def test_three_samples(every):
    assert [sorted(epoch) for epoch in epochs_of(every)] == [[10, 20, 30]] * 2
    check_schedule(every, steps=2 * -(-3 // len(every)))


def test_one_huge_sample(every):
    assert sorted(epochs_of(every)[0]) == [10, *range(20, 35)]
    assert all(result["tokens"] == 150 for result in every)


def check_loss_a_token(result):
    # one bad target of ten; a mean of the ranks' means would be half a bad one
    assert result["loss"] == pytest.approx([(BAD + 9 * GOOD) / 10], abs=1e-5)
    probability, others = 2.718281828459045**-GOOD, 2.718281828459045**-BAD
    expected = [0.1 * (1 - others) / 10, 4 + 0.1 * (1 - probability) / 10]
    assert result["weights"] == pytest.approx(expected, abs=1e-4)


def test_loss_a_token(every):
    for result in every:
        assert result == every[0]
        check_loss_a_token(result)


def test_loss_a_token_of_kernels(every):
    for result in every:
        assert result == every[0]
        for of_kernel in result:
            check_loss_a_token(of_kernel)


def test_evaluation(every):
    loss = sum(BAD if b != a + 1 else GOOD for row in RAGGED for a, b in itertools.pairwise(row))
    loss /= sum(len(row) - 1 for row in RAGGED)
    for size, first in every[0].items():
        ids = sorted(i for result in every for i in result[size]["ids"])
        assert ids == [row[0] for row in RAGGED], size
        assert first["loss"] == pytest.approx([loss], abs=1e-5)
        assert first["tokens"] == [sum(map(len, RAGGED))]
        # evaluation in between takes nothing from the training batches
        assert sorted(epochs_of([result[size]["train"] for result in every])[0]) == [row[0] for row in TWELVE]


def test_resumed(every):
    for result in every:
        later = [entry for entry in result["whole"] if entry[0] >= result["stop"]]
        assert result["rest"] == later
        assert 0 < len(later) < len(result["whole"])
        assert result["same"]
        assert result["losses"]


def test_resumed_with_another_seed(every):
    assert all("the data seed was 42 and is 5" in result for result in every)
