"""Samples as flat arrays, and which of them are kept: length policy and the need for something to train on.

All of it is arithmetic on whole arrays. A row without a token to train on is dropped whatever is done with it later:
its loss is 0 or not a number, and it takes a place in a batch for nothing. The first token of a sample cannot be
trained on, since no token predicts it; its label is always -100.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuning.data.collators import IGNORE_INDEX
from tuning.data.report import Counts, Dropped
from tuning.errors import DataError

__all__ = ["NO_TARGET", "Flat", "apply"]

NO_TARGET = "no trainable token"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """Samples laid one after another.

    Attributes:
        ids: Token ids of all samples, int32 ``[T]``.
        labels: Labels, int32 ``[T]``; -100 where the token is not trained on.
        lengths: Tokens of each sample, int64.
        rows: Number of each sample in the data set, int64.
    """

    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]


def apply(flat: Flat, *, max_seq_length: int, policy: str, name_row: Callable[[int], str]) -> tuple[Flat, Counts]:
    """Cut or drop what is too long and drop what has nothing to train on.

    Args:
        flat: Samples; their labels are overwritten where a sample begins.
        max_seq_length: Longest sample in tokens.
        policy: ``"truncate"`` (keep the start), ``"drop"`` or ``"error"``.
        name_row: Says where a row is from, for messages.

    Returns:
        The samples kept, and the counts of these samples.

    Raises:
        DataError: If a sample is too long and the policy is ``error``.
    """
    lengths = flat.lengths
    starts = np.cumsum(lengths) - lengths
    flat.labels[starts[lengths > 0]] = IGNORE_INDEX
    is_long = lengths > max_seq_length
    if policy == "error" and is_long.any():
        first = int(is_long.argmax())
        raise DataError(
            f"{name_row(int(flat.rows[first]))} has {lengths[first]:,} tokens, more than --max_seq_length "
            f"{max_seq_length}, and --max_seq_length_policy is error; raise the length, or set the policy to truncate "
            "or drop"
        )
    is_target = flat.labels != IGNORE_INDEX
    is_inside = np.ones(len(flat.ids), dtype=bool)
    if policy == "truncate" and is_long.any():
        places = np.arange(len(flat.ids)) - np.repeat(starts, lengths)
        is_inside = places < max_seq_length
    had_target = _count_per_sample(is_target, starts, lengths) > 0
    num_targets = _count_per_sample(is_target & is_inside, starts, lengths)
    is_dropped_long = is_long & (policy == "drop")
    is_kept = (num_targets > 0) & ~is_dropped_long
    reasons = {
        f"more than {max_seq_length:,} tokens": is_dropped_long,
        NO_TARGET: ~had_target & ~is_dropped_long,
        f"{NO_TARGET} in the first {max_seq_length:,}": had_target & (num_targets == 0) & ~is_dropped_long,
    }
    chosen = np.repeat(is_kept, lengths) & is_inside
    kept_lengths = np.minimum(lengths, max_seq_length)[is_kept] if policy == "truncate" else lengths[is_kept]
    counts = Counts(
        read=len(lengths),
        kept=int(is_kept.sum()),
        truncated=int((is_kept & is_long).sum()),
        dropped={why: Dropped.of(flat.rows[which].tolist()) for why, which in reasons.items() if which.any()},
        tokens=int(kept_lengths.sum()),
        supervised=int(num_targets[is_kept].sum()),
    )
    kept = Flat(ids=flat.ids[chosen], labels=flat.labels[chosen], lengths=kept_lengths, rows=flat.rows[is_kept])
    return kept, counts


def _count_per_sample(
    flags: npt.NDArray[Any], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Count the set flags of each sample; samples may be empty."""
    running = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(flags, dtype=np.int64)])
    return running[starts + lengths] - running[starts]
