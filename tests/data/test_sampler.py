"""The sampler of one rank: the plain run's order, batches of every rank and epoch, resume, and upstream's traps."""

from __future__ import annotations

import copy
import json

import accelerate
import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler
from transformers import set_seed

from tuning.data.cost import TOKENS, Cost
from tuning.data.packing import PackingSpec, count_micro_steps
from tuning.data.sampler import MultiPackSampler, plain_order
from tuning.errors import CheckpointError

LENGTHS = [3, 9, 2, 7, 5, 1, 8, 4, 6, 2, 9, 3]


def spec(mode="exact", **values) -> PackingSpec:
    known = {"num_ranks": 2, "batch_size": 2, "accumulation": 1, "seed": 5, "cost": TOKENS, "max_tokens": None}
    return PackingSpec(mode=mode, **{**known, **values})


def samplers(lengths, drawn, **values) -> list[MultiPackSampler]:
    return [MultiPackSampler(lengths, drawn, rank=rank, **values) for rank in range(drawn.num_ranks)]


def epoch_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def flat(batches):
    return [sample for batch in batches for sample in batch]


# ---- the plain run ----


def plain_batches(num_samples, *, batch_size, world_size, rank, seed, epochs):
    """Batches of transformers' trainer: a random sampler, prepared by accelerate with its seedable sampler."""
    accelerate.PartialState(cpu=True)
    rows = list(range(num_samples))
    set_seed(seed)
    loader = prepare_data_loader(
        DataLoader(rows, batch_size=batch_size, sampler=RandomSampler(rows)),
        num_processes=world_size,
        process_index=rank,
        put_on_device=False,
        use_seedable_sampler=True,
    )
    found = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    return found


@pytest.mark.parametrize(
    ("num_samples", "world_size", "accumulation"), [(24, 1, 1), (24, 2, 1), (26, 2, 3), (17, 4, 2), (23, 1, 4)]
)
def test_each_step_holds_the_samples_of_accelerates_own_loader(num_samples, world_size, accumulation):
    plain = [
        plain_batches(num_samples, batch_size=2, world_size=world_size, rank=rank, seed=11, epochs=3)
        for rank in range(world_size)
    ]
    lengths = np.random.default_rng(0).integers(1, 99, num_samples)
    ranks = samplers(lengths, spec(num_ranks=world_size, accumulation=accumulation, seed=11))
    for epoch in range(3):
        ours = [epoch_of(sampler, epoch) for sampler in ranks]
        assert {len(batches) for batches in ours} == {len(plain[0][epoch])}
        for start in range(0, len(ours[0]), accumulation):
            step = slice(start, start + accumulation)
            held = sorted(flat(flat(batches[step]) for batches in ours))
            theirs = flat(flat(plain[rank][epoch][step]) for rank in range(world_size))
            # at the end of an epoch accelerate repeats samples, which we do not
            assert held == sorted(set(theirs) - set(flat(flat(p[epoch][:start] for p in plain))))


def test_the_order_is_a_permutation_that_seed_and_epoch_choose():
    orders = {(seed, epoch): plain_order(50, seed=seed, epoch=epoch).tolist() for seed in (3, 9) for epoch in (0, 1)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(map(tuple, orders.values()))) == 4
    assert plain_order(50, seed=3, epoch=1).tolist() == orders[3, 1]


# ---- reports of others, turned into inputs ----


def test_every_rank_gets_the_same_number_of_packed_batches():
    # https://github.com/axolotl-ai-cloud/axolotl/pull/461
    lengths = [8, 8, 8, 8, 1, 1, 1, 1]
    found = [list(sampler) for sampler in samplers(lengths, spec("budget", max_tokens=8))]
    assert [len(batches) for batches in found] == [3, 3]
    assert all(0 < sum(lengths[sample] for sample in batch) <= 8 for batches in found for batch in batches)
    assert sorted(flat(found[0]) + flat(found[1])) == list(range(8))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.sampled_from(["exact", "budget"]),
    st.integers(1, 8),
    st.integers(0, 4),
)
def test_batches_of_all_ranks_are_one_epoch(lengths, mode, num_ranks, seed):
    drawn = spec(mode, num_ranks=num_ranks, seed=seed, max_tokens=30 if mode == "budget" else None)
    ranks = samplers(lengths, drawn)
    for epoch in range(2):
        found = [epoch_of(sampler, epoch) for sampler in ranks]
        assert {len(batches) for batches in found} == {len(ranks[0])}
        assert sorted(flat(map(flat, found))) == list(range(len(lengths)))


