"""What a plan is worth before anything is trained: its time beside the plain run's, padded and padding-free.

Time is counted in work (``tuning.data.cost``), not in seconds: a micro-step lasts as long as its busiest rank, and an
epoch is the sum of its micro-steps. What work does not see, such as launches, the optimizer and the network, is the
same for all and makes real ratios smaller. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuning.data.packing import PackingSpec, PlanStats, plan

__all__ = ["Simulation", "simulate"]

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """One epoch of a run, in four ways.

    Attributes:
        stats: Of the plan.
        plain_steps: Optimizer steps of the plain run.
        padded: Work that the busiest ranks do when each batch is padded to its longest sample.
        padding_free: The same, computing no padding.
        packed: The same, by the plan.
        ideal: The work of all samples, evenly over the ranks.
    """

    stats: PlanStats
    plain_steps: int
    padded: float
    padding_free: float
    packed: float
    ideal: float

    @property
    def over_padded(self) -> float:
        """How many times as fast as padded."""
        return self.padded / self.packed

    @property
    def over_padding_free(self) -> float:
        """How many times as fast as padding-free alone."""
        return self.padding_free / self.packed


def simulate(
    lengths: Sequence[int] | IntArray, spec: PackingSpec, *, epoch: int = 0, order: IntArray | None = None
) -> Simulation:
    """Plan one epoch and compare it with the plain run.

    Args:
        lengths: Tokens a sample, in dataset order.
        spec: Of the run; its ranks and batch size are the plain run's, too.
        epoch: From 0.
        order: The plain run's order; None: a shuffle of our own.

    Raises:
        DataError: As :func:`tuning.data.packing.plan`.
    """
    if order is None:
        order = np.random.default_rng([spec.seed, epoch, 2]).permutation(len(lengths))
    made = plan(lengths, spec, epoch=epoch, order=order)
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)[order]
    per_micro_step = spec.num_ranks * spec.batch_size
    micro_steps = -(-len(sizes) // per_micro_step)
    padded = np.zeros(micro_steps * per_micro_step, dtype=np.int64)
    padded[: len(sizes)] = sizes
    batches = padded.reshape(micro_steps, spec.num_ranks, spec.batch_size)
    costs = spec.cost.of(batches).astype(np.float64)
    rows = (batches > 0).sum(axis=2)
    return Simulation(
        stats=made.stats(),
        plain_steps=-(-micro_steps // spec.accumulation),
        padded=float((rows * costs.max(axis=2)).max(axis=1).sum()),
        padding_free=float(costs.sum(axis=2).max(axis=1).sum()),
        packed=float(made.seat_costs.max(axis=1).sum()),
        ideal=float(costs.sum() / spec.num_ranks),
    )
