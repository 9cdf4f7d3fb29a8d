"""Length policy and the need for a target, against the same done sample by sample."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.data.limits import Flat, apply
from tuning.data.report import Counts, Dropped
from tuning.errors import DataError

X = -100


def flat_of(samples, first_row=0):
    """Lay (ids, labels) samples one after another."""
    return Flat(
        ids=np.array([i for ids, _ in samples for i in ids], dtype=np.int32),
        labels=np.array([i for _, labels in samples for i in labels], dtype=np.int32),
        lengths=np.array([len(ids) for ids, _ in samples], dtype=np.int64),
        rows=np.arange(first_row, first_row + len(samples), dtype=np.int64),
    )


def samples_of(flat):
    ends = np.cumsum(flat.lengths)
    return [
        (flat.ids[end - length : end].tolist(), flat.labels[end - length : end].tolist())
        for end, length in zip(ends, flat.lengths, strict=True)
    ]


def name_row(row):
    return f"row {row} of f.jsonl"


SAMPLES = [
    ([1, 2, 3, 4, 5], [X, X, X, X, 5]),  # the target is the last token
    ([1, 2, 3], [1, X, X]),  # the first token is no target
    ([1, 2, 3], [X, 2, 3]),
    ([9], [9]),
    ([1, 2, 3, 4], [X, 2, X, 4]),
]


def test_truncate():
    kept, counts = apply(flat_of(SAMPLES, 10), max_seq_length=3, policy="truncate", name_row=name_row)
    assert samples_of(kept) == [([1, 2, 3], [X, 2, 3]), ([1, 2, 3], [X, 2, X])]
    assert kept.rows.tolist() == [12, 14]
    assert counts == Counts(
        read=5,
        kept=2,
        truncated=1,
        dropped={
            "no trainable token": Dropped(count=2, rows=(11, 13)),
            "no trainable token in the first 3": Dropped(count=1, rows=(10,)),
        },
        tokens=6,
        supervised=3,
    )


def test_drop():
    kept, counts = apply(flat_of(SAMPLES), max_seq_length=4, policy="drop", name_row=name_row)
    assert samples_of(kept) == [([1, 2, 3], [X, 2, 3]), ([1, 2, 3, 4], [X, 2, X, 4])]
    assert counts.dropped == {
        "more than 4 tokens": Dropped(count=1, rows=(0,)),
        "no trainable token": Dropped(count=2, rows=(1, 3)),
    }
    assert counts.truncated == 0


def test_error():
    with pytest.raises(DataError) as caught:
        apply(flat_of(SAMPLES), max_seq_length=4, policy="error", name_row=name_row)
    assert str(caught.value) == (
        "row 0 of f.jsonl has 5 tokens, more than --max_seq_length 4, and --max_seq_length_policy is error; raise the "
        "length, or set the policy to truncate or drop"
    )
    kept, _ = apply(flat_of(SAMPLES), max_seq_length=5, policy="error", name_row=name_row)
    assert len(kept.lengths) == 3


def test_nothing_at_all():
    kept, counts = apply(flat_of([]), max_seq_length=4, policy="truncate", name_row=name_row)
    assert len(kept.ids) == len(kept.lengths) == 0
    assert counts == Counts()


sample = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6).map(
    lambda tokens: ([token for token, _ in tokens], [token if is_target else X for token, is_target in tokens])
)


@settings(max_examples=300, deadline=None)
@given(st.lists(sample, max_size=6), st.integers(1, 5), st.sampled_from(["truncate", "drop"]))
def test_as_sample_by_sample(samples, max_seq_length, policy):
    expected = []
    for row, (ids, labels) in enumerate(samples):
        if policy == "drop" and len(ids) > max_seq_length:
            continue
        cut = ([*ids[:max_seq_length]], [X, *labels[1:max_seq_length]])
        if any(label != X for label in cut[1][1:]):
            expected.append((row, cut))
    kept, counts = apply(flat_of(samples), max_seq_length=max_seq_length, policy=policy, name_row=name_row)
    assert samples_of(kept) == [cut for _, cut in expected]
    assert kept.rows.tolist() == [row for row, _ in expected]
    assert counts.read == len(samples)
    assert counts.kept == len(expected)
    assert counts.read - counts.kept == sum(rows.count for rows in counts.dropped.values())
    assert counts.tokens == sum(len(ids) for _, (ids, _) in expected)
    assert counts.supervised == sum(label != X for _, (_, labels) in expected for label in labels)
