"""Data loaders whose ranks are told apart by the batch sampler alone.

accelerate shards a loader by handing every N-th batch to a rank and repeats samples from the start where the count
does not divide. Both are wrong for a sampler that knows its rank, and the repeats are wrong for an exact mean. These
loaders are never handed to accelerate: a seat without a sample is an empty batch, of which the collator makes a
filler that adds nothing (:class:`FillerBatch`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard
from datasets import IterableDataset
from torch.utils.data import DataLoader, Sampler

from tuning.data.packing import mean_tokens
from tuning.data.sampler import plain_order
from tuning.data.tokenization import sample_lengths
from tuning.errors import ConfigError, DataError
from tuning.trainers.loss import IGNORE_INDEX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from datasets import Dataset

    from tuning.seats import Collator
    from tuning.trainers.arguments import TrainingArguments

__all__ = [
    "FillerBatch",
    "SequentialBatches",
    "ShuffledBatches",
    "TokenBudgetBatches",
    "build_eval_loader",
    "build_loader",
    "check_size",
    "endless",
    "eval_batches",
    "loader_options",
    "plain_batches",
    "to_rows",
]


class FillerBatch(dict[str, Any]):
    """The batch of an empty seat: computed like any other, with no real token and no target in it.

    A type of its own, because everything between collator and loss (workers, pinning, moving to the device) keeps the
    type of a batch, while a key of its own would reach the model.
    """


class SequentialBatches(Sampler[list[int]]):
    """One rank's batches of a data set in its order; all ranks get the same number of them.

    Args:
        num_samples: Samples of the data set.
        batch_size: Samples a batch.
        rank: Of this process.
        world_size: Ranks; batch ``i`` goes to rank ``i % world_size``.
    """

    def __init__(self, num_samples: int, *, batch_size: int, rank: int, world_size: int) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        # accelerate's word; with it a loader knows how many rows of the last step are real
        self.num_processes = world_size

    def __len__(self) -> int:
        """Return the batches of every rank."""
        num_batches = -(-self.num_samples // self.batch_size)
        return -(-num_batches // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield indices; an empty list where there is no batch left for this rank."""
        for step in range(len(self)):
            start = (step * self.world_size + self.rank) * self.batch_size
            yield list(range(start, min(start + self.batch_size, self.num_samples)))


