"""What one sample costs to train: ``linear * L + quadratic * L**2`` for a sample of ``L`` tokens.

The linear part is matrix products with the weights, the quadratic part is attention. Both are counted in floating
point operations of forward and backward, from the numbers in a model's ``config.json``:

- weights: a forward costs 2 operations a parameter and token, the gradient of the input as many again, and the
  gradient of the weights as many again (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). So 6 a parameter and token
  when all weights train, and 4 when they are frozen under adapters, whose own work is left out as it is below 2 %;
- attention: ``Q K^T`` and ``P V`` are 4 operations a pair of tokens, head and channel, and a causal mask halves the
  pairs: ``2 * heads * head_dim * L**2`` a layer forward. A flash backward has 5 products where the forward has 2
  (Dao 2023, arXiv:2307.08691, section 4.1): 2.5 times the forward, adapters or not. So ``7 * heads * head_dim``.

A token's embedding is a look-up and costs nothing; the head is a product and counts. Of a mixture of experts only the
experts that a token visits count. Recomputation of activations adds one forward to both parts and changes their ratio
by 4 % only; a sliding window is not modelled, so attention beyond it is counted too high.

Costs are whole numbers, so that sums do not depend on the order or on the instruction set of the machine that adds
them up: every rank plans for itself, and all must come to the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TOKENS", "UNIT", "Cost", "MissingShapeError", "from_shape"]

# parts of a token; a seat of 2**30 tokens of quadratic cost still adds up below 2**53
UNIT = 1024

_FULL, _FROZEN = 6, 4
_ATTENTION = 7
# gate, up and down
_MLP_MATRICES = 3


class MissingShapeError(ValueError):
    """A shape lacks a number without which no cost can be told; ``str`` of it is the name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work of a sample of ``L`` tokens, in tokens of linear work: ``L + ratio * L**2``.

    Attributes:
        ratio: Quadratic over linear work of one token; 0: tokens alone count.
    """

    ratio: float

    def of(self, lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the work of samples of these lengths, in 1 / :data:`UNIT` of a token, as a new array."""
        tokens = lengths.astype(np.float64)
        return np.rint((tokens + self.ratio * tokens * tokens) * UNIT).astype(np.int64)


TOKENS = Cost(ratio=0.0)


def from_shape(shape: Mapping[str, Any]) -> Cost:
    """Return the cost model of a decoder.

    Args:
        shape: ``layers``, ``hidden``, ``heads`` and ``vocab`` are required. ``kv_heads`` defaults to ``heads``,
            ``head_dim`` to ``hidden / heads``, ``intermediate`` to ``4 * hidden``. A mixture of experts gives
            ``experts_per_token`` and the width of one expert, ``expert_intermediate``, and may give the width of
            experts every token visits, ``shared_intermediate``. ``trainable`` is ``"full"`` (default) or ``"lora"``.

    Raises:
        MissingShapeError: If a required number is missing, None or 0.
    """
    layers, hidden, heads, vocab = (_number(shape, name) for name in ("layers", "hidden", "heads", "vocab"))
    head_dim = shape.get("head_dim") or hidden // heads
    kv_heads = shape.get("kv_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    if shape.get("experts_per_token"):
        width = shape["experts_per_token"] * _number(shape, "expert_intermediate")
        width += shape.get("shared_intermediate") or 0
    else:
        width = shape.get("intermediate") or 4 * hidden
    parameters = layers * (attention + _MLP_MATRICES * hidden * width) + hidden * vocab
    linear = (_FULL if shape.get("trainable", "full") == "full" else _FROZEN) * parameters
    return Cost(ratio=_ATTENTION * layers * heads * head_dim / linear)


def _number(shape: Mapping[str, Any], name: str) -> int:
    value = shape.get(name)
    if not value:
        raise MissingShapeError(name)
    return int(value)