@pytest.mark.parametrize("mode", ["exact", "budget"])
@pytest.mark.parametrize(("lengths", "num_ranks"), [([5], 2), ([5, 6, 7], 4), ([5], 8)])
def test_fewer_samples_than_ranks_leave_filler_seats(mode, lengths, num_ranks):
    # https://github.com/instructlab/training/pull/112
    ranks = samplers(lengths, spec(mode, num_ranks=num_ranks, max_tokens=8 if mode == "budget" else None))
    found = [list(sampler) for sampler in ranks]
    # one step, and an empty list for ranks without a sample: the collator makes a filler of it
    assert [len(batches) for batches in found] == [1] * num_ranks
    assert sorted(len(batches[0]) for batches in found) == [0] * (num_ranks - len(lengths)) + [1] * len(lengths)


@pytest.mark.parametrize("mode", ["exact", "budget"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, sorted(LENGTHS), sorted(LENGTHS, reverse=True)], ids=["mixed", "up", "down"]
)
def test_the_length_is_true_in_every_epoch(mode, num_ranks, lengths):
    # https://github.com/huggingface/sentence-transformers/issues/3348
    drawn = spec(mode, num_ranks=num_ranks, max_tokens=10 if mode == "budget" else None)
    promised = {len(sampler) for sampler in samplers(lengths, drawn)}
    assert len(promised) == 1
    for sampler in samplers(lengths, drawn):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            before = len(sampler)
            batches = []
            for batch in sampler:
                batches.append(batch)
                assert len(sampler) == before
            assert len(batches) == before == promised.copy().pop()
    if mode == "budget":
        # 59 tokens in packs of 10
        assert promised.pop() >= -(-6 // num_ranks)


@pytest.mark.parametrize("mode", ["exact", "budget"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_epochs_differ_and_ranks_agree(mode, num_ranks):
    # https://github.com/huggingface/sentence-transformers/issues/3069
    drawn = spec(mode, num_ranks=num_ranks, max_tokens=10 if mode == "budget" else None)
    told = [[epoch_of(sampler, epoch) for epoch in range(3)] for sampler in samplers(LENGTHS, drawn)]
    # nobody calls set_epoch: accelerate 1.15 does not, at world size 2
    untold = [[list(sampler) for _ in range(3)] for sampler in samplers(LENGTHS, drawn)]
    assert told == untold
    orders = [tuple(flat(flat(epochs[epoch]) for epochs in told)) for epoch in range(3)]
    assert len(set(orders)) == 3
    assert all(sorted(order) == list(range(12)) for order in orders)
    other = [[epoch_of(sampler, epoch) for epoch in range(3)] for sampler in
             samplers(LENGTHS, spec(mode, num_ranks=num_ranks, seed=6, max_tokens=drawn.max_tokens))]  # fmt: skip
    assert other != told


def test_a_loader_of_ours_is_not_sharded_a_second_time():
    # https://github.com/huggingface/accelerate/issues/4075
    rows = list(range(10, 26))
    seen = []
    for sampler in samplers([4] * 16, spec()):
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=list)
        batches = list(loader)
        assert len(loader) == len(batches) == 4
        seen += flat(batches)
    assert sorted(seen) == rows


# ---- upstream's traps ----


def test_an_iterator_that_never_ends_still_moves_the_epoch_on():
    # transformers takes as many batches as there are and never asks for one more
    sampler = samplers(LENGTHS, spec())[0]
    batches = iter(sampler)
    first = [next(batches) for _ in range(len(sampler))]
    assert sampler.epoch == 1
    assert list(sampler) == epoch_of(samplers(LENGTHS, spec())[0], 1) != first


def test_an_old_iterator_does_not_move_the_epoch():
    sampler = samplers(LENGTHS, spec())[0]
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    next(new)
    list(old)
    assert (sampler.epoch, sampler.state_dict()["micro_step"]) == (0, 1)


def test_an_iterator_keeps_the_epoch_it_was_made_in():
    sampler = samplers(LENGTHS, spec())[0]
    batches = iter(sampler)
    sampler.set_epoch(4)
    assert list(batches) == epoch_of(samplers(LENGTHS, spec())[0], 0)


@pytest.mark.parametrize("mode", ["exact", "budget"])
def test_skipping_after_a_resume_skips_batches_of_that_epoch(mode):
    drawn = spec(mode, max_tokens=10 if mode == "budget" else None)
    for fresh, whole in zip(samplers(LENGTHS, drawn), samplers(LENGTHS, drawn), strict=True):
        state = whole.state_dict()
        fresh.load_state_dict(json.loads(json.dumps({**state, "epoch": 2, "micro_step": 2})))
        loader = DataLoader(list(range(12)), batch_sampler=fresh, collate_fn=list)
        skipped = accelerate.skip_first_batches(loader, 2)
        # what the trainer does at the beginning of an epoch, resumed or not
        fresh.set_epoch(2)
        assert list(skipped) == epoch_of(whole, 2)[2:]


def test_an_empty_seat_reads_no_row():
    rows = Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    found = [list(DataLoader(rows, batch_sampler=sampler, collate_fn=list)) for sampler in samplers([2], spec())]
    assert sorted(found) == [[[]], [[{"input_ids": [1, 2], "labels": [1, 2]}]]]


# ---- resume ----


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=60),
    st.sampled_from(["exact", "budget"]),
    st.integers(0, 3),
    st.integers(0, 60),
    st.integers(1, 3),
)
def test_a_resume_goes_on_with_equal_batches(lengths, mode, epoch, taken, accumulation):
    drawn = spec(mode, max_tokens=30 if mode == "budget" else None, accumulation=accumulation)
    for whole, resumed in zip(samplers(lengths, drawn), samplers(lengths, drawn), strict=True):
        whole.set_epoch(epoch)
        batches = iter(whole)
        for _ in range(taken % (len(whole) + 1)):
            next(batches)
        state = json.loads(json.dumps(whole.state_dict()))
        resumed.load_state_dict(state)
        assert len(resumed) == len(whole)
        rest = list(batches)
        if rest:
            assert list(resumed) == rest
        assert list(resumed) == epoch_of(whole, epoch + 1)


