"""Filling seats to a number of tokens: what holds for any lengths, and how full and how equal real ones come out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.data import filling
from tuning.data.filling import WINDOW, Seats, count_micro_steps, fill
from tuning.data.packing import mean_tokens


def longest_first(values) -> np.ndarray:
    return -np.sort(-np.asarray(values, dtype=np.int64))


def pack(lengths, *, capacity, num_ranks, epoch=0, num_micro_steps=None, costs=None):
    return fill(
        lengths,
        lengths if costs is None else costs,
        capacity=capacity,
        num_ranks=num_ranks,
        num_micro_steps=num_micro_steps,
        seed=[3, epoch],
        first_seed=[3, 0],
    )


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=150) | st.lists(st.sampled_from([1, 7, 31, 32]), min_size=1),
    st.integers(1, 70),
    st.integers(1, 9),
)
def test_every_sample_has_one_seat_in_every_epoch(values, capacity, num_ranks):
    lengths = longest_first(values)
    count = count_micro_steps(lengths, capacity=capacity, num_ranks=num_ranks, seed=[3, 0])
    for epoch in range(3):
        seats, found = pack(lengths, capacity=capacity, num_ranks=num_ranks, epoch=epoch, num_micro_steps=count)
        assert found == count
        assert seats.shape == lengths.shape
        assert seats.min() >= 0
        assert seats.max() < count * num_ranks
        tokens = np.bincount(seats, weights=lengths, minlength=count * num_ranks)
        assert tokens.max() <= max(capacity, lengths[0])
        if len(lengths) >= count * num_ranks:
            assert tokens.min() > 0


def test_the_count_is_found_either_way():
    lengths = longest_first([9, 7, 5, 5, 3, 3, 1])
    seats, count = pack(lengths, capacity=10, num_ranks=2)
    again, _ = pack(lengths, capacity=10, num_ranks=2, num_micro_steps=count)
    assert count == count_micro_steps(lengths, capacity=10, num_ranks=2, seed=[3, 0])
    assert (seats == again).all()


def test_too_few_micro_steps_are_refused():
    with pytest.raises(ValueError, match=r"^1 micro-steps are too few for 3 samples$"):
        pack(longest_first([9, 9, 9]), capacity=10, num_ranks=2, num_micro_steps=1)


def test_an_epoch_that_does_not_fit_takes_the_first_ones_packing(monkeypatch):
    lengths = longest_first(np.random.default_rng(0).integers(1, 40, 500))
    real = filling._try

    def only_first(lengths, seats, seed):
        placed, left = real(lengths, seats, seed)
        return (placed, left) if seed == [3, 0] else (placed, 1)

    monkeypatch.setattr(filling, "_try", only_first)
    first, count = pack(lengths, capacity=100, num_ranks=4)
    second, _ = pack(lengths, capacity=100, num_ranks=4, epoch=1, num_micro_steps=count)
    assert (first != second).any()
    packs = [
        sorted(tuple(lengths[seats == seat]) for seat in range(4 * count)) for seats in (first, second)
    ]  # fmt: skip
    assert packs[0] == packs[1]
    # samples of one length are exchanged, so that partners change
    partners = [{tuple(np.flatnonzero(seats == seat)) for seat in range(4 * count)} for seats in (first, second)]
    assert partners[0] != partners[1]


def test_no_time_is_lost_beside_a_long_sample():
    lengths = longest_first([100] + [10] * 90)
    seats, count = pack(lengths, capacity=50, num_ranks=4)
    tokens = np.bincount(seats, weights=lengths, minlength=4 * count).reshape(count, 4)
    stretched = tokens[(tokens == 100).any(axis=1)]
    # all ranks are filled up to the long one's length
    assert stretched.tolist() == [[100.0] * 4]
    assert count == 1 + -(-600 // 200)


def test_samples_that_are_all_too_long_get_a_seat_each():
    assert count_micro_steps(longest_first([500] * 200), capacity=1, num_ranks=8, seed=[0, 0]) == 25
    # 375 are enough; windows of one size have seats for their share
    assert 375 <= count_micro_steps(longest_first([500] * 3_000), capacity=1, num_ranks=8, seed=[0, 0]) <= 384


def test_samples_of_half_a_seat_and_a_bit_get_a_seat_each():
    lengths = longest_first([60] * 37)
    seats, count = pack(lengths, capacity=100, num_ranks=4)
    assert count == 10
    assert np.bincount(seats, minlength=40).max() == 1


def test_windows_differ_by_one_micro_step_at_most_and_blocks_cover_them():
    for num_micro_steps in (1, WINDOW, WINDOW + 1, 5 * WINDOW + 17):
        seats = Seats(capacity=1, num_ranks=9, num_micro_steps=num_micro_steps)
        sizes = [size for _, windows, size in seats.groups() for _ in range(windows)]
        assert sum(sizes) == num_micro_steps
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == seats.num_windows
        ends = [first + windows * size for first, windows, size in seats.blocks()]
        assert [first for first, _, _ in seats.blocks()] == [0, *ends[:-1]]
        assert ends[-1] == num_micro_steps


def test_a_search_over_many_samples_thins_them_out_and_comes_to_the_same():
    lengths = longest_first(np.random.default_rng(1).integers(1, 400, 30_000))
    count = count_micro_steps(lengths, capacity=400, num_ranks=2, seed=[0, 0])
    assert int(lengths.sum()) / (count * 800) > 0.98


def test_all_samples_are_packed_few_times(monkeypatch):
    """The number of micro-steps that a part of the samples needs is a little too small for all of them here."""
    drawn = np.random.default_rng(2).lognormal(np.log(175), 1.05, 200_000)
    lengths = np.sort(np.clip(drawn, 8, 4820).astype(np.int64))[::-1]
    pack, packed = filling._pack, []
    monkeypatch.setattr(filling, "_pack", lambda ids, *args, **kw: (packed.append(len(ids)), pack(ids, *args, **kw))[1])

    def num_packings():
        packed.clear()
        filling.count_micro_steps(lengths, capacity=mean_tokens(lengths, 8), num_ranks=8, seed=[1, 0])
        return packed.count(len(lengths))

    assert num_packings() <= 2
    monkeypatch.setattr(filling, "_ROOM", np.inf)
    assert num_packings() > 2
