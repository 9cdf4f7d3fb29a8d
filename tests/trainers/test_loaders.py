"""Loaders whose batch sampler alone tells ranks apart."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import GradientState
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from torch.utils.data._utils.pin_memory import pin_memory

from tests.tiny import PAD
from tests.trainers.harness import COLLATORS, arguments, dataset
from tuning.data.collators import FlattenedCollator, PaddedCollator
from tuning.errors import ConfigError, DataError
from tuning.trainers.arguments import TrainingArguments
from tuning.trainers.loaders import (
    FillerBatch,
    SequentialBatches,
    ShuffledBatches,
    TokenBudgetBatches,
    build_eval_loader,
    build_loader,
    check_size,
    endless,
    eval_batches,
    loader_options,
)

ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11], [12, 13, 14]]


def batches(size, world_size):
    return [
        list(SequentialBatches(len(ROWS), batch_size=size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_sample_once_and_equally_many_batches_a_rank(size, world_size):
    ranks = batches(size, world_size)
    assert len({len(rank) for rank in ranks}) == 1
    assert {len(rank) for rank in ranks} == {
        len(SequentialBatches(len(ROWS), batch_size=size, rank=0, world_size=world_size))
    }
    steps = [batch for step in zip(*ranks, strict=True) for batch in step]
    # rank after rank the samples come in their order, and empty seats come last
    assert [index for batch in steps for index in batch] == list(range(len(ROWS)))
    full = [len(batch) for batch in steps]
    assert full == sorted(full, reverse=True)


def test_an_example_by_hand():
    assert batches(2, 2) == [[[0, 1], [4]], [[2, 3], []]]


def test_nothing_to_read():
    assert list(SequentialBatches(0, batch_size=2, rank=0, world_size=2)) == []


@pytest.mark.parametrize("collator", COLLATORS)
def test_an_empty_seat_is_a_filler_without_target(collator):
    loader = build_loader(dataset(ROWS), [[0, 1], []], COLLATORS[collator](), options={})
    real, filler = list(loader)
    assert type(real) is dict
    assert isinstance(filler, FillerBatch)
    assert filler.keys() == real.keys()
    assert (filler["labels"] == -100).all()


def test_a_filler_stays_one_on_its_way():
    filler = FillerBatch(PaddedCollator(PAD)([]))
    assert isinstance(pickle.loads(pickle.dumps(filler)), FillerBatch)
    assert isinstance(pin_memory(filler, None) if torch.cuda.is_available() else filler, FillerBatch)


def test_batches_are_those_of_the_sampler():
    loader = build_loader(dataset(ROWS), [[4, 1], [2]], FlattenedCollator(), options={"num_workers": 0})
    assert [batch["input_ids"][0].tolist() for batch in loader] == [[12, 13, 14, 4, 5], [6, 7, 8, 9]]
    assert len(loader) == 2


@pytest.mark.parametrize(("size", "world_size", "rows_left"), [(2, 1, 1), (2, 2, 1), (5, 1, 0), (1, 2, 1), (4, 2, 5)])
def test_accelerate_knows_the_rows_of_the_last_step(size, world_size, rows_left):
    sequence = SequentialBatches(len(ROWS), batch_size=size, rank=0, world_size=world_size)
    loader = build_eval_loader(dataset(ROWS), sequence, PaddedCollator(PAD), options={})
    state = GradientState()
    ends = []
    for _ in loader:
        ends.append((state.end_of_dataloader, state.remainder))
    assert ends == [(False, rows_left)] * (len(sequence) - 1) + [(True, rows_left)]
    assert not state.in_dataloader


def test_the_loader_in_use_is_the_innermost():
    train = build_eval_loader(
        dataset(ROWS), SequentialBatches(5, batch_size=2, rank=0, world_size=1), PaddedCollator(PAD), options={}
    )
    state = GradientState()
    outer = iter(train)
    next(outer)
    for _ in build_eval_loader(
        dataset(ROWS[:3]), SequentialBatches(3, batch_size=3, rank=0, world_size=1), PaddedCollator(PAD), options={}
    ):
        assert (state.end_of_dataloader, state.remainder) == (True, 0)
    assert (state.end_of_dataloader, state.remainder) == (False, 1)
    list(outer)


def shuffled(num_samples, *, world_size=1, batch_size=2, epoch=0, drop_last=False):
    ranks = []
    for rank in range(world_size):
        batches = ShuffledBatches(
            num_samples, batch_size=batch_size, rank=rank, world_size=world_size, seed=7, drop_last=drop_last
        )
        batches.set_epoch(epoch)
        ranks.append(list(batches))
        assert len(ranks[-1]) == len(batches)
    return ranks


def test_shuffled_batches_are_in_the_order_of_hugging_face():
    order = SeedableRandomSampler(range(11), generator=torch.Generator(), data_seed=7)
    for epoch in range(3):
        theirs = list(BatchSampler(order, batch_size=2, drop_last=False))
        assert theirs == shuffled(11, epoch=epoch)[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shuffled_batches_hold_each_sample_once_over_all_ranks(world_size):
    ranks = shuffled(11, world_size=world_size)
    assert sorted(index for batches in ranks for batch in batches for index in batch) == list(range(11))
    assert len({len(batches) for batches in ranks}) == 1
    # step by step, all ranks together read one stretch of the order of one rank
    alone = [index for batch in shuffled(11)[0] for index in batch]
    together = [index for step in zip(*ranks, strict=True) for batch in step for index in batch]
    assert together == alone


def test_shuffled_batches_differ_by_epoch_and_drop_the_last_step_when_asked():
    assert shuffled(11, epoch=0) != shuffled(11, epoch=1)
    assert [len(batch) for batch in shuffled(11, world_size=2, drop_last=True)[1]] == [2, 2]


def options(tmp_path, **values):
    return loader_options(arguments(tmp_path, **values))


def test_each_flag_of_the_workers_reaches_the_loader(tmp_path):
    """A flag that is accepted and not passed on would change nothing, and nobody would be told."""
    assert options(tmp_path) == {"num_workers": 0, "pin_memory": False}
    assert options(
        tmp_path, dataloader_num_workers=2, dataloader_prefetch_factor=3, dataloader_persistent_workers=True,
        dataloader_multiprocessing_context="spawn", dataloader_in_order=False,
    ) == {
        "num_workers": 2, "pin_memory": False, "persistent_workers": True, "prefetch_factor": 3,
        "multiprocessing_context": "spawn", "in_order": False,
    }  # fmt: skip
    named = {item.name for item in dataclasses.fields(TrainingArguments) if item.name.startswith("dataloader_")}
    # the last is the batch sampler's
    assert named == {f"dataloader_{name}" for name in options(tmp_path, dataloader_num_workers=1)} | {
        "dataloader_drop_last"
    }


def test_a_step_that_no_samples_fill(tmp_path):
    rows = dataset([[1, 2, 3]] * 3)
    with pytest.raises(ConfigError) as caught:
        check_size(rows, arguments(tmp_path, dataloader_drop_last=True, per_device_train_batch_size=4))
    assert str(caught.value) == (
        "--dataloader_drop_last leaves nothing to train on: there are 3 samples, and a full step takes 4 (4 on each of "
        "1 ranks); drop the flag or lower --per_device_train_batch_size"
    )
    check_size(rows, arguments(tmp_path, dataloader_drop_last=True, per_device_train_batch_size=3))
    check_size(rows, arguments(tmp_path, per_device_train_batch_size=4))


# ---- batches of equally many tokens ----


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=60), max_tokens=st.integers(1, 60), world_size=st.integers(1, 5))
def test_a_token_budget_holds_each_sample_once_in_order(lengths, max_tokens, world_size):
    ranks = [
        TokenBudgetBatches(
            np.array(lengths, dtype=np.int64), max_tokens=max_tokens, batch_size=2, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    read = [list(batches) for batches in ranks]
    assert {len(batches) for batches in ranks} == {len(found) for found in read}
    assert len({len(found) for found in read}) == 1
    in_order = [batch for step in zip(*read, strict=True) for batch in step]
    assert [index for batch in in_order for index in batch] == list(range(len(lengths)))
    filled = [batch for batch in in_order if batch]
    # empty seats come last, and there are fewer of them than ranks
    assert in_order[: len(filled)] == filled
    assert len(in_order) - len(filled) < world_size
    for batch, following in itertools.pairwise([*filled, []]):
        tokens = sum(lengths[index] for index in batch)
        assert tokens <= max_tokens or len(batch) == 1
        # nothing that had room was left for the next
        assert not following or tokens + lengths[following[0]] > max_tokens


def test_a_token_budget_by_hand(tmp_path):
    rows = [[1] * length for length in (3, 5, 2, 9, 1, 1)]
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    flat = eval_batches(dataset(rows), FlattenedCollator(), args, keeps_rows=False)
    # 21 tokens in 6 samples: two of them have 7 in the mean
    assert list(flat) == [[0], [1, 2], [3], [4, 5]]


@pytest.mark.parametrize(("collator", "keeps_rows"), [("padded", False), ("padded", True), ("flattened", True)])
def test_batches_of_equally_many_samples_where_rows_count(tmp_path, collator, keeps_rows):
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    found = eval_batches(dataset(ROWS), COLLATORS[collator](), args, keeps_rows=keeps_rows)
    assert list(found) == [[0, 1], [2, 3], [4]]


# ---- streams ----


def test_a_stream_starts_again_where_it_ends():
    stream = endless(dataset(ROWS).to_iterable_dataset())
    first = [row["input_ids"][0] for row in itertools.islice(stream, 12)]
    assert first == [1, 4, 6, 10, 12] * 2 + [1, 4]


def test_what_is_no_stream_stays_as_it_is():
    rows = dataset(ROWS)
    assert endless(rows) is rows


def test_a_stream_without_a_sample():
    stream = dataset(ROWS).to_iterable_dataset().filter(lambda row: False)
    with pytest.raises(DataError) as caught:
        endless(stream)
    assert str(caught.value) == (
        "--streaming found no sample to train on: no row is left with a token to train on; see the warnings above, and "
        "read the rows without --streaming to get a table of why they were dropped"
    )
