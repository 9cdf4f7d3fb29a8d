"""Fill the seats of one epoch to a number of tokens: the packing behind ``--multipack mode=budget``.

A seat is what one rank trains on in one micro-step. Seats are handled in windows of :data:`WINDOW` micro-steps, or
of :data:`WINDOW_SEATS` seats where those are more:

1. *Deal.* Samples, longest first, are cut into strata of like length, each stratum is shuffled, and the windows draw
   from it in turn. So every window gets the same mixture of lengths, and which samples meet is chance.
2. *Fill*, all windows at once, one sample of each at a time. Long samples go to the seat with the most room, which
   gives every seat a share of them; the many short ones then go where they leave the least room, which is what fills
   a seat to the last tokens. A sample for which its window has no room moves to another window.
3. *Match.* The seats of a window are sorted by cost and cut into micro-steps, so that the ranks of a micro-step have
   the same work although attention makes equal numbers of tokens unequally dear. Which micro-step comes when, and
   which rank gets which seat, is chance again.

A sample longer than the capacity opens a micro-step of its own kind: its rank has that sample alone, and the other
ranks may be filled up to its length, with the next longest samples first. All ranks then work while the long one does,
unless it is more than :data:`STRETCH` capacities long: one huge sample must not draw a whole epoch into its step.

The cost is linear in samples, with one pass of numpy over the seats of a window for each sample in it, and no Python
for a sample. The alternative, best fit over the whole epoch, packs as full but is a loop over samples, and it pairs
the same lengths in every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuning.data.placing import NO_SEAT, give_empty_, move_, place_

__all__ = ["STRETCH", "WINDOW", "WINDOW_SEATS", "Seats", "count_micro_steps", "fill"]

IntArray = npt.NDArray[np.integer[Any]]
SeatArray = npt.NDArray[np.int32]

# micro-steps; 16 balance to 0.992 and 32 to 0.996 at 8 ranks, batch 8, on 6,000 instruction lengths, 2026-12-01
WINDOW = 32
# capacities that a seat beside a long sample holds at most
STRETCH = 16
# seats, for few ranks: 64 fill to 0.968 and 256 to 0.988 on lengths spread evenly from 1 to the capacity
WINDOW_SEATS = 256
# seats filled at once
_BLOCK = 1 << 17
_STRATA = 64
# (share of a window's samples after which short ones go by best fit, whether room to spare is kept in every seat):
# the first balances best, the last packs tightest where there are few short samples
_WAYS = ((0.7, True), (0.7, False), (0.3, False), (0.0, False))
# room below this share of all is left in a few seats, which is what fills the others to the last tokens
_SPARE = 0.01
_TRIES = 4
# share of the tokens left over by the tightest way, up to which the others are tried as well
_NEARLY = 0.002
# share of the estimated micro-steps that the search starts from
_START = 0.985
# windows that tell how full a packing gets, when the number of micro-steps is searched
_SEARCHED_WINDOWS = 16
# one micro-step more in so many, which costs 0.0005 of the fill: packing all samples once more takes a fifth of a
# second a million, and the number found on a part of them is often too small by less than that
_ROOM = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """The seats of one epoch.

    Attributes:
        capacity: Tokens of a seat.
        num_ranks: Seats of a micro-step.
        num_micro_steps: Of the epoch.
    """

    capacity: int
    num_ranks: int
    num_micro_steps: int

    @property
    def count(self) -> int:
        """Seats of the epoch."""
        return self.num_ranks * self.num_micro_steps

    @property
    def num_windows(self) -> int:
        """Windows of the epoch; their sizes differ by one micro-step at most."""
        return max(1, round(self.num_micro_steps / _window(self.num_ranks)))

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield the groups cut into as many windows as a processor's cache holds."""
        for first, windows, size in self.groups():
            step = max(1, _BLOCK // (size * self.num_ranks))
            for start in range(0, windows, step):
                yield first + start * size, min(step, windows - start), size

    def groups(self) -> list[tuple[int, int, int]]:
        """Return (first micro-step, windows, micro-steps a window) of each size of window, larger ones first."""
        size, larger = divmod(self.num_micro_steps, self.num_windows)
        rest = (larger * (size + 1), self.num_windows - larger, size)
        return [rest] if larger == 0 else [(0, larger, size + 1), rest]


def count_micro_steps(lengths: IntArray, *, capacity: int, num_ranks: int, seed: list[int]) -> int:
    """Return how many micro-steps :func:`fill` needs for these samples, the same for every epoch.

    Args:
        lengths: Tokens a sample, at least 1 each, longest first.
        capacity: Tokens of a seat.
        num_ranks: Seats of a micro-step.
        seed: Words that seed the packing of the first epoch, which is the one that is tried.
    """
    return _pack_first_epoch(lengths, capacity, num_ranks, seed)[0].num_micro_steps


def _pack_first_epoch(lengths: IntArray, capacity: int, num_ranks: int, seed: list[int]) -> tuple[Seats, SeatArray]:
    estimate = _start(lengths, capacity, num_ranks)
    share = len(lengths) * _SEARCHED_WINDOWS * _window(num_ranks) // max(estimate, 1)
    if len(lengths) > 2 * share > 0:
        thinned = lengths[len(lengths) // share // 2 :: len(lengths) // share]
        start = _start(thinned, capacity, num_ranks)
        searched = _search(thinned, start, capacity, num_ranks, seed)[0].num_micro_steps
        estimate = int(np.ceil(searched * (len(lengths) / len(thinned)) * (1 + 1 / _ROOM)))
        return _search(lengths, estimate, capacity, num_ranks, seed, likely=True)
    return _search(lengths, estimate, capacity, num_ranks, seed)


def _search(
    lengths: IntArray, start: int, capacity: int, num_ranks: int, seed: list[int], *, likely: bool = False
) -> tuple[Seats, SeatArray]:
    """Return the fewest micro-steps from ``start`` on that hold all samples; ``likely``: the first ones will do."""
    num_micro_steps, total = start, int(lengths.sum())
    while True:
        seats = Seats(capacity=capacity, num_ranks=num_ranks, num_micro_steps=num_micro_steps)
        # where the tightest way leaves much over, the others do too
        left = 0 if likely else _pack(lengths, seats, seed, best_fit_from=0.0, spare=0)[1]
        if left <= _NEARLY * total:
            placed, left = _try(lengths, seats, seed)
            if left == 0:
                return seats, placed
        # 0.7: what is left may find room in the seats there are
        least = num_micro_steps // _ROOM if likely else 0
        num_micro_steps += max(1, least, int(0.7 * left / (capacity * num_ranks)))


def _window(num_ranks: int) -> int:
    return max(WINDOW, -(-WINDOW_SEATS // num_ranks))


def _start(lengths: IntArray, capacity: int, num_ranks: int) -> int:
    """Return fewer micro-steps than are needed: a little less than if every seat were full to the last token."""
    clipped = np.minimum(lengths, STRETCH * capacity)
    over = clipped[clipped > capacity].astype(np.float64)
    total, full = float(clipped.sum()), float(capacity * num_ranks)
    floor = max(-(-len(over) // num_ranks), 1)
    estimate = max(floor, total / full)
    # the longer the epoch, the more windows, and the more micro-steps are stretched by long samples
    for _ in range(20):
        windows = max(1.0, estimate / _window(num_ranks))
        leads = np.arange(0, len(over), num_ranks * windows) + windows / 2
        stretched = over[np.minimum(leads.astype(np.int64), len(over) - 1)] - capacity if len(over) else over
        estimate = max(floor, (total - float(stretched.sum()) * num_ranks * windows) / full)
    return max(floor, int(_START * estimate))


def fill(
    lengths: IntArray,
    costs: IntArray,
    *,
    capacity: int,
    num_ranks: int,
    num_micro_steps: int | None,
    seed: list[int],
    first_seed: list[int],
) -> tuple[IntArray, int]:
    """Return the seat of every sample, ``micro_step * num_ranks + rank``, and the number of micro-steps.

    Args:
        lengths: Tokens a sample, at least 1 each, longest first.
        costs: Work a sample, in the same order.
        capacity: Tokens of a seat.
        num_ranks: Seats of a micro-step.
        num_micro_steps: As many as :func:`count_micro_steps` found, or more; None: count.
        seed: Words that seed this epoch.
        first_seed: Words that :func:`count_micro_steps` was given.

    Raises:
        ValueError: If there are fewer micro-steps than :func:`count_micro_steps` found.
    """
    if num_micro_steps is None:
        seats, first = _pack_first_epoch(lengths, capacity, num_ranks, first_seed)
    else:
        seats, first = Seats(capacity=capacity, num_ranks=num_ranks, num_micro_steps=num_micro_steps), None
    placed = _pack_epoch(lengths, seats, seed) if seed != first_seed else None
    if placed is None:
        # the packing that the number of micro-steps was found with: it fits, only its equal lengths are exchanged
        placed, left = (first, 0) if first is not None else _try(lengths, seats, first_seed)
        if left:
            raise ValueError(f"{seats.num_micro_steps} micro-steps are too few for {len(lengths)} samples")
        if seed != first_seed:
            placed = _exchange_equal(lengths, placed, np.random.default_rng(seed))
    give_empty_(placed, seats.count)
    return _match(placed, costs, seats, np.random.default_rng([*seed, _TRIES])), seats.num_micro_steps


def _pack_epoch(lengths: IntArray, seats: Seats, seed: list[int]) -> SeatArray | None:
    for number in range(_TRIES):
        placed, left = _try(lengths, seats, [*seed, number])
        if left == 0:
            return placed
    return None


def _try(lengths: IntArray, seats: Seats, seed: list[int]) -> tuple[SeatArray, int]:
    """Pack in each way until one places every sample; return the seats of the last, and the fewest tokens left over."""
    least = int(lengths.sum())
    done: set[tuple[float, int]] = set()
    for share, spread in _WAYS:
        spare = _spare_tokens(lengths, seats) if spread else 0
        if (share, spare) in done:
            continue
        done.add((share, spare))
        placed, left = _pack(lengths, seats, seed, best_fit_from=share, spare=spare)
        least = min(left, least)
        if left == 0:
            break
    return placed, least


def _pack(
    lengths: IntArray, seats: Seats, seed: list[int], *, best_fit_from: float, spare: int
) -> tuple[SeatArray, int]:
    """Deal and fill once; return the seat of each sample and the tokens that found none."""
    rng = np.random.default_rng(seed)
    num_over = int(np.searchsorted(-lengths, -seats.capacity))
    over, short = _deal(len(lengths), num_over, seats, rng)
    placed = np.full(len(lengths), NO_SEAT, dtype=np.int32)
    if over.shape[0] > (seats.num_micro_steps // seats.num_windows) * seats.num_ranks:
        return placed, seats.capacity * seats.num_ranks  # the smallest window lacks a seat
    padded = np.append(lengths, 0).astype(np.int32)  # position -1 has length 0
    rooms = np.empty(seats.count, dtype=np.int32)
    first_window = 0
    for first, windows, size in seats.blocks():
        columns = short[:, first : first + windows * size]
        positions = columns.reshape(-1, windows, size).transpose(0, 2, 1).reshape(-1, windows)
        room, stretched = _open(padded[over[:, first_window : first_window + windows]], size, seats)
        # seats beside a long sample get the next longest: work grows faster than length
        beside = 2 * int(stretched.sum(axis=1).max())
        positions[:beside] = np.sort(positions[:beside], axis=0)
        slack = np.where(stretched, 0, spare).astype(np.int32)
        room -= slack
        found = place_(room, slack, padded[positions], best_fit_from, has_slack=spare > 0)
        base = (first + size * np.arange(windows)) * seats.num_ranks
        where = found >= 0
        placed[positions[where]] = (found + base)[where]
        in_front = over[:, first_window : first_window + windows]
        where = in_front >= 0
        placed[in_front[where]] = (np.arange(len(in_front))[:, None] + base)[where]
        rooms[base[0] : base[0] + room.size] = (room + slack).reshape(-1)
        first_window += windows
    move_(placed, rooms, lengths)
    return placed, int(lengths[placed < 0].sum())


def _deal(num_samples: int, num_over: int, seats: Seats, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Return the positions of samples over the capacity, ``[?, windows]``, and of others, ``[?, micro-steps]``.

    Positions fall from top to bottom; -1 is no sample.
    """
    over = _pad_rows(np.arange(num_over, dtype=np.int32), seats.num_windows)
    over = rng.permuted(over, axis=1)
    short = np.arange(num_over, num_samples, dtype=np.int32)
    size = max(seats.num_micro_steps, -(-len(short) // _STRATA))
    whole = len(short) // size * size
    short[:whole] = rng.permuted(short[:whole].reshape(-1, size), axis=1).reshape(-1)
    short[whole:] = rng.permutation(short[whole:])
    return over, _pad_rows(short, seats.num_micro_steps)


def _pad_rows(values: IntArray, width: int) -> IntArray:
    rows = -(-len(values) // width)
    padded = np.full(rows * width, NO_SEAT, dtype=np.int32)
    padded[: len(values)] = values
    return padded.reshape(rows, width)


def _spare_tokens(lengths: IntArray, seats: Seats) -> int:
    """Return the room an ordinary seat keeps so that seats of stretched micro-steps fill first; 0 where it is tight."""
    num_over = int(np.searchsorted(-lengths, -seats.capacity))
    # what the micro-steps of long samples last, were the windows to draw them in order
    clipped = np.minimum(lengths, STRETCH * seats.capacity)
    leads = clipped[:num_over].astype(np.int64)[np.arange(num_over) // seats.num_windows % seats.num_ranks == 0]
    stretched = len(leads) * seats.num_ranks
    room = seats.capacity * (seats.count - stretched) + int(leads.sum()) * seats.num_ranks
    spare = room - int(clipped.sum())
    return spare // (seats.count - stretched) if seats.count > stretched and spare > _SPARE * room else 0


def _open(over: IntArray, size: int, seats: Seats) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return the room of each seat, ``[windows, seats]``, and whether it is in a stretched micro-step."""
    windows, ranks = over.shape[1], seats.num_ranks
    room = np.full((windows, size * ranks), seats.capacity, dtype=np.int32)
    stretched = np.zeros(room.shape, dtype=np.bool_)
    if over.size:
        leads = np.minimum(np.repeat(over[::ranks], ranks, axis=0).T, STRETCH * seats.capacity)
        stretched[:, : leads.shape[1]] = leads > 0
        room[:, : leads.shape[1]] = np.where(leads > 0, leads, seats.capacity)
        room[:, : len(over)] = np.maximum(room[:, : len(over)] - over.T, 0)
    return room, stretched


def _exchange_equal(lengths: IntArray, placed: SeatArray, rng: np.random.Generator) -> SeatArray:
    """Return ``placed`` with samples of equal length exchanged at random."""
    shuffled = rng.permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    return placed[order]


def _match(placed: IntArray, costs: IntArray, seats: Seats, rng: np.random.Generator) -> IntArray:
    """Return the seats renumbered so that a micro-step holds seats of like cost of its window."""
    # sums of whole numbers below 2**53 are exact in any order
    work = np.bincount(placed, weights=costs, minlength=seats.count)
    renumbered = np.empty(seats.count, dtype=np.int64)
    for first, windows, size in seats.groups():
        shape = (windows, size, seats.num_ranks)
        base = first * seats.num_ranks
        rows = slice(base, base + windows * size * seats.num_ranks)
        order = np.argsort(-work[rows].reshape(windows, -1), axis=1, kind="stable")
        micro_step = np.argsort(rng.random((windows, size)), axis=1, kind="stable")
        rank = np.argsort(rng.random(shape), axis=2, kind="stable")
        target = (micro_step[:, :, None] * seats.num_ranks + rank).reshape(windows, -1)
        target = target + base + (np.arange(windows) * size * seats.num_ranks)[:, None]
        source = order + base + (np.arange(windows) * size * seats.num_ranks)[:, None]
        renumbered[source] = target
    return renumbered[placed]
