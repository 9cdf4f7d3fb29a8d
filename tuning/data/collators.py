"""Samples to batches: padded rows, or one flattened row without padding.

Both collators take the same samples with the same labels and differ in layout only, so that a padded and a
padding-free run have the same loss. No token predicts the first token of a sample: in a padded row the causal shift
never reads that label, in a flattened row it would be the seam to the sample before. It is -100 in both, so that both
count the same supervised tokens.

Legend: ``B`` samples, ``S`` length of the longest one (or the next multiple asked for), ``T`` tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tuning.errors import DataError

__all__ = ["IGNORE_INDEX", "FlattenedCollator", "PaddedCollator"]

IGNORE_INDEX = -100  # torch.nn.CrossEntropyLoss

# bookkeeping that says nothing the ids do not say
_IGNORED_COLUMNS = frozenset({"length", "lengths", "num_tokens"})
_SAMPLE_COLUMNS = frozenset({"input_ids", "labels", "attention_mask"})

Sample = Mapping[str, Sequence[int]]


class PaddedCollator:
    """Pad samples to one length: ``input_ids``, ``attention_mask`` and ``labels``, each int64 ``[B, S]``.

    What is padding is known by position, never by id, so a pad token that is also the EOS loses no EOS.

    Args:
        pad_token_id: Id that fills ``input_ids``; labels are filled by -100, the mask by 0.
        padding_side: ``"right"`` or ``"left"``.
        pad_to_multiple_of: ``S`` is rounded up to a multiple of this; None: it is the longest sample.
    """

    def __init__(
        self, pad_token_id: int, *, padding_side: str = "right", pad_to_multiple_of: int | None = None
    ) -> None:
        if padding_side not in ("right", "left"):
            raise ValueError(f"padding_side is {padding_side!r}; it must be right or left")
        self.pad_token_id = pad_token_id
        self.padding_side = padding_side
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the batch of ``samples``; of none, one filler sample without a supervised token.

        Raises:
            DataError: If a sample has a column that would be lost, or labels of another length than its ids.
        """
        ids, labels = _read(samples, filler_token_id=self.pad_token_id)
        num_rows, row_length = len(ids), max(map(len, ids))
        if self.pad_to_multiple_of is not None:
            row_length = -(-row_length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        ids_BS = np.full((num_rows, row_length), self.pad_token_id, dtype=np.int64)
        labels_BS = np.full((num_rows, row_length), IGNORE_INDEX, dtype=np.int64)
        mask_BS = np.zeros((num_rows, row_length), dtype=np.int64)
        for row, (sample_ids, sample_labels) in enumerate(zip(ids, labels, strict=True)):
            start = 0 if self.padding_side == "right" else row_length - len(sample_ids)
            end = start + len(sample_ids)
            ids_BS[row, start:end] = sample_ids
            labels_BS[row, start + 1 : end] = sample_labels[1:]
            mask_BS[row, start:end] = 1
        return {
            "input_ids": torch.from_numpy(ids_BS),
            "attention_mask": torch.from_numpy(mask_BS),
            "labels": torch.from_numpy(labels_BS),
        }


class FlattenedCollator:
    """Lay samples one after another in a single row and say where each begins.

    The batch has ``input_ids``, ``labels`` and ``position_ids`` (int64 ``[1, T]``; positions restart at 0 with each
    sample), ``seq_idx`` (int32 ``[1, T]``; number of the sample a token belongs to), ``cu_seq_lens_q`` and
    ``cu_seq_lens_k`` (one int32 tensor ``[B + 1]``: where samples begin, and ``T``), ``max_length_q`` and
    ``max_length_k`` (plain ints: tokens of the longest sample). There is no attention mask: a mask of ones makes
    transformers attend across samples.

    Args:
        filler_token_id: Id of the two tokens that stand in for an empty list of samples.
    """

    def __init__(self, *, filler_token_id: int = 0) -> None:
        self.filler_token_id = filler_token_id

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the batch of ``samples``; of none, one filler sample without a supervised token.

        Raises:
            DataError: If a sample has a column that would be lost, or labels of another length than its ids.
        """
        ids, labels = _read(samples, filler_token_id=self.filler_token_id)
        lengths_B = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        bounds = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(lengths_B, out=bounds[1:])
        starts_B = bounds[:-1]

        labels_T = np.concatenate(labels, dtype=np.int64)
        labels_T[starts_B] = IGNORE_INDEX
        positions_T = np.arange(bounds[-1], dtype=np.int64) - np.repeat(starts_B, lengths_B)
        sample_of_T = np.repeat(np.arange(len(ids), dtype=np.int32), lengths_B)
        cu_seq_lens = torch.from_numpy(bounds.astype(np.int32))
        max_length = int(lengths_B.max())
        return {
            "input_ids": torch.from_numpy(np.concatenate(ids, dtype=np.int64)).unsqueeze(0),
            "labels": torch.from_numpy(labels_T).unsqueeze(0),
            "position_ids": torch.from_numpy(positions_T).unsqueeze(0),
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": max_length,
            "max_length_k": max_length,
            "seq_idx": torch.from_numpy(sample_of_T).unsqueeze(0),
        }


def _read(
    samples: Sequence[Sample], *, filler_token_id: int
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Return ids and labels of each sample as arrays; of no samples, those of the filler."""
    if not samples:
        return [np.full(2, filler_token_id)], [np.full(2, IGNORE_INDEX)]
    ids, labels = [], []
    for sample in samples:
        sample_ids, sample_labels = np.asarray(sample["input_ids"]), np.asarray(sample["labels"])
        _check(sample, sample_ids, sample_labels)
        ids.append(sample_ids)
        labels.append(sample_labels)
    return ids, labels


def _check(sample: Sample, ids: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    lost = sample.keys() - _SAMPLE_COLUMNS - _IGNORED_COLUMNS
    if lost:
        raise DataError(
            f"A sample has the column {sorted(lost)[0]!r}, which a batch would lose; remove it from the data set: "
            "a sample is input_ids and labels"
        )
    if ids.ndim != 1 or ids.shape != labels.shape or not ids.size:
        raise DataError(
            f"A sample has input_ids of shape {ids.shape} and labels of shape {labels.shape}; both must be lists of "
            "the same length, with one token or more"
        )
    if "attention_mask" in sample and not np.all(sample["attention_mask"]):
        raise DataError(
            "A sample has an attention_mask with zeros; the collator does the padding, so give samples without it"
        )
