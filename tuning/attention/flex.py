"""flex_attention: the provider of the GPU for what no flash kernel has: softcap, sinks, fp32, odd head widths.

Torch compiles the rule "same sample, not ahead, inside the window" into its own kernel. It also wants to know which
blocks of 128 x 128 scores hold anything. Inside a flattened batch these are one run of blocks for each block of
queries, from the first token it sees to itself, so the lists follow from the boundaries alone: no T x T mask is made to
find them, and nothing is read back from the device. They are made once a batch and window, and all layers share them.

Sinks need no support in the kernel: with ``l`` the log-sum-exp of a row, adding a sink ``s`` to the softmax scales the
row by ``sigmoid(l - s)``.

Compiling takes seconds at first use; lengths are compiled as dynamic, so one compilation serves all batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tuning.attention.variant import Kernel, Variant

__all__ = ["FlexKernel", "list_blocks", "load_flex"]

_BLOCK = 128  # flex_attention's own default
# smallest head width of the compiled kernel, which wants powers of two
_MIN_WIDTH = 16


def load_flex() -> Kernel:
    """Return a kernel with a compilation and a cache of its own."""
    return FlexKernel(compiled=True)


class FlexKernel:
    """A :class:`~tuning.attention.variant.Kernel` on ``flex_attention``.

    Args:
        compiled: False runs the rule unfused on a T x T matrix: for tests on the CPU.
    """

    def __init__(self, *, compiled: bool) -> None:
        plain: Callable[..., Any] = flex_attention
        self._attend = torch.compile(plain, dynamic=True, fullgraph=True) if compiled else plain
        self._cu_seqlens: torch.Tensor | None = None
        self._blocks: dict[int | None, BlockMask] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled in itself; the cache is host work
    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        variant: Variant,
    ) -> torch.Tensor:
        """Return causal attention inside each sample; ``max_seqlen`` is not used, dropout is not supported."""
        tokens, _, width = q_THD.shape
        value_width = v_TKD.shape[-1]
        scale = width**-0.5 if variant.scale is None else variant.scale
        padded = max(_MIN_WIDTH, 1 << (max(width, value_width) - 1).bit_length())
        q, k, v = (
            functional.pad(x, (0, padded - x.shape[-1])).transpose(0, 1).unsqueeze(0) for x in (q_THD, k_TKD, v_TKD)
        )
        with_lse = variant.sinks is not None
        result = self._attend(
            q, k, v,
            score_mod=None if variant.softcap is None else _softcap_rule(variant.softcap),
            block_mask=self._blocks_of(cu_seqlens, tokens, variant.window),
            scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True) if with_lse else None,
        )  # fmt: skip
        out: torch.Tensor = result[0] if with_lse else result
        if variant.sinks is not None:
            lse = result[1].lse
            out = (out * torch.sigmoid(lse - variant.sinks.to(lse.dtype)[None, :, None])[..., None]).to(out.dtype)
        return out[0, ..., :value_width].transpose(0, 1)

    def _blocks_of(self, cu_seqlens: torch.Tensor, tokens: int, window: int | None) -> BlockMask:
        """Return the blocks of this batch and window, listed at its first layer."""
        if self._cu_seqlens is not cu_seqlens:
            self._cu_seqlens, self._blocks = cu_seqlens, {}
        if window not in self._blocks:
            self._blocks[window] = list_blocks(cu_seqlens, tokens, window)
        return self._blocks[window]


def list_blocks(cu_seqlens: torch.Tensor, tokens: int, window: int | None) -> BlockMask:
    """Return which blocks of scores are looked at, and the rule inside them.

    Args:
        cu_seqlens: Boundaries, int32, shape [N + 1].
        tokens: T.
        window: As in :class:`~tuning.attention.variant.Variant`.

    Returns:
        A mask of ``ceil(T / 128)`` squared blocks: those a query sees whole, and those it sees in part.
    """
    device = cu_seqlens.device
    sample = torch.searchsorted(cu_seqlens, torch.arange(tokens, device=device, dtype=cu_seqlens.dtype), right=True) - 1
    start = cu_seqlens[sample].long()  # of the sample each token is in
    block = torch.arange(-(-tokens // _BLOCK), device=device)
    first, last = block * _BLOCK, (block * _BLOCK + _BLOCK - 1).clamp(max=tokens - 1)
    seen_from, whole_from = start[first], start[last]
    if window is not None:
        seen_from = torch.maximum(seen_from, first - window + 1)
        whole_from = torch.maximum(whole_from, last - window + 1)
    lowest = seen_from // _BLOCK
    whole = torch.minimum((whole_from + _BLOCK - 1) // _BLOCK, block)  # first block that is seen whole
    # in part: the block itself, then those before the whole ones; the rest of each row is not read
    partial = torch.where(block == 0, block[:, None], (lowest[:, None] + block - 1).clamp(max=block.numel() - 1))
    return BlockMask.from_kv_blocks(
        (whole - lowest + 1).int()[None, None], partial.int()[None, None],
        (block - whole).int()[None, None], (whole[:, None] + block).clamp(max=block.numel() - 1).int()[None, None],
        BLOCK_SIZE=_BLOCK, mask_mod=_sample_rule(sample, window), seq_lengths=(tokens, tokens),
    )  # fmt: skip


def _sample_rule(sample: torch.Tensor, window: int | None) -> Callable[..., torch.Tensor]:
    def allowed(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        inside = (q >= k) & (sample[q] == sample[k])
        return inside if window is None else inside & (q - k < window)

    return allowed


def _softcap_rule(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
