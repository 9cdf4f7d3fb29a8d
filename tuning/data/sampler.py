"""One rank's batches around a plan: a batch sampler that knows its epoch, its place, and the run it belongs to.

Three things go wrong between Hugging Face's trainer, accelerate and a sampler that knows its rank, and this one is
made so that none can happen unseen:

- ``set_epoch`` does not reach a sampler that accelerate has wrapped, and every epoch is the first. Here an iterator
  that has handed out its last batch moves the sampler on to the next epoch by itself; ``set_epoch`` says it explicitly.
- accelerate shards the loader a second time and half of the data is never seen. Give the loader this sampler and keep
  it from ``accelerator.prepare``; the plugin's callback compares the loader's length with :func:`len` of the sampler.
- after a resume accelerate skips batches of whatever epoch the sampler is in. ``set_epoch`` therefore always means the
  epoch from its first batch on, so that skipping after it is right; a place inside the epoch, from
  ``load_state_dict``, holds for an iterator that is made without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from tuning.data.cost import Cost
from tuning.data.packing import PackingSpec, Plan, plan
from tuning.errors import CheckpointError

__all__ = ["MultiPackSampler", "plain_order"]

IntArray = npt.NDArray[np.integer[Any]]

_VERSION = 1
# key of a fingerprint -> what the user calls it
_WORDS = {
    "seed": "the data seed",
    "num_ranks": "the number of ranks",
    "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "mode": "--multipack mode",
    "max_tokens": "--multipack max_tokens",
    "cost": "the cost of attention",
}
_REPLAN = ", or add resume=replan to --multipack: each step keeps its samples here, and only their seats change"
# a step holds the same samples whatever these are, if their product stays the same
_SHAPE = ("num_ranks", "batch_size", "accumulation")


def plain_order(num_samples: int, *, seed: int, epoch: int) -> IntArray:
    """Return the order in which the plain run reads its samples.

    transformers' trainer asks for a ``RandomSampler``, which accelerate replaces by its ``SeedableRandomSampler``:
    one permutation, of a generator seeded by the data seed plus the epoch. Batch ``i`` of it goes to rank ``i`` modulo
    ranks, so that an optimizer step is one stretch of it, whatever the number of ranks.

    Args:
        num_samples: Of the data set.
        seed: ``data_seed`` where it is set, else ``seed``.
        epoch: From 0.
    """
    generator = torch.Generator(device="cpu")
    generator.manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator, device="cpu").numpy()


class MultiPackSampler(Sampler[list[int]]):
    """The batches of one rank, planned anew for each epoch.

    Args:
        lengths: Tokens a sample, in dataset order.
        spec: Of the run.
        rank: Data-parallel rank of this process, from 0.
        rows: Dataset row of each sample of ``lengths``; None: they are all rows, in order.
        replan: A checkpoint of another number of ranks is taken up where that can be done without losing samples.

    Raises:
        DataError: If there is no sample, or if the first epoch does not fit ``max_tokens`` in exact mode.
    """

    def __init__(
        self,
        lengths: Sequence[int] | IntArray,
        spec: PackingSpec,
        *,
        rank: int,
        rows: IntArray | None = None,
        replan: bool = False,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.spec = spec
        self.rank = rank
        self.rows = rows
        self.replan = replan
        # (epoch, samples left of it), after a resume that could not go on with the plan of the checkpoint
        self._rest: tuple[int, IntArray] | None = None
        self._epoch = 0
        self._start = 0
        self._position = 0
        self._iterator = 0
        first = self._make_plan(0, num_micro_steps=None)
        self.num_micro_steps = first.num_micro_steps
        self._plans = {0: first}
        self._digest = self._digest_of(first)

    @property
    def epoch(self) -> int:
        """Epoch of the next iterator, from 0."""
        return self._epoch

    @property
    def num_steps(self) -> int:
        """Optimizer steps an epoch."""
        return -(-self.num_micro_steps // self.spec.accumulation)

    def __len__(self) -> int:
        """Return the micro-steps of an epoch, the same in each; fewer in the rest of an epoch planned anew."""
        if self._rest is not None and self._rest[0] == self._epoch:
            return self.plan(self._epoch).num_micro_steps
        return self.num_micro_steps

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over this rank's batches, dataset rows each; an empty list is a filler seat."""
        start, self._start = self._start, 0
        self._position = start
        self._iterator += 1
        return self._batches(self.plan(self._epoch), start, self._iterator)

    def _batches(self, current: Plan, start: int, iterator: int) -> Iterator[list[int]]:
        for number, batch in enumerate(current.batches(self.rank, start=start), start=start + 1):
            # an iterator that another one has replaced no longer moves the sampler
            if iterator == self._iterator:
                self._position = number
                if number == current.num_micro_steps:
                    self._epoch, self._position = self._epoch + 1, 0
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iterator start at the first batch of ``epoch``, from 0."""
        self._epoch, self._start, self._position = epoch, 0, 0

    def plan(self, epoch: int) -> Plan:
        """Return the plan of ``epoch``; the last two are kept."""
        found = self._plans.get(epoch)
        if found is None:
            found = self._make_plan(epoch, num_micro_steps=self.num_micro_steps)
            self._plans = {kept: value for kept, value in self._plans.items() if kept == epoch - 1}
            self._plans[epoch] = found
        return found

    def _make_plan(self, epoch: int, *, num_micro_steps: int | None) -> Plan:
        samples = None
        if self._rest is not None and self._rest[0] == epoch:
            samples, num_micro_steps = self._rest[1], None
        lengths = self.lengths if samples is None else self.lengths[samples]
        order = plain_order(len(lengths), seed=self.spec.seed, epoch=epoch) if self.spec.mode == "exact" else None
        made = plan(lengths, self.spec, epoch=epoch, order=order, num_micro_steps=num_micro_steps)
        if samples is not None:
            made = dataclasses.replace(made, order=samples[made.order])
        return made if self.rows is None else dataclasses.replace(made, order=self.rows[made.order])

    def meters(self, first_step: int, last_step: int) -> dict[str, float]:
        """Return fill and balance from step ``first_step`` to before ``last_step``, counted over epochs from 0.

        They come from the plan: no rank has to be asked. Steps of two epochs weigh by their number.
        """
        sums: dict[str, float] = {}
        total = 0
        for epoch in range(first_step // self.num_steps, -(-last_step // self.num_steps)):
            if epoch not in self._plans:
                continue
            begin = epoch * self.num_steps
            stats = self._plans[epoch].stats(max(first_step - begin, 0), last_step - begin)
            values = {"token_balance": stats.token_balance, "cost_balance": stats.cost_balance}
            if stats.fill is not None:
                values["fill"] = stats.fill
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * stats.num_steps
            total += stats.num_steps
        return {f"multipack/{name}": value / total for name, value in sums.items()}

    # ---- resume ----

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs, as plain values: the run's fingerprint, the epoch, and the batches handed out."""
        return {
            "version": _VERSION,
            "fingerprint": self._fingerprint(),
            "epoch": self._epoch,
            "micro_step": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, replan: bool | None = None) -> None:
        """Go on where ``state`` was taken, or refuse; :meth:`set_epoch` afterwards goes back to the epoch's start.

        Args:
            state: From :meth:`state_dict`.
            replan: What is left of the epoch is planned anew if the run is not the same. None: only where a step
                keeps its samples and an epoch its steps, and only if the sampler was made with ``replan``; this is
                what a trainer that counts steps can go on from.

        Raises:
            CheckpointError: If data, seed or ranks are not those of the checkpoint, with what changed.
        """
        if state.get("version") != _VERSION:
            raise CheckpointError(
                f"the checkpoint's data order has format {state.get('version')} and this version reads {_VERSION}; "
                "resume with the version that wrote it, or pass --resume_from_checkpoint false"
            )
        before, now = dict(state["fingerprint"]), self._fingerprint()
        epoch, micro_step = int(state["epoch"]), int(state["micro_step"])
        self._rest = None
        if before == now:
            self.set_epoch(epoch)
            self._start = self._position = micro_step
            return
        changes = _changes(before, now)
        allowed = self.replan if replan is None else replan
        if not allowed:
            raise CheckpointError(
                f"the checkpoint was written by another run: {changes}. Going on would train some samples twice and "
                "others never. Use the values of the checkpoint, or pass --resume_from_checkpoint false to start over"
                + (_REPLAN if _has_same_steps(before, now) else "")
            )
        if before["data"] != now["data"]:
            raise CheckpointError(
                f"the checkpoint was written by another run: {changes}. The rest of its epoch cannot be planned anew, "
                "because nothing tells which of the new samples it has trained on. Use the data of the checkpoint, or "
                "pass --resume_from_checkpoint false to start over"
            )
        if _has_same_steps(before, now):
            self.set_epoch(epoch)
            self._start = self._position = micro_step // before["accumulation"] * now["accumulation"]
            return
        if not replan:
            raise CheckpointError(
                f"the checkpoint was written by another run: {changes}. The trainer counts steps, and the epoch now "
                "has other ones: resume=replan needs mode=exact, the same seed, and the same product of ranks, "
                "per_device_train_batch_size and gradient_accumulation_steps. Choose these, or pass "
                "--resume_from_checkpoint false to start over"
            )
        self._plan_rest(before, epoch, micro_step)

    def _plan_rest(self, before: Mapping[str, Any], epoch: int, micro_step: int) -> None:
        """Leave of ``epoch`` what a run with the fingerprint ``before`` had not handed out."""
        spec = PackingSpec(
            cost=Cost(ratio=before["cost"] or 0.0),
            **{key: before[key] for key in ("mode", "seed", "max_tokens", *_SHAPE)},
        )
        old = MultiPackSampler(self.lengths, spec, rank=0).plan(epoch)
        left = np.ones(len(self.lengths), dtype=np.bool_)
        left[old.samples_before(micro_step)] = False
        self._plans.pop(epoch, None)
        self.set_epoch(epoch if left.any() else epoch + 1)
        self._rest = (epoch, np.flatnonzero(left)) if left.any() else None

    def _digest_of(self, first: Plan) -> str:
        """Return what tells whether another version of numpy, torch or this code would plan alike."""
        if self.spec.mode == "exact":
            return _sha(plain_order(len(self.lengths), seed=self.spec.seed, epoch=0))
        return _sha(first.order, first.offsets)

    def _fingerprint(self) -> dict[str, Any]:
        spec = self.spec
        exact = spec.mode == "exact"  # where cap and cost choose seats only, not which samples a step holds
        told = (self.lengths,) if self.rows is None else (self.lengths, self.rows)
        return {
            "data": f"{len(self.lengths)} samples ({_sha(*told)})",
            "seed": spec.seed,
            "num_ranks": spec.num_ranks,
            "batch_size": spec.batch_size,
            "accumulation": spec.accumulation,
            "mode": spec.mode,
            "max_tokens": None if exact else spec.max_tokens,
            "cost": None if exact else spec.cost.ratio,
            "plan": self._digest,
        }


def _sha(*arrays: IntArray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def _has_same_steps(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Say whether each step of both runs holds the same samples."""
    same = all(before[key] == now[key] for key in ("data", "seed", "mode", "plan"))
    products = [math.prod(values[key] for key in _SHAPE) for values in (before, now)]
    return same and now["mode"] == "exact" and products[0] == products[1]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changes = [
        f"{word} was {before.get(key)} and is {now[key]}" for key, word in _WORDS.items() if before.get(key) != now[key]
    ]
    if before.get("data") != now["data"]:
        changes.insert(0, f"the training data was {before.get('data')} and is {now['data']}")
    if not changes:
        changes.append("another version of numpy, torch or packtune orders the samples differently")
    return ", ".join(changes)
