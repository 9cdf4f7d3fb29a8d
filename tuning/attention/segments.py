"""Attention sample by sample: the provider of the CPU, and the specification of all others.

Each sample is a slice, and torch's own fused kernel (``scaled_dot_product_attention``, causal, no mask) runs on it, so
the work is the sum of squared lengths and nothing of size T x T exists. A window is done in blocks of queries that see
a band of keys, so that its memory grows with length x window. Softcap and sinks have no fused kernel on the CPU: they
take the same blocks through a written-out softmax in fp32.

The cost is one kernel call a sample a layer, which a GPU would wait for; there the other providers are used. Slices
come from one ``split``, whose gradient is one concatenation; indexing would add a zero-filled copy of the batch for
each sample.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tuning.attention.variant import Variant

__all__ = ["attend_segments"]

# rows of scores held at once without a fused kernel: 512 rows of 4,096 fp32 scores are 8 MiB a head
_MIN_BLOCK = 512


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the lengths are read on the host: nothing to trace
def attend_segments(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    variant: Variant,
) -> torch.Tensor:
    """Return causal attention inside each sample; see :class:`tuning.attention.variant.Kernel`.

    ``max_seqlen`` is not used. Any device and dtype; on a GPU, reading the lengths waits for it.
    """
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    if len(set(lengths)) == 1:  # equal lengths: one call for all
        return _attend_batch(q_THD, k_TKD, v_TKD, lengths[0], variant)
    parts = zip(*(torch.split(x, lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
    return torch.cat([_attend_batch(q, k, v, q.shape[0], variant) for q, k, v in parts])


def _attend_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, variant: Variant) -> torch.Tensor:
    """Attend inside samples of one length that lie end to end; all of shape [N x length, heads, D]."""
    q, k, v = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # [N, heads, length, D]
    plain = variant.softcap is None and variant.sinks is None
    if plain and (variant.window is None or variant.window >= length):
        out = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=variant.dropout, is_causal=True, scale=variant.scale, enable_gqa=_is_grouped(q, k)
        )
    else:
        out = _attend_blocks(q, k, v, variant)
    return out.transpose(1, 2).flatten(0, 1)


def _attend_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
    """Attend block of queries by block of queries, each to the band of keys it may see."""
    length = q.shape[2]
    window = length if variant.window is None else min(variant.window, length)
    block = max(window, _MIN_BLOCK)
    attend = _attend_fused if variant.softcap is None and variant.sinks is None else _attend_written_out
    outs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        first = max(0, start - window + 1)
        ahead = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        allowed = (ahead >= 0) & (ahead < window)
        outs.append(attend(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], allowed, variant))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, variant: Variant
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, dropout_p=variant.dropout, scale=variant.scale, enable_gqa=_is_grouped(q, k)
    )


def _attend_written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, variant: Variant
) -> torch.Tensor:
    """Softmax over allowed keys with softcap and sinks; the softmax in fp32, as the fused kernels do it."""
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if variant.scale is None else variant.scale
    scores = (
        torch.matmul(q.reshape(q.shape[0], -1, groups, *q.shape[2:]), k.unsqueeze(2).transpose(-1, -2)).float() * scale
    )
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    scores = scores.masked_fill(~allowed, float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.float().view(-1, groups, 1, 1).expand(scores.shape[0], -1, -1, scores.shape[-2], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = functional.dropout(weights, variant.dropout).to(v.dtype)
    return torch.matmul(weights, v.unsqueeze(2)).reshape(q.shape[0], heads, q.shape[2], v.shape[-1])


def _is_grouped(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.shape[1] != k.shape[1]
