"""Plans: what holds for any lengths, what real ones are worth, and the same plan on every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.data import filling
from tuning.data.cost import TOKENS, Cost
from tuning.data.packing import PackingSpec, count_micro_steps, mean_tokens, plan, surely_fits
from tuning.errors import DataError

# a model of seven billion parameters, all trained
SEVEN_BILLION = Cost(ratio=2.15e-5)

lists_of_lengths = st.one_of(
    st.lists(st.integers(1, 60), min_size=1, max_size=120),
    st.lists(st.just(7), min_size=1, max_size=80),
    st.lists(st.integers(1, 5), min_size=1, max_size=80).map(lambda values: [*values, 500]),
)
specs = st.builds(
    PackingSpec,
    mode=st.sampled_from(["exact", "budget"]),
    num_ranks=st.integers(1, 8),
    batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    seed=st.integers(-3, 2**40),
    cost=st.sampled_from([TOKENS, SEVEN_BILLION, Cost(ratio=0.5)]),
    max_tokens=st.integers(1, 90),
)


def spec(mode="budget", **values) -> PackingSpec:
    known = {
        "num_ranks": 8,
        "batch_size": 8,
        "accumulation": 1,
        "seed": 1,
        "cost": SEVEN_BILLION,
        "max_tokens": None,
    }
    return PackingSpec(mode=mode, **{**known, **values})


def uncapped(drawn: PackingSpec) -> PackingSpec:
    """A cap in exact mode may be refused, and has tests of its own."""
    if drawn.mode == "budget":
        return drawn
    return spec(
        "exact",
        num_ranks=drawn.num_ranks,
        batch_size=drawn.batch_size,
        accumulation=drawn.accumulation,
        seed=drawn.seed,
        cost=drawn.cost,
    )


def instruction_lengths(num_samples, seed=0):
    """Like mixtures of instruction data: median 175, mean 270, longest 4,820."""
    drawn = np.random.default_rng(seed).lognormal(np.log(175), 0.95, num_samples)
    return np.clip(drawn, 8, 4820).astype(np.int64)


def reasoning_lengths(num_samples, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(3000), 0.8, num_samples)
    return np.clip(drawn, 16, 16_000).astype(np.int64)


# ---- what holds for any lengths ----


@settings(deadline=None, max_examples=300)
@given(lists_of_lengths, specs)
def test_each_sample_once_and_the_same_number_of_batches_for_every_rank_and_epoch(lengths, drawn):
    drawn = uncapped(drawn)
    count = count_micro_steps(lengths, drawn)
    for epoch in range(3):
        made = plan(lengths, drawn, epoch=epoch, num_micro_steps=count if epoch else None)
        batches = [list(made.batches(rank)) for rank in range(drawn.num_ranks)]
        assert {len(of_rank) for of_rank in batches} == {count}
        assert made.num_steps == -(-count // drawn.accumulation)
        seen = [sample for of_rank in batches for batch in of_rank for sample in batch]
        assert sorted(seen) == list(range(len(lengths)))
        # a filler stands only where the samples of the epoch, or of an exact step, are fewer than its seats
        empty = sum(not batch for of_rank in batches for batch in of_rank)
        seats = count * drawn.num_ranks
        per_step = drawn.accumulation * drawn.num_ranks
        whole = len(lengths) // (per_step * drawn.batch_size) if drawn.mode == "exact" else 0
        assert empty == max(0, (seats - whole * per_step) - (len(lengths) - whole * per_step * drawn.batch_size))
        held = [[sum(lengths[sample] for sample in batches[rank][step]) for rank in range(drawn.num_ranks)]
                for step in range(count)]  # fmt: skip
        assert made.seat_tokens.tolist() == held
        if drawn.mode == "budget":
            assert max(map(max, held)) <= max(drawn.max_tokens, max(lengths))


@settings(deadline=None, max_examples=150)
@given(lists_of_lengths, specs, st.integers(0, 2**32 - 1))
def test_an_exact_step_holds_the_samples_of_the_plain_run(lengths, drawn, shuffle):
    drawn = uncapped(
        spec("exact", **{name: getattr(drawn, name) for name in ("num_ranks", "batch_size", "accumulation")})
    )
    order = np.random.default_rng(shuffle).permutation(len(lengths))
    made = plan(lengths, drawn, order=order)
    per_step = drawn.num_ranks * drawn.batch_size * drawn.accumulation
    assert made.num_micro_steps == -(-len(lengths) // (drawn.num_ranks * drawn.batch_size))
    for step in range(made.num_steps):
        rows = range(step * drawn.accumulation, min((step + 1) * drawn.accumulation, made.num_micro_steps))
        held = [sample for row in rows for rank in range(drawn.num_ranks) for sample in made.seat(row, rank).tolist()]
        assert sorted(held) == sorted(order[step * per_step : (step + 1) * per_step].tolist())
        # the plain run reads them in this order, too
        for row in rows:
            for rank in range(drawn.num_ranks):
                places = [int(np.flatnonzero(order == sample)[0]) for sample in made.seat(row, rank)]
                assert places == sorted(places)


@settings(deadline=None, max_examples=150)
@given(lists_of_lengths, specs)
def test_a_cap_in_exact_mode_is_kept_or_told(lengths, drawn):
    capped = spec(
        "exact",
        num_ranks=drawn.num_ranks,
        batch_size=drawn.batch_size,
        accumulation=drawn.accumulation,
        max_tokens=drawn.max_tokens,
    )
    try:
        made = plan(lengths, capped)
    except DataError:
        assert not surely_fits(lengths, capped)
        return
    assert made.seat_tokens.max() <= drawn.max_tokens
    assert sorted(made.order.tolist()) == list(range(len(lengths)))


@settings(deadline=None, max_examples=50)
@given(lists_of_lengths, specs, st.integers(0, 5))
def test_a_plan_is_the_same_on_every_rank(lengths, drawn, epoch):
    drawn = uncapped(drawn)
    first, second = (plan(lengths, drawn, epoch=epoch) for _ in range(2))
    assert first.order.tolist() == second.order.tolist()
    assert first.offsets.tolist() == second.offsets.tolist()


def test_what_takes_lengths_takes_any_sequence():
    plans = [
        plan(kind([5, 3, 4, 1]), spec(max_tokens=6)) for kind in (list, tuple, np.array, lambda v: np.array(v, "u2"))
    ]
    assert len({tuple(made.order.tolist()) for made in plans}) == 1


@pytest.mark.parametrize("mode", ["exact", "budget"])
def test_seed_and_epoch_change_the_plan(mode):
    lengths = instruction_lengths(500)
    max_tokens = None if mode == "exact" else 2200
    made = {
        (seed, epoch): plan(lengths, spec(mode, num_ranks=2, seed=seed, max_tokens=max_tokens), epoch=epoch)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len({tuple(value.order.tolist()) for value in made.values()}) == 6
    # partners change as well, not only the order of the packs
    packs = [
        {frozenset(batch) for rank in range(2) for batch in value.batches(rank) if len(batch) > 3}
        for value in made.values()
    ]
    assert all(not (a & b) for number, a in enumerate(packs) for b in packs[:number])


@pytest.mark.parametrize("mode", ["exact", "budget"])
def test_no_rank_always_gets_the_most(mode):
    made = plan(instruction_lengths(60_000), spec(mode, num_ranks=4, max_tokens=None if mode == "exact" else 2200))
    most = np.bincount(made.seat_costs.argmax(axis=1), minlength=4) / made.num_micro_steps
    assert most.min() > 0.2


def test_few_samples_one_sample_one_length_and_one_huge_sample():
    assert [list(plan([9], spec(num_ranks=2, max_tokens=4)).batches(rank)) for rank in range(2)].count([[]]) == 1
    few = plan([3, 2, 1], spec("exact", num_ranks=4))
    assert (few.num_micro_steps, few.stats().num_fillers) == (1, 1)
    alike = plan([10] * 64, spec(num_ranks=4, max_tokens=40))
    assert (alike.num_micro_steps, alike.stats().fill, alike.stats().cost_balance) == (4, 1.0, 1.0)
    huge = plan([10_000] + [10] * 639, spec(num_ranks=4, max_tokens=100))
    assert huge.stats().num_over_long == 4
    # beside it the ranks are filled to 16 times max_tokens, not to its length
    beside = sorted(huge.seat_tokens[huge.seat_tokens.max(axis=1) == 10_000].tolist()[0])
    assert beside[3] == 10_000
    assert 1580 <= beside[0] <= beside[2] <= 1600
    assert huge.num_micro_steps == 1 + -(-(6390 - 4800) // 400)


def test_nothing_to_train_on():
    for mode in ("exact", "budget"):
        with pytest.raises(DataError) as caught:
            plan([], spec(mode, max_tokens=10))
        assert str(caught.value) == "there is no sample to train on; see the data table for why rows were dropped"


def test_a_budget_needs_its_tokens():
    with pytest.raises(ValueError, match=r"^budget mode needs max_tokens; mean_tokens gives the default$"):
        plan([1], spec())


def test_the_default_budget_is_the_mean_batch():
    assert mean_tokens([1, 2, 3], 4) == 8
    assert mean_tokens([1, 2], 1) == 2
    assert mean_tokens([], 4) == 1


def test_a_step_that_does_not_fit_the_cap_is_told_with_what_to_do():
    capped = spec("exact", num_ranks=2, batch_size=2, max_tokens=11)
    with pytest.raises(DataError) as caught:
        plan([9, 8, 7, 2, 1, 1, 1, 1], capped, epoch=3, order=np.array([4, 5, 6, 7, 0, 1, 2, 3]))
    assert str(caught.value) == (
        "--multipack mode=exact max_tokens=11: optimizer step 1 of epoch 3 holds 26 tokens in 4 samples (longest 9), "
        "which do not fit its 2 seats. Raise max_tokens (22 is enough for this step), raise "
        "gradient_accumulation_steps and lower per_device_train_batch_size, or use mode=budget"
    )
    assert plan([9, 8, 7, 2], spec("exact", num_ranks=2, batch_size=2, max_tokens=22)).num_micro_steps == 1
    # of samples this short every step fits, whatever the order
    assert surely_fits([9, 8, 7, 2], spec("exact", num_ranks=2, batch_size=2, max_tokens=22))
    assert not surely_fits([9, 8, 7, 2], capped)


def test_stats_of_some_steps():
    made = plan([4, 4, 2, 1, 3, 3], spec("exact", num_ranks=2, batch_size=1, accumulation=2, cost=TOKENS, max_tokens=5),
                order=np.arange(6))  # fmt: skip
    first, last, both = made.stats(0, 1), made.stats(1, 2), made.stats()
    assert (first.num_samples, first.num_tokens, last.num_samples, last.num_tokens) == (4, 11, 2, 6)
    # 4 and 4, then 2 and 1; then 3 and 3
    assert first.token_balance == first.cost_balance == pytest.approx(5.5 / 6)
    assert last.cost_balance == 1.0
    assert both.cost_balance == pytest.approx(8.5 / 9)
    assert (first.fill, both.fill) == (11 / 20, 17 / 30)
    assert first.bound == 1.0
    assert (both.least_samples, both.most_samples, both.num_steps) == (2, 4, 2)
    assert made.samples_before(2).tolist() == made.order[:4].tolist()


def test_the_bound_counts_the_longest_sample():
    made = plan([8, 1, 1, 1, 1], spec("exact", num_ranks=2, batch_size=3, cost=TOKENS), order=np.arange(5))
    assert made.stats().bound == made.stats().cost_balance == 6 / 8


# ---- what real lengths are worth ----


def budget(lengths, batch_size, num_ranks, **values):
    return plan(
        lengths,
        spec(num_ranks=num_ranks, batch_size=batch_size, max_tokens=mean_tokens(lengths, batch_size), **values),
    ).stats()


@pytest.mark.parametrize("batch_size", [4, 8])
@pytest.mark.parametrize("num_samples", [6_000, 50_000])
def test_a_budget_is_full_and_equal_on_instruction_data(num_samples, batch_size):
    stats = budget(instruction_lengths(num_samples), batch_size, 8)
    assert stats.cost_balance >= 0.99
    # no whole number of micro-steps fills better than to one less
    assert stats.fill >= 0.995 - (1 / stats.num_steps if num_samples == 6_000 else 0)
    assert budget(instruction_lengths(num_samples), batch_size, 64).cost_balance >= 0.985


def test_a_budget_is_equal_on_reasoning_data():
    for batch_size in (4, 8):
        assert budget(reasoning_lengths(20_000), batch_size, 8).cost_balance >= 0.985


def test_matching_by_cost_is_what_makes_a_budget_equal(monkeypatch):
    lengths = reasoning_lengths(20_000)
    assert budget(lengths, 4, 64).cost_balance >= 0.985
    monkeypatch.setattr(filling, "_match", lambda placed, costs, seats, rng: placed)
    assert budget(lengths, 4, 64).cost_balance < 0.985


def test_exact_steps_are_nearly_equal():
    lengths = instruction_lengths(20_000)
    assert plan(lengths, spec("exact", accumulation=4)).stats().cost_balance >= 0.97
    for batch_size in (4, 8):
        stats = plan(lengths, spec("exact", batch_size=batch_size)).stats()
        assert stats.cost_balance >= 0.95 * stats.bound


@pytest.mark.parametrize("mode", ["exact", "budget"])
def test_a_million_lengths_take_less_than_a_second(mode):
    lengths = instruction_lengths(1_000_000)
    asked = spec(mode, max_tokens=mean_tokens(lengths, 8) if mode == "budget" else None)
    started = time.process_time()
    made = plan(lengths, asked)
    seconds = time.process_time() - started
    assert len(made.order) == 1_000_000
    assert seconds < 1.0