class TokenBudgetBatches(SequentialBatches):
    """One rank's batches of a data set in its order, each with as many samples as hold ``max_tokens``, or one sample.

    Args:
        lengths: Tokens of each sample.
        max_tokens: Tokens of a batch; only a longer sample, alone in its batch, may have more.
        batch_size: Samples a batch as accelerate is told; it cuts nothing by it.
        rank: Of this process.
        world_size: Ranks.
    """

    def __init__(
        self, lengths: npt.NDArray[np.int64], *, max_tokens: int, batch_size: int, rank: int, world_size: int
    ) -> None:
        super().__init__(len(lengths), batch_size=batch_size, rank=rank, world_size=world_size)
        ends = np.cumsum(lengths)
        starts = [0]
        while starts[-1] < len(lengths):
            start = starts[-1]
            limit = int(ends[start] - lengths[start]) + max_tokens
            starts.append(max(start + 1, int(np.searchsorted(ends, limit, side="right"))))
        self.starts = starts

    def __len__(self) -> int:
        """Return the batches of every rank."""
        return -(-(len(self.starts) - 1) // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield indices; an empty list where there is no batch left for this rank."""
        for step in range(len(self)):
            number = step * self.world_size + self.rank
            yield list(range(*self.starts[number : number + 2])) if number + 1 < len(self.starts) else []


class ShuffledBatches(SequentialBatches):
    """One rank's training batches in Hugging Face's own order, each sample once an epoch over all ranks.

    accelerate repeats samples from the start in the last step where the number of batches does not divide by the
    ranks; here the seat stays empty, so that N ranks train on exactly what one does.

    Args:
        num_samples: Samples of the data set.
        batch_size: Samples a batch.
        rank: Of this process.
        world_size: Ranks.
        seed: ``data_seed`` where it is set, else ``seed``.
        drop_last: Leave out a last step that is not full on every rank.
    """

    def __init__(
        self, num_samples: int, *, batch_size: int, rank: int, world_size: int, seed: int, drop_last: bool
    ) -> None:
        super().__init__(num_samples, batch_size=batch_size, rank=rank, world_size=world_size)
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def __len__(self) -> int:
        """Return the batches of every rank."""
        if self.drop_last:
            return self.num_samples // (self.batch_size * self.world_size)
        return super().__len__()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield indices in the order of the epoch; an empty list where there is no batch left for this rank."""
        order = plain_order(self.num_samples, seed=self.seed, epoch=self.epoch)
        for positions in super().__iter__():
            yield order[positions].tolist() if positions else []

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0; it holds for iterators made afterwards."""
        self.epoch = epoch


def check_size(dataset: Dataset | IterableDataset, args: TrainingArguments) -> None:
    """Refuse ``dataloader_drop_last`` where it drops every sample: such a run trains on nothing and says it finished.

    Raises:
        ConfigError: If the samples fill no step.
    """
    if not args.dataloader_drop_last or isinstance(dataset, IterableDataset):
        return
    samples_a_step = args.train_batch_size * args.world_size
    if len(dataset) < samples_a_step:
        raise ConfigError(
            f"--dataloader_drop_last leaves nothing to train on: there are {len(dataset)} samples, and a full step "
            f"takes {samples_a_step} ({args.train_batch_size} on each of {args.world_size} ranks); drop the flag or "
            "lower --per_device_train_batch_size"
        )


def endless(dataset: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Return a stream that starts again where it ends; what is no stream is returned as it is.

    Upstream does not know where a stream ends: it would carry the gradients of a short last window into the next
    optimizer step, add up both means there, and fill a last step of several ranks by first samples once more. And a
    resume could not skip beyond the end. ``max_steps`` says when to stop.

    Raises:
        DataError: If the stream has no sample.
    """
    if not isinstance(dataset, IterableDataset):
        return dataset
    if next(iter(dataset), None) is None:
        raise DataError(
            "--streaming found no sample to train on: no row is left with a token to train on; see the warnings above, "
            "and read the rows without --streaming to get a table of why they were dropped"
        )
    return dataset.repeat(None)


def plain_batches(dataset: Dataset | IterableDataset, args: TrainingArguments) -> ShuffledBatches | None:
    """Return this rank's batches in Hugging Face's order; None where another order or splitting was asked for."""
    loading = args.accelerator_config
    asked_otherwise = (
        args.train_sampling_strategy != "random"
        or args.auto_find_batch_size
        or args.deepspeed
        or loading.split_batches
        or loading.dispatch_batches
        or not loading.use_seedable_sampler
    )
    if asked_otherwise or isinstance(dataset, IterableDataset):
        return None
    return ShuffledBatches(
        len(dataset),
        batch_size=args.train_batch_size,
        rank=args.process_index,
        world_size=args.world_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        drop_last=args.dataloader_drop_last,
    )


def loader_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the keyword arguments of ``torch.utils.data.DataLoader`` that the training arguments ask for."""
    options = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and args.device.type != "cpu",
    }
    if args.dataloader_num_workers > 0:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
        options["in_order"] = args.dataloader_in_order
    return options


class _SeatCollator:
    def __init__(self, inner: Collator) -> None:
        self.inner = inner

    def __call__(self, samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
        batch = self.inner(samples)
        return batch if samples else FillerBatch(batch)


def build_loader(
    dataset: Dataset, batch_sampler: Sampler[list[int]], collator: Collator, *, options: Mapping[str, Any]
) -> DataLoader[Any]:
    """Return a loader of CPU batches, in the order of ``batch_sampler``.

    Args:
        dataset: Rows with ``input_ids`` and ``labels``.
        batch_sampler: Indices of each batch of this rank.
        collator: Samples to batch; gets an empty list for an empty seat.
        options: Further keyword arguments of ``torch.utils.data.DataLoader``.
    """
    return DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=_SeatCollator(collator), **options)


def eval_batches(
    dataset: Dataset, collator: Collator, args: TrainingArguments, *, keeps_rows: bool
) -> SequentialBatches:
    """Return this rank's evaluation batches: of equally many samples, or of equally many tokens.

    A flattened batch costs what its tokens cost, so it is cut by tokens: as many as ``per_device_eval_batch_size``
    samples have in the mean. The longest samples that come together then take no more memory than any others.

    Args:
        dataset: Rows with ``input_ids`` and ``labels``.
        collator: Of the run; what it makes of an empty list tells whether it flattens.
        args: Complete training arguments.
        keeps_rows: Predictions are gathered from all ranks, which needs equally many rows of each.
    """
    place = {"batch_size": args.eval_batch_size, "rank": args.process_index, "world_size": args.world_size}
    if keeps_rows or "cu_seq_lens_q" not in collator([]):
        return SequentialBatches(len(dataset), **place)
    lengths = sample_lengths(dataset)
    return TokenBudgetBatches(lengths, max_tokens=mean_tokens(lengths, args.eval_batch_size), **place)


def build_eval_loader(
    dataset: Dataset, batches: SequentialBatches, collator: Collator, *, options: Mapping[str, Any]
) -> DataLoader[Any]:
    """Return a loader of CPU batches that tells accelerate when it is at its end.

    ``gather_for_metrics`` cuts the last step to the rows that are real, and it looks at the loader that is being read:
    without this one it would cut by the size of the training data.

    Args:
        dataset: Rows with ``input_ids`` and ``labels``.
        batches: Of this rank.
        collator: As in :func:`build_loader`.
        options: As in :func:`build_loader`.
    """
    return DataLoaderShard(dataset, batch_sampler=batches, collate_fn=_SeatCollator(collator), **options)


def to_rows(batch: torch.Tensor, lengths: list[int] | None, num_rows: int) -> torch.Tensor:
    """Return ``batch`` with one row a sample, rows padded by -100 and rows of -100 up to ``num_rows``.

    Args:
        batch: ``[B, S, ...]``, or ``[1, T, ...]`` where samples lie end to end.
        lengths: Tokens of each sample of a flattened batch; None: it has rows already.
        num_rows: Rows wanted.
    """
    if lengths is not None:
        rows = list(torch.split(batch[0], lengths))
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX)
    missing = num_rows - batch.shape[0]
    if missing <= 0:
        return batch
    return torch.cat([batch, batch.new_full((missing, *batch.shape[1:]), IGNORE_INDEX)])
