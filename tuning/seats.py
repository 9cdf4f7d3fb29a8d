"""The values that plugins put into the trainer: collator, batch sampler, loss, callbacks.

Both sides know these types and nothing of each other: the acceleration room fills the seats, the trainer sits on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import Sampler
    from transformers import TrainerCallback

__all__ = ["Collator", "Loss", "LossTerms", "Seats"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """What a loss makes of one micro-batch. All tensors stay on the device; nothing here may wait for it.

    Attributes:
        nll_sum: Differentiable fp32 scalar: the loss summed (never averaged) over the supervised tokens.
        num_tokens: Supervised tokens (labels not -100 after the causal shift), integer scalar tensor.
        entropy_sum: Summed entropy of the predictions at supervised tokens, or None if it was not computed.
        num_correct: Supervised tokens whose arg-max is the label, or None if it was not computed.
        aux_loss: Differentiable mean auxiliary loss of a mixture of experts, or None.
    """

    nll_sum: torch.Tensor
    num_tokens: torch.Tensor
    entropy_sum: torch.Tensor | None = None
    num_correct: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


class Loss(Protocol):
    """The loss seat: runs the model's forward on one batch and sums its loss.

    ``model`` may be wrapped (DDP, FSDP, peft): call it, do not reach through it, or hooks are skipped.
    """

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> LossTerms:
        """Return the terms of one micro-batch; ``inputs`` holds ``labels`` and the model's keyword arguments."""
        ...


class Collator(Protocol):
    """Samples to batch. A sample is ``{"input_ids": [...], "labels": [...]}``, equally long, labels masked by -100."""

    def __call__(self, samples: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward for these samples."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Seats:
    """What the plugins of a run put into its trainer.

    Attributes:
        collator: Makes batches of samples.
        batch_sampler: This rank's training batches, or None for the trainer's own.
        loss: Loss of one batch, or None for the trainer's own.
        callbacks: Trainer callbacks, in plugin order.
    """

    collator: Collator
    batch_sampler: Sampler[list[int]] | None = None
    loss: Loss | None = None
    callbacks: tuple[TrainerCallback, ...] = ()
