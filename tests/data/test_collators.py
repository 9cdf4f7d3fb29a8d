"""Both layouts of a batch: values, dtypes, seams, fillers, and equal loss on a model known by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from tuning.data.collators import IGNORE_INDEX, FlattenedCollator, PaddedCollator
from tuning.errors import DataError

# three samples of 3, 2 and 4 tokens, every token a label
THREE = [{"input_ids": ids, "labels": ids} for ids in ([5, 6, 7], [20, 21], [40, 41, 42, 43])]
GOOD_LOSS, BAD_LOSS = tiny.bigram_losses()


def loss_of(model, batch):
    """Mean loss over labels after the causal shift, in plain torch."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=IGNORE_INDEX)


def supervised(batch):
    return int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())


def test_flattened_values():
    batch = FlattenedCollator()(THREE)
    x = IGNORE_INDEX
    assert batch["input_ids"].tolist() == [[5, 6, 7, 20, 21, 40, 41, 42, 43]]
    assert batch["labels"].tolist() == [[x, 6, 7, x, 21, x, 41, 42, 43]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 2]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
    assert batch["cu_seq_lens_k"] is batch["cu_seq_lens_q"]
    assert (batch["max_length_q"], batch["max_length_k"]) == (4, 4)
    assert type(batch["max_length_q"]) is int
    assert "attention_mask" not in batch
    assert {
        name: batch[name].dtype for name in ("input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q")
    } == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "seq_idx": torch.int32,
        "cu_seq_lens_q": torch.int32,
    }


@pytest.mark.parametrize(
    ("side", "multiple", "ids", "mask", "labels"),
    [
        ("right", None, [[5, 6, 7], [20, 21, 0]], [[1, 1, 1], [1, 1, 0]], [[-100, 6, 7], [-100, 21, -100]]),
        ("left", None, [[5, 6, 7], [0, 20, 21]], [[1, 1, 1], [0, 1, 1]], [[-100, 6, 7], [-100, -100, 21]]),
        ("right", 4, [[5, 6, 7, 0], [20, 21, 0, 0]], [[1, 1, 1, 0], [1, 1, 0, 0]],
         [[-100, 6, 7, -100], [-100, 21, -100, -100]]),
        ("left", 4, [[0, 5, 6, 7], [0, 0, 20, 21]], [[0, 1, 1, 1], [0, 0, 1, 1]],
         [[-100, -100, 6, 7], [-100, -100, -100, 21]]),
    ],
)  # fmt: skip
def test_padded_values(side, multiple, ids, mask, labels):
    batch = PaddedCollator(0, padding_side=side, pad_to_multiple_of=multiple)(THREE[:2])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
    }
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_seams_between_samples_are_not_in_the_loss():
    # https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449
    model = tiny.build_bigram()
    padded, flattened = PaddedCollator(0)(THREE), FlattenedCollator()(THREE)
    assert supervised(padded) == supervised(flattened) == 6
    assert abs(loss_of(model, padded) - GOOD_LOSS) < 1e-5
    assert abs(loss_of(model, flattened) - GOOD_LOSS) < 1e-5

    # the check can fail: with the labels as they came, two seams are targets and cost 4.767 each
    seamed = {**flattened, "labels": flattened["input_ids"]}
    assert abs(loss_of(model, seamed) - (6 * GOOD_LOSS + 2 * BAD_LOSS) / 8) < 1e-5


def test_pad_that_is_the_end_token_loses_no_end_token():
    # https://github.com/huggingface/trl/issues/976
    samples = [{"input_ids": ids, "labels": ids} for ids in ([72, 73, 2], [72, 73, 74, 75, 2])]
    for batch in (PaddedCollator(2)(samples), PaddedCollator(2, padding_side="left")(samples)):
        assert (batch["labels"] == 2).sum() == 2
        assert supervised(batch) == 6
        assert batch["attention_mask"].sum() == 8
    flattened = FlattenedCollator()(samples)
    assert flattened["input_ids"].tolist() == [[72, 73, 2, 72, 73, 74, 75, 2]]
    assert flattened["labels"].tolist() == [[-100, 73, 2, -100, 73, 74, 75, 2]]
    assert supervised(flattened) == 6


