"""Plan the batches of every rank for one epoch, from lengths and a seed alone.

A *seat* is what one rank trains on in one micro-step; a *step* is an optimizer step of ``accumulation`` micro-steps.
A plan puts each sample into exactly one seat, gives every rank the same number of micro-steps, and has the same number
of steps in every epoch. A seat may stay empty when there are fewer samples than seats; the collator makes a filler of
it that adds nothing, so that no sample is repeated or dropped to come out even.

Two modes:

- ``exact``: each step holds the samples that the plain run would give it, in the order handed in. Gradients are those
  of the plain run; only who waits for whom changes (``tuning.data.seating``).
- ``budget``: seats are filled to ``max_tokens``, and which samples share a step is the packer's choice
  (``tuning.data.filling``). Steps hold nearly equal work, and samples a step vary.

Every rank plans for itself and needs all to come to the same plan, so that nothing here may depend on the machine:
sums are of whole numbers, sorts are stable, and random numbers come from numpy's PCG64 with words of our own. numpy
only: the order of the plain run, which needs torch, is handed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuning.data.cost import Cost
from tuning.data.filling import count_micro_steps as _count_filled
from tuning.data.filling import fill
from tuning.data.ordering import stable_order
from tuning.data.seating import seat_steps
from tuning.errors import DataError

__all__ = ["PackingSpec", "Plan", "PlanStats", "count_micro_steps", "mean_tokens", "plan", "surely_fits"]

IntArray = npt.NDArray[np.integer[Any]]

# int32 room of a stretched seat, with as much again below zero
_MOST_TOKENS = 1 << 27
_WORD = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingSpec:
    """What fixes the plans of a run, beside its lengths.

    Attributes:
        mode: ``"exact"`` or ``"budget"``.
        num_ranks: Data-parallel ranks.
        batch_size: Samples a rank a micro-step of the plain run.
        accumulation: Micro-steps a step.
        seed: Of the data order.
        cost: Work of a sample.
        max_tokens: Tokens of a seat; None, in exact mode only: no cap.
    """

    mode: str
    num_ranks: int
    batch_size: int
    accumulation: int
    seed: int
    cost: Cost
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStats:
    """How good some steps of a plan are.

    Attributes:
        num_steps: Optimizer steps.
        num_samples: Samples in them.
        num_tokens: Tokens in them.
        num_fillers: Seats without a sample.
        num_over_long: Seats of more than ``max_tokens``; 0 without it.
        fill: Tokens of the other seats over what they could hold, 0 to 1; None without ``max_tokens``.
        token_balance: Mean over greatest tokens of the ranks, micro-step by micro-step, 0 to 1.
        cost_balance: The same of work: the share of the time in which a rank does not wait for another.
        bound: The cost balance that no seating of these steps could beat.
        least_samples: Fewest samples of a step.
        most_samples: Most samples of a step.
    """

    num_steps: int
    num_samples: int
    num_tokens: int
    num_fillers: int
    num_over_long: int
    fill: float | None
    token_balance: float
    cost_balance: float
    bound: float
    least_samples: int
    most_samples: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """The batches of every rank for one epoch; seat ``micro_step * num_ranks + rank``.

    Attributes:
        order: Samples, seat by seat.
        offsets: Where each seat begins in ``order``, and its length.
        seat_tokens: Tokens of each seat, ``[micro_steps, ranks]``.
        seat_costs: Work of each seat, ``[micro_steps, ranks]``.
        longest_costs: Work of the longest sample of each step.
        accumulation: Micro-steps a step; the last step may have fewer.
        max_tokens: Tokens a seat may hold, or None.
    """

    order: IntArray
    offsets: IntArray
    seat_tokens: IntArray
    seat_costs: IntArray
    longest_costs: IntArray
    accumulation: int
    max_tokens: int | None

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of every rank."""
        return len(self.seat_tokens)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return int(self.seat_tokens.shape[1])

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return -(-self.num_micro_steps // self.accumulation)

    def seat(self, micro_step: int, rank: int) -> IntArray:
        """Return the samples of one seat, a view of ``order``."""
        number = micro_step * self.num_ranks + rank
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    def batches(self, rank: int, *, start: int = 0) -> Iterator[list[int]]:
        """Yield the samples of one rank, micro-step by micro-step from ``start`` on; an empty list is a filler."""
        for micro_step in range(start, self.num_micro_steps):
            yield self.seat(micro_step, rank).tolist()

    def samples_before(self, micro_step: int) -> IntArray:
        """Return the samples of all ranks in the micro-steps before ``micro_step``, a view of ``order``."""
        return self.order[: self.offsets[micro_step * self.num_ranks]]

    def stats(self, first_step: int = 0, last_step: int | None = None) -> PlanStats:
        """Return how good the steps from ``first_step`` to before ``last_step`` are; default: all."""
        last_step = self.num_steps if last_step is None else min(last_step, self.num_steps)
        rows = slice(first_step * self.accumulation, last_step * self.accumulation)
        tokens, costs = self.seat_tokens[rows], self.seat_costs[rows].astype(np.float64)
        steps = np.arange(first_step, last_step)
        at = np.minimum(np.append(steps, last_step) * self.accumulation, self.num_micro_steps) * self.num_ranks
        samples_of_step = np.diff(self.offsets[at])
        held = np.diff(self.offsets[at[0] : at[-1] + 1])
        ordinary = np.ones(tokens.shape, dtype=np.bool_)
        filled = None
        if self.max_tokens is not None:
            ordinary = tokens <= self.max_tokens
            filled = _ratio(float(tokens[ordinary].sum()), float(ordinary.sum()) * self.max_tokens)
        work = np.add.reduceat(costs.sum(axis=1), np.arange(0, len(costs), self.accumulation)) / self.num_ranks
        least_time = np.maximum(work, self.longest_costs[first_step:last_step])
        return PlanStats(
            num_steps=len(steps),
            num_samples=int(samples_of_step.sum()),
            num_tokens=int(tokens.sum()),
            num_fillers=int((held == 0).sum()),
            num_over_long=int((~ordinary).sum()),
            fill=filled,
            token_balance=_ratio(float(tokens.mean(axis=1).sum()), float(tokens.max(axis=1).sum())),
            cost_balance=_ratio(float(costs.mean(axis=1).sum()), float(costs.max(axis=1).sum())),
            bound=_ratio(float(work.sum()), float(least_time.sum())),
            least_samples=int(samples_of_step.min()),
            most_samples=int(samples_of_step.max()),
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def mean_tokens(lengths: Sequence[int] | IntArray, batch_size: int) -> int:
    """Return the tokens of ``batch_size`` samples of mean length, rounded up: the default of ``max_tokens``."""
    sizes = np.asarray(lengths)
    return max(1, -(-int(sizes.sum(dtype=np.int64)) * batch_size // max(len(sizes), 1)))


def count_micro_steps(lengths: Sequence[int] | IntArray, spec: PackingSpec) -> int:
    """Return the micro-steps of every rank and epoch.

    Args:
        lengths: Tokens a sample, in dataset order.
        spec: Of the run.

    Raises:
        DataError: If there is no sample to train on.
    """
    sizes = _sizes(lengths)
    return _count(sizes, spec, sizes[stable_order(int(sizes.max()) - sizes)] if spec.mode == "budget" else sizes)


def _count(sizes: IntArray, spec: PackingSpec, longest_first: IntArray) -> int:
    if spec.mode == "budget":
        return _count_filled(longest_first, capacity=_capacity(spec), num_ranks=spec.num_ranks, seed=_words(spec, 0))
    return -(-len(sizes) // (spec.num_ranks * spec.batch_size))


def surely_fits(lengths: Sequence[int] | IntArray, spec: PackingSpec) -> bool:
    """Say whether every epoch can be planned, without planning it; False says nothing.

    Only a cap in exact mode can be broken. A sample finds no seat only if every seat has less room than it is long,
    so that it is enough to look at the longest samples there are, all in one step.

    Args:
        lengths: Tokens a sample.
        spec: Of the run.
    """
    if spec.mode != "exact" or spec.max_tokens is None:
        return True
    longest_first = np.sort(_sizes(lengths))[::-1]
    last = count_micro_steps(lengths, spec) % spec.accumulation or spec.accumulation
    for micro_steps in {spec.accumulation, last}:
        num_seats = micro_steps * spec.num_ranks
        held = int(longest_first[: num_seats * spec.batch_size].sum())
        if held + (num_seats - 1) * int(longest_first[0]) >= num_seats * (spec.max_tokens + 1):
            return False
    return True


def plan(
    lengths: Sequence[int] | IntArray,
    spec: PackingSpec,
    *,
    epoch: int = 0,
    order: IntArray | None = None,
    num_micro_steps: int | None = None,
) -> Plan:
    """Plan the batches of every rank for one epoch.

    Args:
        lengths: Tokens a sample, in dataset order.
        spec: Of the run.
        epoch: From 0; with the seed it fixes what is left to chance.
        order: The plain run's order of samples in this epoch, used in exact mode; None: a shuffle of our own.
        num_micro_steps: What :func:`count_micro_steps` returns for these arguments; None: count.

    Returns:
        A plan in which every sample has one seat and all ranks have the same number of micro-steps.

    Raises:
        DataError: If there is no sample, or if samples or steps do not fit ``max_tokens`` in exact mode.
    """
    sizes = _sizes(lengths)
    if spec.mode == "exact":
        if order is None:
            order = np.random.default_rng(_words(spec, epoch)).permutation(len(sizes))
        count = _count(sizes, spec, sizes) if num_micro_steps is None else num_micro_steps
        kept = np.asarray(order)[: count * spec.num_ranks * spec.batch_size]
        seats = _seat_exactly(sizes, kept, spec, epoch, count)
        return _assemble(sizes, kept, seats, spec, count)
    longest_first = stable_order(int(sizes.max()) - sizes)
    sorted_sizes = sizes[longest_first]
    seats, count = fill(
        sorted_sizes,
        spec.cost.of(sorted_sizes),
        capacity=_capacity(spec),
        num_ranks=spec.num_ranks,
        num_micro_steps=num_micro_steps,
        seed=_words(spec, epoch),
        first_seed=_words(spec, 0),
    )
    return _assemble(sizes, longest_first, seats, spec, count)


def _sizes(lengths: Sequence[int] | IntArray) -> IntArray:
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) == 0:
        raise DataError("there is no sample to train on; see the data table for why rows were dropped")
    return np.maximum(sizes, 1)


def _words(spec: PackingSpec, epoch: int) -> list[int]:
    return [spec.seed & _WORD, epoch]


def _capacity(spec: PackingSpec) -> int:
    if spec.max_tokens is None:
        raise ValueError("budget mode needs max_tokens; mean_tokens gives the default")
    return min(spec.max_tokens, _MOST_TOKENS)


def _seat_exactly(sizes: IntArray, order: IntArray, spec: PackingSpec, epoch: int, count: int) -> IntArray:
    """Return the seat of each sample of ``order``; whole steps first, then the incomplete last one."""
    costs, lengths = spec.cost.of(sizes)[order], sizes[order]
    whole = count // spec.accumulation
    per_step = spec.accumulation * spec.num_ranks * spec.batch_size
    rng = np.random.default_rng([*_words(spec, epoch), 1])
    # the last step may lack samples, micro-steps, or both
    whole = min(whole, len(order) // per_step)
    parts = []
    for first, steps, micro_steps in (
        (0, whole, spec.accumulation),
        (whole, 1, count - whole * spec.accumulation),
    ):
        rows = slice(first * per_step, min((first + steps) * per_step, len(order)))
        if steps == 0 or micro_steps == 0:
            continue
        shape = (steps, (rows.stop - rows.start) // steps)
        seats = seat_steps(
            costs[rows].reshape(shape),
            num_ranks=spec.num_ranks,
            num_micro_steps=micro_steps,
            rng=rng,
            lengths=lengths[rows].reshape(shape),
            max_tokens=spec.max_tokens,
        )
        unseated = np.flatnonzero((seats < 0).any(axis=1))
        if len(unseated):
            step = int(unseated[0])
            _refuse(lengths[rows].reshape(shape)[step], spec, epoch, first + step, micro_steps * spec.num_ranks)
        base = (first + np.arange(steps)) * spec.accumulation * spec.num_ranks
        parts.append((seats + base[:, None]).reshape(-1))
    return np.concatenate(parts)


def _refuse(lengths: IntArray, spec: PackingSpec, epoch: int, step: int, num_seats: int) -> None:
    total = int(lengths.sum())
    # enough for longest-first: no seat is above the mean by more than the longest sample
    enough = min(total, -(-total // num_seats) + int(lengths.max()))
    raise DataError(
        f"--multipack mode=exact max_tokens={spec.max_tokens}: optimizer step {step} of epoch {epoch} holds "
        f"{total} tokens in {len(lengths)} samples (longest {int(lengths.max())}), which do not fit its "
        f"{num_seats} seats. Raise max_tokens ({enough} is enough for this step), raise gradient_accumulation_steps "
        "and lower per_device_train_batch_size, or use mode=budget"
    )


def _assemble(sizes: IntArray, order: IntArray, seats: IntArray, spec: PackingSpec, count: int) -> Plan:
    num_seats = count * spec.num_ranks
    arranged = stable_order(seats)
    costs = spec.cost.of(sizes[order])
    offsets = np.zeros(num_seats + 1, dtype=np.int64)
    np.cumsum(np.bincount(seats, minlength=num_seats), out=offsets[1:])
    num_steps = -(-count // spec.accumulation)
    longest = np.zeros(num_steps, dtype=np.int64)
    np.maximum.at(longest, seats // (spec.num_ranks * spec.accumulation), costs)
    # float64 sums of whole numbers below 2**53 are exact
    tokens, work = (
        np.bincount(seats, weights=values, minlength=num_seats).astype(np.int64).reshape(count, spec.num_ranks)
        for values in (sizes[order], costs)
    )
    return Plan(
        order=order[arranged].astype(np.int32 if len(sizes) < 1 << 31 else np.int64),
        offsets=offsets,
        seat_tokens=tokens,
        seat_costs=work,
        longest_costs=longest,
        accumulation=spec.accumulation,
        max_tokens=spec.max_tokens,
    )
