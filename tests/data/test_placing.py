"""Putting samples into seats: by hand, then what must hold for any input."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.data import placing
from tuning.data.placing import give_empty_, move_, place_


def place(room, lengths, *, share, slack=None):
    room = np.array(room, dtype=np.int32)
    slack = np.zeros_like(room) if slack is None else np.array(slack, dtype=np.int32)
    lengths = np.array(lengths, dtype=np.int32)
    found = place_(room, slack, lengths, share, has_slack=bool(slack.any()))
    return found, room


def test_long_samples_go_to_the_most_room():
    found, room = place([[10, 10]], [[6], [4], [3]], share=1.0)
    assert found.tolist() == [[0], [1], [1]]
    assert room.tolist() == [[4, 3]]


def test_short_samples_go_where_they_leave_the_least():
    found, room = place([[10, 10]], [[6], [4], [3]], share=0.0)
    assert found.tolist() == [[0], [0], [1]]
    assert room.tolist() == [[0, 7]]


def test_a_sample_without_room_is_left_and_no_sample_is_no_sample():
    found, room = place([[5], [5]], [[6, 3], [0, 2]], share=0.5)
    assert found.tolist() == [[-1, 0], [-1, 0]]
    assert room.tolist() == [[5], [0]]


def test_slack_is_taken_only_when_nothing_else_is_left():
    found, room = place([[4, 3]], [[3], [5]], share=1.0, slack=[[0, 2]])
    assert found.tolist() == [[0], [1]]
    assert room.tolist() == [[1, -2]]


@settings(deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 12), st.integers(0, 20), st.floats(0, 1), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_no_seat_holds_more_than_its_room(windows, seats, samples, share, slack, seed):
    rng = np.random.default_rng(seed)
    room = rng.integers(0, 50, (windows, seats)).astype(np.int32)
    extra = rng.integers(0, 9 if slack else 1, room.shape).astype(np.int32)
    lengths = -np.sort(-rng.integers(0, 30, (samples, windows)), axis=0).astype(np.int32)
    after = room.copy()
    found = place_(after, extra, lengths, share, has_slack=slack)
    for window in range(windows):
        taken = np.zeros(seats, dtype=np.int64)
        where = found[:, window] >= 0
        np.add.at(taken, found[where, window], lengths[where, window])
        assert (taken <= room[window] + extra[window]).all()
        assert (room[window] - taken == after[window]).all()
    assert (found[lengths == 0] == -1).all()


def test_windows_with_many_seats_are_filled_in_cells_that_leave_nothing_out(monkeypatch):
    monkeypatch.setattr(placing, "_MAX_CELL", 4)
    monkeypatch.setattr(placing, "_MAX_LOOKS", 0)
    room = np.full((2, 12), 10, dtype=np.int32)
    lengths = np.full((24, 2), 5, dtype=np.int32)
    found = place_(room, np.zeros_like(room), lengths, 0.5, has_slack=False)
    assert (room == 0).all()
    assert [sorted(found[:, window].tolist()) for window in range(2)] == [sorted([*range(12), *range(12)])] * 2


def test_samples_left_over_move_to_the_most_room():
    placed = np.array([-1, 0, -1, -1], dtype=np.int32)
    rooms = np.array([0, 5, 2], dtype=np.int32)
    move_(placed, rooms, np.array([9, 8, 3, 2]))
    # 9 fits nowhere; 3 goes to the most room, which leaves 2 seats of 2
    assert placed.tolist() == [-1, 0, 1, 2]
    assert rooms.tolist() == [0, 2, 0]


def test_moving_ends_where_nothing_fits():
    placed = np.full(3, -1, dtype=np.int32)
    move_(placed, np.array([1, 1], dtype=np.int32), np.array([4, 3, 2]))
    assert placed.tolist() == [-1, -1, -1]


def test_an_empty_seat_gets_the_shortest_sample_of_a_seat_with_several():
    placed = np.array([0, 0, 2, 2, 2], dtype=np.int32)
    give_empty_(placed, 4)
    assert placed.tolist() == [0, 0, 2, 1, 3] or placed.tolist() == [0, 0, 2, 3, 1]
    few = np.array([1], dtype=np.int32)
    give_empty_(few, 3)
    assert few.tolist() == [1]