def test_an_empty_seat_is_a_filler_without_a_target():
    flattened = FlattenedCollator(filler_token_id=7)([])
    assert flattened["input_ids"].tolist() == [[7, 7]]
    assert flattened["labels"].tolist() == [[-100, -100]]
    assert flattened["cu_seq_lens_q"].tolist() == [0, 2]
    assert flattened["max_length_q"] == 2
    padded = PaddedCollator(3)([])
    assert padded["input_ids"].tolist() == [[3, 3]]
    assert padded["labels"].tolist() == [[-100, -100]]
    assert padded["attention_mask"].tolist() == [[1, 1]]


def test_a_sample_of_one_token_has_no_target():
    samples = [{"input_ids": [9], "labels": [9]}, {"input_ids": [5, 6], "labels": [5, 6]}]
    assert supervised(PaddedCollator(0)(samples)) == supervised(FlattenedCollator()(samples)) == 1
    assert FlattenedCollator()(samples)["cu_seq_lens_q"].tolist() == [0, 1, 3]


def test_samples_may_be_arrays_or_tensors_and_are_left_alone():
    for make in (np.array, torch.tensor):
        samples = [{"input_ids": make([5, 6, 7]), "labels": make([5, 6, 7]), "length": 3}]
        assert FlattenedCollator()(samples)["labels"].tolist() == [[-100, 6, 7]]
        assert PaddedCollator(0)(samples)["labels"].tolist() == [[-100, 6, 7]]
        assert samples[0]["labels"].tolist() == [5, 6, 7]


@pytest.mark.parametrize("collate", [PaddedCollator(0), FlattenedCollator()])
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {"input_ids": [1, 2], "labels": [1, 2], "pixel_values": [0.0]},
            "A sample has the column 'pixel_values', which a batch would lose; remove it from the data set: a sample "
            "is input_ids and labels",
        ),
        (
            {"input_ids": [1, 2], "labels": [1, 2, 3]},
            "A sample has input_ids of shape (2,) and labels of shape (3,); both must be lists of the same length, "
            "with one token or more",
        ),
        (
            {"input_ids": [], "labels": []},
            "A sample has input_ids of shape (0,) and labels of shape (0,); both must be lists of the same length, "
            "with one token or more",
        ),
        (
            {"input_ids": [1, 0], "labels": [1, -100], "attention_mask": [1, 0]},
            "A sample has an attention_mask with zeros; the collator does the padding, so give samples without it",
        ),
    ],
)
def test_what_would_be_lost_is_refused(collate, sample, message):
    with pytest.raises(DataError) as caught:
        collate([sample])
    assert str(caught.value) == message


def test_padding_side_is_checked():
    with pytest.raises(ValueError, match="padding_side is 'middle'; it must be right or left"):
        PaddedCollator(0, padding_side="middle")


@st.composite
def sample_lists(draw):
    samples = []
    for _ in range(draw(st.integers(1, 6))):
        ids = draw(st.lists(st.integers(0, 63), min_size=1, max_size=9))
        masked = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        samples.append({"input_ids": ids, "labels": [-100 if skip else i for i, skip in zip(ids, masked, strict=True)]})
    return samples


@settings(max_examples=100, deadline=None)
@given(sample_lists(), st.sampled_from(["left", "right"]))
def test_both_layouts_hold_the_same_tokens_and_targets(samples, side):
    padded, flattened = PaddedCollator(0, padding_side=side)(samples), FlattenedCollator()(samples)
    real = padded["attention_mask"].bool()
    assert padded["input_ids"][real].tolist() == flattened["input_ids"][0].tolist()
    assert padded["labels"][real].tolist() == flattened["labels"][0].tolist()
    assert (padded["labels"][~real] == IGNORE_INDEX).all()
    assert supervised(padded) == supervised(flattened)
    assert flattened["cu_seq_lens_q"][-1] == flattened["input_ids"].shape[1]
