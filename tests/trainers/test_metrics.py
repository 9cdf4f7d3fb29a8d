"""Counts: exact, on the device, one collective and one wait a reading."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch

from tuning.trainers.metrics import COUNTS, Counts, Meter, Stopwatch, render_summary


class Accelerator:
    """One rank of several, all with the same counts."""

    def __init__(self, num_processes=1):
        self.num_processes = num_processes
        self.reduced = []

    def reduce(self, tensor, reduction):
        self.reduced.append((tensor.clone(), reduction))
        return tensor * self.num_processes


def test_the_vector_and_the_dataclass_have_the_same_names():
    assert tuple(item.name for item in dataclasses.fields(Counts)) == COUNTS


def test_tensors_and_numbers_add_up_and_none_is_nothing():
    meter = Meter(torch.device("cpu"))
    meter.add(nll_sum=torch.tensor(1.5), real=torch.tensor(3), slots=4, aux_loss=None)
    meter.add(nll_sum=torch.tensor(0.25), real=2, slots=torch.tensor(4), idle=True)
    meter.add(idle=torch.tensor(True))
    counts = meter.read(Accelerator())
    assert counts == Counts(nll_sum=1.75, real=5.0, slots=8.0, idle=2.0)
    assert meter.read(Accelerator()) == Counts()


def test_a_name_that_is_no_count():
    with pytest.raises(ValueError, match="not in tuple"):
        Meter(torch.device("cpu")).add(token=1)


def test_token_counts_stay_exact_beyond_the_reach_of_float32():
    meter = Meter(torch.device("cpu"))
    meter.add(real=torch.tensor(2**24))
    for _ in range(3):
        meter.add(real=torch.tensor(1))
    assert meter.read(Accelerator()).real == 2**24 + 3


def test_counting_keeps_no_graph():
    meter = Meter(torch.device("cpu"))
    loss = torch.ones(1, requires_grad=True).sum()
    meter.add(nll_sum=loss)
    assert not meter._on_device.requires_grad


def test_a_reading_is_one_collective_over_ranks_and_none_on_one():
    meter = Meter(torch.device("cpu"))
    meter.add(real=torch.tensor(3), slots=4)
    several = Accelerator(num_processes=2)
    assert meter.read(several) == Counts(real=6.0, slots=8.0)
    assert len(several.reduced) == 1
    assert several.reduced[0][1] == "sum"
    alone = Accelerator()
    meter.read(alone)
    assert alone.reduced == []


def test_shares_and_means():
    counts = Counts(nll_sum=6.0, supervised=4.0, real=9.0, slots=12.0)
    assert counts.loss == 1.5
    assert counts.padding_share == 0.25
    assert math.isnan(Counts().loss)
    assert Counts().padding_share == 0.0
    assert counts.plus(Counts(real=1.0)) == dataclasses.replace(counts, real=10.0)


def test_the_stopwatch_counts_only_while_it_runs(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    watch.stop()
    assert watch.lap() == 0.0
    watch.start()
    now[0] = 103.0
    watch.start()  # it runs
    assert watch.lap() == 3.0
    now[0] = 104.0
    watch.stop()
    now[0] = 200.0
    watch.stop()
    assert watch.lap() == 1.0
    now[0] = 300.0
    watch.start()
    now[0] = 300.5
    assert watch.lap() == 0.5


def test_the_summary_is_two_columns():
    assert render_summary({"steps": 3, "peak memory": None, "real tokens": "12"}) == "steps        3\nreal tokens  12"
