"""Seat the samples of each optimizer step: the balancing behind ``--multipack mode=exact``.

Which samples a step holds is given; free is only on which rank and in which micro-step each one runs. A micro-step
lasts as long as its fullest rank, so a step costs the sum over its micro-steps of the greatest load of a rank.

Equal seats waste: the longest sample of a step is often longer than a seat's share, and all other ranks wait for it.
So the micro-steps of a step are given unequal durations. The first lasts as long as the longest sample or the mean
seat, whichever is more; the next as long as the longest sample left when every rank has taken one, or its share of
what is left; and so on. Then samples, longest first, go to the seat with the most room. All steps are seated at once,
one numpy pass for each sample of a step.

Which rank gets which seat of a micro-step is chance; the longest micro-step of a step comes first, so that an
allocator sees the largest sizes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["seat_steps"]

IntArray = npt.NDArray[np.integer[Any]]

_CLOSED = np.iinfo(np.int64).min
# samples seated at once: their tables fit a processor's cache
_BLOCK = 1 << 18


def seat_steps(
    costs: IntArray,
    *,
    num_ranks: int,
    num_micro_steps: int,
    rng: np.random.Generator,
    lengths: IntArray | None = None,
    max_tokens: int | None = None,
) -> npt.NDArray[np.int32]:
    """Return the seat of every sample, ``[steps, samples]``: ``micro_step * num_ranks + rank``, -1 without one.

    No seat stays empty where a step has as many samples as seats.

    Args:
        costs: Work a sample, ``[steps, samples]``.
        num_ranks: Seats of a micro-step.
        num_micro_steps: Of a step.
        rng: Picks the rank of each seat.
        lengths: Tokens a sample, in the same places; used with ``max_tokens`` only.
        max_tokens: Most tokens of a seat; None: no cap. A sample that fits no seat is seated nowhere.
    """
    steps, samples = costs.shape
    seats = np.empty((steps, samples), dtype=np.int32)
    rows = max(1, _BLOCK // max(samples, 1))
    for start in range(0, steps, rows):
        block = slice(start, start + rows)
        order = np.argsort(-costs[block], axis=1, kind="stable")
        sorted_costs = np.take_along_axis(costs[block], order, axis=1)
        room = np.repeat(_durations(sorted_costs, num_ranks, num_micro_steps), num_ranks, axis=1)
        found = _longest_first(sorted_costs, room)
        if max_tokens is not None and lengths is not None:
            _cap_(found, sorted_costs, room, np.take_along_axis(lengths[block], order, axis=1), max_tokens)
        np.put_along_axis(seats[block], order, found, axis=1)
    rank = np.argsort(rng.random((steps, num_micro_steps, num_ranks)), axis=2, kind="stable")
    renumbered = (rank + np.arange(num_micro_steps)[:, None] * num_ranks).reshape(steps, -1)
    where = seats >= 0
    moved = np.take_along_axis(renumbered, np.where(where, seats, 0), axis=1)
    return np.where(where, moved, -1).astype(np.int32)


def _durations(costs: IntArray, num_ranks: int, num_micro_steps: int) -> npt.NDArray[np.int64]:
    """Return how long each micro-step should last, ``[steps, micro_steps]``; ``costs`` fall along each row."""
    steps, samples = costs.shape
    durations = np.zeros((steps, num_micro_steps), dtype=np.int64)
    rest = -(-costs.sum(axis=1) // num_ranks)
    for number in range(num_micro_steps):
        longest = costs[:, number * num_ranks] if number * num_ranks < samples else np.int64(0)
        durations[:, number] = np.maximum(longest, -(-rest // (num_micro_steps - number)))
        rest = np.maximum(rest - durations[:, number], 0)
    return durations


def _longest_first(
    costs: IntArray,
    room: IntArray,
    *,
    lengths: IntArray | None = None,
    max_tokens: int = 0,
    tight: bool = False,
) -> npt.NDArray[np.int32]:
    """Return the seat of each sample, ``[steps, samples]``; ``costs`` fall along each row.

    Args:
        costs: Work a sample.
        room: Work each seat should hold, ``[steps, seats]``; may be exceeded.
        lengths: Tokens a sample, or None for no cap on tokens.
        max_tokens: Most tokens of a seat, where ``lengths`` is given.
        tight: Take the seat with the fewest tokens left that holds the sample, not the one with the most room.
    """
    (steps, samples), num_seats = costs.shape, room.shape[1]
    room = room.copy()
    space = np.full(room.shape, max_tokens, dtype=np.int64) if lengths is not None else None
    used = np.zeros(room.shape, dtype=np.bool_)
    num_empty = np.full(steps, num_seats)
    first = np.arange(steps) * num_seats
    found = np.empty((samples, steps), dtype=np.int32)
    for number in range(samples):
        score = room
        if space is not None and lengths is not None:
            score = np.where(space >= lengths[:, number, None], -space if tight else room, _CLOSED)
        # as many samples are left as seats are empty
        pressed = np.flatnonzero((samples - number <= num_empty) & (num_empty > 0))
        if len(pressed):
            score = score.copy()
            score[pressed] = np.where(used[pressed], _CLOSED, score[pressed])
        seat = score.argmax(axis=1)
        at = first + seat
        fits = score.reshape(-1)[at] > _CLOSED
        room.reshape(-1)[at] -= np.where(fits, costs[:, number], 0)
        if space is not None and lengths is not None:
            space.reshape(-1)[at] -= np.where(fits, lengths[:, number], 0)
        num_empty -= fits & ~used.reshape(-1)[at]
        used.reshape(-1)[at] |= fits
        found[number] = np.where(fits, seat, -1)
    return found.T


def _cap_(found: IntArray, costs: IntArray, room: IntArray, lengths: IntArray, max_tokens: int) -> None:
    """Seat again, into ``found``, the steps in which a seat has more than ``max_tokens``; -1 where that cannot be."""
    steps, num_seats = room.shape
    seats = found + np.arange(steps)[:, None] * num_seats
    tokens = np.bincount(seats.reshape(-1), weights=lengths.reshape(-1), minlength=steps * num_seats)
    broken = np.flatnonzero((tokens.reshape(steps, num_seats) > max_tokens).any(axis=1))
    for tight in (False, True):
        if not len(broken):
            return
        found[broken] = _longest_first(
            costs[broken], room[broken], lengths=lengths[broken], max_tokens=max_tokens, tight=tight
        )
        broken = broken[(found[broken] < 0).any(axis=1)]
