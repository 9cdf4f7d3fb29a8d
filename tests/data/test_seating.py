"""Seating the samples of a step: what holds for any step, and what unequal micro-steps are worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.data import seating
from tuning.data.seating import seat_steps


def seat(costs, *, num_ranks, num_micro_steps, seed=0, max_tokens=None):
    costs = np.atleast_2d(np.array(costs, dtype=np.int64))
    return seat_steps(
        costs,
        num_ranks=num_ranks,
        num_micro_steps=num_micro_steps,
        rng=np.random.default_rng(seed),
        lengths=costs,
        max_tokens=max_tokens,
    )


def loads(seats, costs, *, num_ranks, num_micro_steps):
    costs = np.atleast_2d(costs)
    shape = (num_micro_steps, num_ranks)
    return np.stack(
        [
            np.bincount(row, weights=work, minlength=num_ranks * num_micro_steps).reshape(shape)
            for row, work in zip(seats, costs, strict=True)
        ]
    )


@settings(deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_every_sample_has_a_seat_and_no_seat_is_empty_without_need(steps, samples, num_ranks, num_micro_steps, seed):
    costs = np.random.default_rng(seed).integers(1, 1000, (steps, samples))
    seats = seat(costs, num_ranks=num_ranks, num_micro_steps=num_micro_steps)
    num_seats = num_ranks * num_micro_steps
    assert seats.shape == costs.shape
    assert seats.min() >= 0
    assert seats.max() < num_seats
    for row in seats:
        assert len(set(row.tolist())) >= min(samples, num_seats)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_a_cap_is_kept_or_a_sample_is_left(samples, num_ranks, num_micro_steps, max_tokens, seed):
    costs = np.random.default_rng(seed).integers(1, 40, (2, samples))
    seats = seat(costs, num_ranks=num_ranks, num_micro_steps=num_micro_steps, max_tokens=max_tokens)
    for row, lengths in zip(seats, costs, strict=True):
        where = row >= 0
        tokens = np.bincount(row[where], weights=lengths[where], minlength=num_ranks * num_micro_steps)
        assert tokens.max(initial=0) <= max_tokens
        # a sample is left only where no seat has room for it
        assert all(max_tokens - tokens.min() < length for length in lengths[~where])


def test_a_tight_cap_falls_back_to_packing():
    # longest first into the most room fails on this one: 6 5 | 4 4 leaves no room for 3
    costs = [6, 5, 4, 4, 3]
    seats = seat(costs, num_ranks=2, num_micro_steps=1, max_tokens=11)
    assert sorted(loads(seats, [costs], num_ranks=2, num_micro_steps=1)[0, 0].tolist()) == [11, 11]


def test_one_long_sample_leaves_nobody_idle():
    costs = [[70] + [10] * 29]
    seats = seat(costs, num_ranks=4, num_micro_steps=2)
    load = loads(seats, costs, num_ranks=4, num_micro_steps=2)[0]
    assert load[0].tolist() == [70.0] * 4
    assert sorted(load[1].tolist()) == [20.0] * 4
    # all seats equal: the first micro-step would last 70 with 45 a rank in it
    assert load.max(axis=1).sum() == 90


def test_no_rank_always_gets_the_longest():
    costs = np.tile([50, 1, 1, 1], (400, 1))
    seats = seat(costs, num_ranks=4, num_micro_steps=1)
    counts = np.bincount(seats[:, 0], minlength=4)
    # 400 draws of 4 ranks: 100 each, standard deviation 8.7
    assert counts.min() > 60
    again = seat(costs, num_ranks=4, num_micro_steps=1, seed=1)
    assert (seats != again).any()


def test_the_longest_micro_step_comes_first():
    costs = np.random.default_rng(0).lognormal(5, 1, (50, 64)).astype(np.int64)
    load = loads(seat(costs, num_ranks=4, num_micro_steps=4), costs, num_ranks=4, num_micro_steps=4)
    durations = load.max(axis=2)
    assert (durations[:, 0] == durations.max(axis=1)).mean() > 0.9


def balance(num_micro_steps=4):
    costs = np.clip(np.random.default_rng(0).lognormal(np.log(175), 0.95, (100, 256)), 8, 4800).astype(np.int64)
    load = loads(seat(costs, num_ranks=8, num_micro_steps=4), costs, num_ranks=8, num_micro_steps=4)
    return load.sum() / 8 / load.max(axis=2).sum()


def test_unequal_micro_steps_are_what_balances(monkeypatch):
    assert balance() > 0.97

    def equal(costs, num_ranks, num_micro_steps):
        share = -(-costs.sum(axis=1) // (num_ranks * num_micro_steps))
        return np.repeat(share[:, None], num_micro_steps, axis=1)

    monkeypatch.setattr(seating, "_durations", equal)
    assert balance() < 0.97


def test_blocks_of_steps_are_seated_alike(monkeypatch):
    costs = np.random.default_rng(0).integers(1, 99, (10, 12))
    whole = seat(costs, num_ranks=2, num_micro_steps=2)
    monkeypatch.setattr(seating, "_BLOCK", 12)
    assert (seat(costs, num_ranks=2, num_micro_steps=2) == whole).all()


@pytest.mark.parametrize("samples", [1, 3])
def test_fewer_samples_than_seats(samples):
    costs = np.arange(1, samples + 1)[None]
    seats = seat(costs, num_ranks=2, num_micro_steps=2)
    assert len(set(seats[0].tolist())) == samples
