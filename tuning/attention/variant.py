"""What a layer adds to plain causal attention, and the signature every provider's kernel has.

Shapes: ``T`` tokens of the flattened batch, ``H`` query heads, ``K`` key/value heads (``H`` is a multiple of ``K``),
``D`` head width, ``N`` samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["PLAIN", "Kernel", "Variant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The rules of one attention layer beside causality.

    Attributes:
        window: A token sees itself and ``window - 1`` tokens before it; None sees the whole sample.
        scale: Factor on the scores; None is ``1 / sqrt(D)``.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; None leaves them.
        sinks: One learned score a query head, shape [H], that takes part in the softmax and carries no value; or None.
        dropout: Probability of dropping an attention weight.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0


PLAIN = Variant()


class Kernel(Protocol):
    """Causal attention inside each sample of a flattened batch."""

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        variant: Variant,
    ) -> torch.Tensor:
        """Return the attention output, a new tensor of shape [T, H, D of v].

        Args:
            q_THD: Queries.
            k_TKD: Keys.
            v_TKD: Values.
            cu_seqlens: Where each sample starts, and T at the end: int32, shape [N + 1]. An empty sample is allowed.
            max_seqlen: At least the tokens of the longest sample.
            variant: The layer's rules.
        """
        ...
