"""flex_attention: the provider of the GPU for what no flash kernel has: softcap, sinks, fp32, odd head widths.

Torch compiles the rule "same sample, not ahead, inside the window" into its own kernel. It also wants to know which
blocks of 128 x 128 scores hold anything. Inside a flattened batch these are one run of blocks for each block of
queries, from the first token it sees to itself, so the lists follow from the boundaries alone: no T x T mask is made to
find them, and nothing is read back from the device. They are made once a batch and window, and all layers share them.

Sinks need no support in the kernel: with ``l`` the log-sum-exp of a row, adding a sink ``s`` to the softmax scales the
row by ``sigmoid(l - s)``.

Compiling takes seconds at first use, once for each :class:`_Kind` of layer and for all lengths. Three traps of the
compiler decide the form of this file:

- It counts compilations by code object, and after eight runs the function uncompiled, on a T x T matrix. So each kind
  gets a code object of its own, and a function that finds itself uncompiled raises.
- With dynamic lengths it makes every Python number a symbol, and a symbolic float cannot be captured by a rule. Text is
  constant to it, so numbers of the rules go in as text.
- Dynamic sizes that are equal in the first batch count as equal for ever, by chance as well; torch's own advice is an
  option of its compiler (``use_duck_shape``), set here while a kind may be compiled.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental import _config as _symbols
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tuning.attention.variant import Kernel, Variant
from tuning.errors import UnsupportedError

__all__ = ["FlexKernel", "list_blocks", "load_flex"]

_BLOCK = 128  # flex_attention's own default
# smallest head width of the compiled kernel, which wants powers of two
_MIN_WIDTH = 16

_flex: Callable[..., Any] = flex_attention  # its overloads leave no room for options that are variables
_Backend = str | Callable[..., Any] | None
_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """What a compilation of its own is made for; equal kinds share one.

    Attributes:
        scale: Factor on the scores.
        softcap: As in :class:`~tuning.attention.variant.Variant`.
        windowed: There is a window; its length is in the mask.
        with_lse: The log-sum-exp is wanted as well.
        heads: Of queries, and of keys and values.
        width: Head width, padded.
        dtype: Of queries, keys and values.
        device: Of all.
        gradients: Whether gradients are on, and which of queries, keys and values want them.
        short: One block of tokens or less; the compiler asks for this itself.
    """

    scale: float
    softcap: float | None
    windowed: bool
    with_lse: bool
    heads: tuple[int, int]
    width: int
    dtype: torch.dtype
    device: torch.device
    gradients: tuple[bool, ...]
    short: bool


def load_flex() -> Kernel:
    """Return a kernel with lists of blocks of its own; compilations are shared by the process."""
    return FlexKernel()


class FlexKernel:
    """A :class:`~tuning.attention.variant.Kernel` on ``flex_attention``.

    Args:
        backend: Of ``torch.compile``; None runs the rule unfused on a T x T matrix. Others than the default are for
            tests on the CPU.
    """

    def __init__(self, *, backend: _Backend = "inductor") -> None:
        self._backend = backend
        self._cu_seqlens: torch.Tensor | None = None
        self._version = -1
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
        padded = max(_MIN_WIDTH, 1 << (max(width, value_width) - 1).bit_length())
        q, k, v = (_widen(x, padded).transpose(0, 1).unsqueeze(0) for x in (q_THD, k_TKD, v_TKD))
        kind = _Kind(
            scale=width**-0.5 if variant.scale is None else variant.scale, softcap=variant.softcap,
            windowed=variant.window is not None, with_lse=variant.sinks is not None,
            heads=(q.shape[1], k.shape[1]), width=padded, dtype=q.dtype, device=q.device,
            gradients=(torch.is_grad_enabled(), *(x.requires_grad for x in (q, k, v))), short=tokens <= _BLOCK,
        )  # fmt: skip
        for x in (q, k, v):
            torch._dynamo.mark_static(x, [0, 1, 3])
        blocks = self._blocks_of(cu_seqlens, tokens, variant.window)
        with _symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # torch adds it when it is imported
            out, lse = _attend_of(kind, self._backend)(q, k, v, blocks)
        if variant.sinks is not None and lse is not None:
            out = (out * torch.sigmoid(lse - variant.sinks.to(lse.dtype)[None, :, None])[..., None]).to(out.dtype)
        return out[0, ..., :value_width].transpose(0, 1)

    def _blocks_of(self, cu_seqlens: torch.Tensor, tokens: int, window: int | None) -> BlockMask:
        """Return the blocks of this batch and window, listed at its first layer.

        Boundaries may be written over in place, which counts up a tensor's version; those of inference mode have none.
        """
        version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
        if self._cu_seqlens is not cu_seqlens or version != self._version or version < 0:
            self._cu_seqlens, self._version, self._blocks = cu_seqlens, version, {}
        if window not in self._blocks:
            self._blocks[window] = list_blocks(cu_seqlens, tokens, window)
        return self._blocks[window]


@functools.cache  # a compilation is the process's in any case: torch keeps it with the code object
def _attend_of(kind: _Kind, backend: _Backend) -> _Attend:
    """Return the function that attends for ``kind``, compiled at its first call."""
    score_mod = None if kind.softcap is None else _softcap_rule(repr(kind.softcap))
    scale, is_grouped, with_lse = repr(kind.scale), kind.heads[0] != kind.heads[1], kind.with_lse
    compiled = backend is not None

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if compiled and not torch.compiler.is_compiling():
            raise UnsupportedError(
                "flex_attention was to run compiled, but torch.compile is switched off or gave up, and uncompiled it "
                "would make a matrix of the squared batch. Let torch.compile work (TORCH_COMPILE_DISABLE, "
                "TORCHDYNAMO_DISABLE unset), or train without --padding_free."
            )
        result = _flex(
            q, k, v, score_mod=score_mod, block_mask=block_mask, scale=float(scale), enable_gqa=is_grouped,
            return_aux=AuxRequest(lse=True) if with_lse else None,
            # short batches would get another kernel, so the self-test would test what training does not run
            kernel_options={"BACKEND": "TRITON"},
        )  # fmt: skip
        return (result[0], result[1].lse) if with_lse else (result, None)

    if backend is None:
        return attend
    own: _Attend = torch.compile(
        _with_own_code(attend, f"flex_{_label(kind)}"), dynamic=True, fullgraph=True, backend=backend
    )
    return own


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``x`` with zeros up to ``width``; by itself ``pad`` copies even where there is nothing to add."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def _label(kind: _Kind) -> str:
    """Return a name for ``kind`` that no other has."""
    return "_".join(str(getattr(kind, name)) for name in kind.__slots__)


def _with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function`` with a code object of its own, since the compiler counts and remembers by code object."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


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


def _softcap_rule(softcap: str) -> Callable[..., torch.Tensor]:
    def capped(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        cap = float(softcap)
        return cap * torch.tanh(score / cap)

    return capped
