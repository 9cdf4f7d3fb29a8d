"""Attention as its formula says it, on one T x T matrix: what every provider is compared with."""

from __future__ import annotations

import torch

from tuning.attention.variant import Variant


def allowed_pairs(lengths: list[int], window: int | None) -> torch.Tensor:
    """Return which token (row) may see which (column), [T, T]."""
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.arange(sum(lengths))
    behind = position[:, None] - position[None, :]
    allowed = (sample[:, None] == sample[None, :]) & (behind >= 0)
    return allowed if window is None else allowed & (behind < window)


def attend_dense(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, lengths: list[int], variant: Variant
) -> torch.Tensor:
    """Return [T, H, D of v] in the dtype of the queries, computed in float64."""
    groups = q_THD.shape[1] // k_TKD.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q_THD, k_TKD, v_TKD))
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if variant.scale is None else variant.scale)
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.masked_fill(~allowed_pairs(lengths, variant.window).to(scores.device), float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1).to(q_THD.dtype)


def random_qkv(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 8,
    value_width: int | None = None,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries, keys and values that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width or width))
    return tuple(  # type: ignore[return-value]
        torch.randn(sum(lengths), *shape, generator=generator).requires_grad_() for shape in shapes
    )


def boundaries(lengths: list[int]) -> torch.Tensor:
    """Return where samples start, and T: int32, [N + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
