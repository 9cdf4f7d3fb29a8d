"""Put samples into seats that have room: the loops under ``tuning.data.filling``.

One pass of numpy seats one sample of every window. What a sample takes is subtracted from the room handed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NO_SEAT", "give_empty_", "move_", "place_"]

IntArray = npt.NDArray[np.integer[Any]]
SeatArray = npt.NDArray[np.int32]

NO_SEAT = -1
# seats looked at for one sample, and for all samples together; more are slower and pack little better
_MAX_CELL = 256
_MAX_LOOKS = 1 << 26


def place_(room: IntArray, slack: IntArray, lengths: IntArray, best_fit_from: float, *, has_slack: bool) -> SeatArray:
    """Seat samples window by window, all windows at once.

    Windows with many seats are cut into cells that are filled on their own.

    Args:
        room: Tokens each seat should still take, ``[windows, seats]``, int32; what is taken is subtracted.
        slack: Tokens each seat may take beyond that.
        lengths: Tokens a sample, longest first, ``[samples, windows]``; 0 is no sample.
        best_fit_from: Share of the samples that go to the seat with the most room; the others go where they leave
            the least.
        has_slack: Whether any seat has slack.

    Returns:
        The seat of each sample in its window, ``[samples, windows]``, -1 where it has none.
    """
    windows, seats = room.shape
    limit = max(_MAX_CELL, _MAX_LOOKS // (lengths.size + 1))
    cells = next(count for count in range(1, seats + 1) if seats % count == 0 and seats // count <= limit)
    rows = -(-len(lengths) // cells)
    padded = np.zeros((rows * cells, windows), dtype=np.int32)
    padded[: len(lengths)] = lengths
    by_cell = padded.reshape(rows, cells, windows).transpose(0, 2, 1).reshape(rows, windows * cells)
    cell_room, cell_slack = (
        np.ascontiguousarray(value.reshape(windows, seats // cells, cells).transpose(0, 2, 1)).reshape(
            windows * cells, seats // cells
        )
        for value in (room, slack)
    )
    found = _place_cells_(cell_room, cell_slack, by_cell, int(rows * best_fit_from), has_slack=has_slack)
    room[:] = cell_room.reshape(windows, cells, seats // cells).transpose(0, 2, 1).reshape(windows, seats)
    found = found.reshape(rows, windows, cells).transpose(0, 2, 1)
    found = np.where(found >= 0, found * cells + np.arange(cells)[:, None], NO_SEAT).astype(np.int32)
    return found.reshape(rows * cells, windows)[: len(lengths)]


def _place_cells_(room: IntArray, slack: IntArray, lengths: IntArray, switch: int, *, has_slack: bool) -> SeatArray:
    """As :func:`place_`, one cell a row of ``room``; to the most room before sample ``switch``, then by best fit."""
    cells, seats = room.shape
    first = np.arange(cells) * seats
    flat, flat_slack = room.reshape(-1), slack.reshape(-1)
    unsigned = room.view(np.uint32)
    found = np.full(lengths.shape, NO_SEAT, dtype=np.int32)
    wanted = np.ascontiguousarray(lengths).view(np.uint32)[:, :, None]
    for number, length in enumerate(lengths):
        # too little room wraps around and becomes the most
        seat = (unsigned - wanted[number]).argmin(axis=1) if number >= switch else room.argmax(axis=1)
        at = first + seat
        after = flat[at] - length
        if has_slack and (after < 0).any():
            short = np.flatnonzero(after < 0)
            seat[short] = (room[short] + slack[short]).argmax(axis=1)
            at = first + seat
            after = flat[at] - length
        fits = after >= -flat_slack[at]
        flat[at] = np.where(fits, after, flat[at])
        found[number] = np.where(fits & (length > 0), seat, NO_SEAT)
    return found


def move_(placed: SeatArray, rooms: IntArray, lengths: IntArray) -> None:
    """Give samples without a seat one of any window, longest into most room, while any fits.

    Args:
        placed: Seat of each sample, longest first, -1 without one; written into.
        rooms: Tokens each seat still takes; what is taken is subtracted.
        lengths: Tokens a sample.
    """
    left = np.flatnonzero(placed < 0)  # longest first, as all samples are
    if not len(left):
        return
    open_seats = np.flatnonzero(rooms >= lengths[left[-1]])
    while len(left):
        open_seats = open_seats[rooms[open_seats] >= lengths[left[-1]]]
        if not len(open_seats):
            return
        best = open_seats[np.argsort(-rooms[open_seats], kind="stable")][: len(left)]
        # the longest may fit nowhere while shorter ones do
        start = int(np.searchsorted(-lengths[left], -rooms[best[0]]))
        taken = left[start : start + len(best)]
        best = best[: len(taken)]
        fits = rooms[best] >= lengths[taken]
        placed[taken[fits]] = best[fits]
        rooms[best[fits]] -= lengths[taken[fits]].astype(np.int32)
        left = np.concatenate([left[:start], taken[~fits], left[start + len(taken) :]])


def give_empty_(placed: SeatArray, num_seats: int) -> None:
    """Give seats without a sample the shortest one of a seat that has several, while there is such a seat.

    Args:
        placed: Seat of each sample, longest first; written into.
        num_seats: Seats of the epoch.
    """
    counts = np.bincount(placed, minlength=num_seats)
    empty = np.flatnonzero(counts == 0)
    if not len(empty):
        return
    first_of_seat = np.zeros(num_seats, dtype=np.int64)
    # the last write stays: the first sample of each seat
    first_of_seat[placed[::-1]] = np.arange(len(placed))[::-1]
    spare = np.ones(len(placed), dtype=np.bool_)
    spare[first_of_seat[counts > 0]] = False
    movable = np.flatnonzero(spare)[::-1][: len(empty)]
    placed[movable] = empty[: len(movable)]
