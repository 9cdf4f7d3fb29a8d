"""Forked work: in order, with errors told as if it had been done here, and no process left behind."""

import multiprocessing
import os
import time

import pytest

from tuning.data import workers
from tuning.errors import DataError


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 9])
def test_results_come_in_order(num_workers):
    def work(item):
        time.sleep(0.01 * (item % 3))
        return item * item

    assert list(workers.map_ordered(work, range(8), num_workers=num_workers)) == [item * item for item in range(8)]
    assert multiprocessing.active_children() == []


def test_work_is_done_in_other_processes():
    found = set(workers.map_ordered(lambda _: os.getpid(), range(6), num_workers=2))
    assert len(found) == 2
    assert os.getpid() not in found
    assert list(workers.map_ordered(lambda _: os.getpid(), range(2), num_workers=1)) == [os.getpid()] * 2


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_first_error_in_order_is_raised(num_workers):
    def work(item):
        if item == 2:
            time.sleep(0.1)
        if item >= 2:
            raise DataError(f"row {item}")
        return item

    done = []
    with pytest.raises(DataError, match=r"^row 2$"):
        done.extend(workers.map_ordered(work, range(9), num_workers=num_workers))
    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_told():
    def work(item):
        if item == 1:
            os._exit(9)
        return item

    with pytest.raises(RuntimeError, match="a process that prepares data died; its own message is above"):
        list(workers.map_ordered(work, range(4), num_workers=2))
    assert multiprocessing.active_children() == []


def test_results_larger_than_a_pipe():
    assert [len(result) for result in workers.map_ordered(lambda _: b"x" * 1_000_000, range(5), num_workers=2)] == [
        1_000_000
    ] * 5


def test_stopping_early_leaves_no_process():
    results = workers.map_ordered(lambda item: item, range(100), num_workers=2)
    assert next(results) == 0
    results.close()
    assert multiprocessing.active_children() == []


def test_without_fork_the_work_is_done_here(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert not workers.can_fork()
    assert set(workers.map_ordered(lambda _: os.getpid(), range(4), num_workers=2)) == {os.getpid()}


def test_cores_are_counted():
    assert 1 <= workers.num_cores() <= os.cpu_count()