CHANGES = {
    "seed": (spec(seed=6), "the data seed was 5 and is 6"),
    "ranks": (spec(num_ranks=4), "the number of ranks was 2 and is 4"),
    "batch": (spec(batch_size=3), "per_device_train_batch_size was 2 and is 3"),
    "accumulation": (spec(accumulation=2), "gradient_accumulation_steps was 1 and is 2"),
    "mode": (
        spec("budget", max_tokens=10),
        "--multipack mode was exact and is budget, --multipack max_tokens was None and is 10, "
        "the cost of attention was None and is 0.0",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_resume_of_another_run_says_what_changed(change):
    now, words = CHANGES[change]
    state = samplers(LENGTHS, spec())[0].state_dict()
    sampler = MultiPackSampler(LENGTHS, now, rank=0)
    with pytest.raises(CheckpointError) as caught:
        sampler.load_state_dict(state)
    assert str(caught.value) == (
        f"the checkpoint was written by another run: {words}. Going on would train some samples twice and others "
        "never. Use the values of the checkpoint, or pass --resume_from_checkpoint false to start over"
    )


def test_a_resume_that_replan_can_help_says_so():
    state = samplers(LENGTHS, spec())[0].state_dict()
    sampler = MultiPackSampler(LENGTHS, spec(num_ranks=1, accumulation=2), rank=0)
    with pytest.raises(CheckpointError) as caught:
        sampler.load_state_dict(state)
    assert str(caught.value) == (
        "the checkpoint was written by another run: the number of ranks was 2 and is 1, gradient_accumulation_steps "
        "was 1 and is 2. Going on would train some samples twice and others never. Use the values of the checkpoint, "
        "or pass --resume_from_checkpoint false to start over, or add resume=replan to --multipack: each step keeps "
        "its samples here, and only their seats change"
    )


@pytest.mark.parametrize(
    ("lengths", "rows"), [(LENGTHS[:-1], None), ([*LENGTHS[:-1], 4], None), (LENGTHS, np.arange(1, 13))]
)
def test_other_data_cannot_be_planned_anew(lengths, rows):
    state = samplers(LENGTHS, spec())[0].state_dict()
    sampler = MultiPackSampler(lengths, spec(), rank=0, rows=rows)
    before, now = state["fingerprint"]["data"], sampler.state_dict()["fingerprint"]["data"]
    assert now.startswith(f"{len(lengths)} samples (")
    with pytest.raises(CheckpointError) as caught:
        sampler.load_state_dict(state, replan=True)
    assert str(caught.value) == (
        f"the checkpoint was written by another run: the training data was {before} and is {now}. The rest of its "
        "epoch cannot be planned anew, because nothing tells which of the new samples it has trained on. Use the data "
        "of the checkpoint, or pass --resume_from_checkpoint false to start over"
    )


def test_a_cap_and_a_cost_may_change_where_they_choose_seats_only():
    state = samplers(LENGTHS, spec())[0].state_dict()
    samplers(LENGTHS, spec(max_tokens=60, cost=Cost(ratio=1.0)))[0].load_state_dict(state)


@pytest.mark.parametrize("mode", ["exact", "budget"])
def test_a_version_that_plans_differently_is_found_out(mode):
    sampler = samplers(LENGTHS, spec(mode, max_tokens=10 if mode == "budget" else None))[0]
    state = sampler.state_dict()
    state["fingerprint"]["plan"] = "0123456789abcdef"
    with pytest.raises(CheckpointError) as caught:
        sampler.load_state_dict(state)
    assert str(caught.value).startswith(
        "the checkpoint was written by another run: another version of numpy, torch or packtune orders the samples "
        "differently. Going on would train some samples twice and others never."
    )
    with pytest.raises(CheckpointError):
        sampler.load_state_dict(state, replan=None)


def test_a_state_of_another_version():
    state = {**samplers(LENGTHS, spec())[0].state_dict(), "version": 9}
    with pytest.raises(CheckpointError) as caught:
        samplers(LENGTHS, spec())[0].load_state_dict(state)
    assert str(caught.value) == (
        "the checkpoint's data order has format 9 and this version reads 1; resume with the version that wrote it, or "
        "pass --resume_from_checkpoint false"
    )


def test_replan_goes_on_at_the_same_step_where_steps_stay_the_same():
    # 2 ranks with 2 micro-steps become 4 ranks with 1: a step still holds the same 8 samples
    lengths = list(range(1, 41))
    before, now = spec(accumulation=2), spec(num_ranks=4)
    old = samplers(lengths, before)
    state = {**old[0].state_dict(), "epoch": 1, "micro_step": 4}
    found = []
    for sampler in samplers(lengths, now, replan=True):
        sampler.load_state_dict(copy.deepcopy(state))
        assert sampler.num_steps == old[0].num_steps
        found.append(list(sampler))
    left = [flat(epoch_of(sampler, 1)[4:]) for sampler in old]
    for step in range(3):
        held = sorted(flat(batches[step] for batches in found))
        theirs = flat(flat(epoch_of(sampler, 1)[4 + 2 * step : 6 + 2 * step]) for sampler in old)
        assert held == sorted(theirs)
    assert sorted(flat(left)) == sorted(flat(map(flat, found)))


def test_replan_is_refused_where_a_trainer_would_miscount():
    state = samplers(LENGTHS, spec())[0].state_dict()
    with pytest.raises(CheckpointError) as caught:
        samplers(LENGTHS, spec(num_ranks=4), replan=True)[0].load_state_dict(state)
    assert str(caught.value) == (
        "the checkpoint was written by another run: the number of ranks was 2 and is 4. The trainer counts steps, and "
        "the epoch now has other ones: resume=replan needs mode=exact, the same seed, and the same product of ranks, "
        "per_device_train_batch_size and gradient_accumulation_steps. Choose these, or pass --resume_from_checkpoint "
        "false to start over"
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=50), st.sampled_from(["exact", "budget"]),
    st.sampled_from(["exact", "budget"]), st.integers(1, 5), st.integers(1, 5), st.integers(0, 40),
)  # fmt: skip
def test_the_rest_of_an_epoch_planned_anew_has_each_sample_left_once(lengths, mode, new_mode, ranks, new_ranks, taken):
    before = spec(mode, num_ranks=ranks, max_tokens=30 if mode == "budget" else None)
    now = spec(new_mode, num_ranks=new_ranks, seed=8, max_tokens=25 if new_mode == "budget" else None)
    old = samplers(lengths, before)
    taken %= len(old[0]) + 1
    seen = flat(flat(epoch_of(sampler, 2)[:taken]) for sampler in old)
    state = {**old[0].state_dict(), "epoch": 2, "micro_step": taken}
    if taken == len(old[0]):
        state.update(epoch=3, micro_step=0)
        seen = []
    found = []
    for sampler in samplers(lengths, now):
        sampler.load_state_dict(state, replan=True)
        promised = len(sampler)
        found.append(list(sampler))
        assert len(found[-1]) == promised
        # the next epoch is whole again
        assert len(sampler) == count_micro_steps(lengths, now)
    assert len(set(map(len, found))) == 1
    assert sorted(seen + flat(map(flat, found))) == list(range(len(lengths)))


# ---- rows and meters ----


def test_rows_left_out_stay_left_out():
    rows = np.array([0, 2, 5])
    found = [list(sampler) for sampler in samplers([4, 4, 4], spec(batch_size=1), rows=rows)]
    assert sorted(flat(map(flat, found))) == rows.tolist()


def test_meters_come_from_the_plan():
    sampler = MultiPackSampler([4, 2, 3, 3], spec("exact", num_ranks=2, batch_size=1), rank=0)
    assert sampler.num_steps == 2
    steps = [sampler.plan(0).stats(step, step + 1) for step in range(2)]
    assert sampler.meters(0, 1) == {
        "multipack/token_balance": steps[0].token_balance,
        "multipack/cost_balance": steps[0].cost_balance,
    }
    sampler.plan(1)
    across = sampler.meters(1, 3)["multipack/cost_balance"]
    assert across == pytest.approx((steps[1].cost_balance + sampler.plan(1).stats(0, 1).cost_balance) / 2)
    filled = MultiPackSampler([4, 2, 3, 3], spec("budget", max_tokens=6), rank=0)
    assert filled.meters(0, 1)["multipack/fill"] == 1.0
    # an epoch whose plan is gone has no meters
    assert filled.meters(50, 51) == {}
