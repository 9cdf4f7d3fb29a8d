"""Counts of a run: kept on the device while it trains, reduced over ranks and read only when a line is logged.

One vector holds every sum, so that a log line costs one collective and one wait for the device, whatever is in it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["COUNTS", "Counts", "Meter", "Stopwatch", "render_summary"]

# order of the vector on the device
COUNTS = ("nll_sum", "supervised", "correct", "entropy_sum", "real", "slots", "aux_loss", "micro_steps", "idle")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Sums over ranks and micro-steps since the last reading.

    Attributes:
        nll_sum: Loss summed over supervised tokens.
        supervised: Tokens that were trained on.
        correct: Supervised tokens that were predicted right.
        entropy_sum: Entropy of the predictions, summed over supervised tokens.
        real: Tokens of samples.
        slots: Tokens that were computed, padding included.
        aux_loss: Auxiliary losses, summed over micro-steps.
        micro_steps: Micro-steps, summed over ranks.
        idle: Micro-steps of optimizer steps in which no rank had a token to train on.
    """

    nll_sum: float = 0.0
    supervised: float = 0.0
    correct: float = 0.0
    entropy_sum: float = 0.0
    real: float = 0.0
    slots: float = 0.0
    aux_loss: float = 0.0
    micro_steps: float = 0.0
    idle: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss a supervised token; NaN if there was none."""
        return self.nll_sum / self.supervised if self.supervised else math.nan

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that was padding, 0 to 1."""
        return 1.0 - self.real / self.slots if self.slots else 0.0

    def plus(self, other: Counts) -> Counts:
        """Return the sum of two readings."""
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in COUNTS})


class Meter:
    """Accumulates :data:`COUNTS` on one device without waiting for it.

    Args:
        device: Where the sums live.
    """

    def __init__(self, device: torch.device) -> None:
        # float64: counts of tokens stay exact beyond 2**24
        self._on_device = torch.zeros(len(COUNTS), dtype=torch.float64, device=device)
        self._on_host = [0.0] * len(COUNTS)

    def add(self, **values: torch.Tensor | float | None) -> None:
        """Add one micro-step. Tensors are scalars on the meter's device; numbers never leave the host; None is 0.

        Args:
            **values: By name of :data:`COUNTS`.
        """
        for name, value in values.items():
            index = COUNTS.index(name)
            if isinstance(value, torch.Tensor):
                self._on_device[index] += value.detach()
            elif value is not None:
                self._on_host[index] += value

    def read(self, accelerator: Accelerator) -> Counts:
        """Return the sums over all ranks and start again from zero: one collective, one wait.

        Args:
            accelerator: Of the trainer; every rank must call.
        """
        sums = self._on_device + torch.tensor(self._on_host, dtype=torch.float64).to(self._on_device.device)
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, reduction="sum")
        values = sums.tolist()
        self._on_device.zero_()
        self._on_host = [0.0] * len(COUNTS)
        return Counts(**dict(zip(COUNTS, values, strict=True)))


class Stopwatch:
    """Wall time spent training: runs from :meth:`start`, and stops while the run evaluates or saves."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._elapsed = 0.0

    def start(self) -> None:
        """Start or go on; harmless when it runs."""
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """Stop; harmless when it stands."""
        if self._started is not None:
            self._elapsed += time.perf_counter() - self._started
            self._started = None

    def lap(self) -> float:
        """Return the seconds since the last lap and start a new one; goes on running if it ran."""
        running = self._started is not None
        self.stop()
        elapsed, self._elapsed = self._elapsed, 0.0
        if running:
            self.start()
        return elapsed


def render_summary(rows: dict[str, Any]) -> str:
    """Return the summary of a run as two aligned columns; None values are left out."""
    shown = {key: value for key, value in rows.items() if value is not None}
    width = max(len(key) for key in shown)
    return "\n".join(f"{key.ljust(width)}  {value}" for key, value in shown.items())
