"""Adapters: the variable-length kernels of other packages, all called as :class:`tuning.attention.variant.Kernel`.

Each ``load_*`` imports its package and returns a kernel, so nothing is imported before it was chosen. A package that
is installed and does not import raises what its import raised; :mod:`tuning.attention.providers` tells it.
Every kernel here is causal, takes fewer key/value heads as they are, and never asks the device for a value: boundaries
stay a tensor and the longest length is a Python int.

Windows: these packages count the tokens before the query, :class:`~tuning.attention.variant.Variant` counts the query
too, hence the ``- 1``.
"""

from __future__ import annotations

import importlib
import inspect

import torch

from tuning.attention.variant import Kernel, Variant

__all__ = ["load_flash_attn_2", "load_flash_attn_3", "load_flash_attn_4", "load_torch_varlen"]


def load_torch_varlen() -> Kernel:
    """Return ``torch.nn.attention.varlen.varlen_attn``: FlashAttention 2 inside torch.

    torch 2.13 must be told of grouped heads, torch 2.11 takes them as they are and has no such option.
    """
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    must_tell_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor,
        cu_seqlens: torch.Tensor, max_seqlen: int, variant: Variant,
    ) -> torch.Tensor:  # fmt: skip
        options = {"enable_gqa": True} if must_tell_groups and q_THD.shape[1] != k_TKD.shape[1] else {}
        out: torch.Tensor = varlen_attn(
            q_THD, k_TKD, v_TKD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            scale=variant.scale, window_size=(_tokens_before(variant), 0), **options,
        )  # fmt: skip
        return out

    return attend


def load_flash_attn_2() -> Kernel:
    """Return the kernel of the ``flash-attn`` package, version 2."""
    varlen = importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor,
        cu_seqlens: torch.Tensor, max_seqlen: int, variant: Variant,
    ) -> torch.Tensor:  # fmt: skip
        out: torch.Tensor = varlen(
            q_THD, k_TKD, v_TKD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            dropout_p=variant.dropout, softmax_scale=variant.scale, causal=True,
            window_size=(_tokens_before(variant), 0), softcap=variant.softcap or 0.0,
        )  # fmt: skip
        return out

    return attend


def load_flash_attn_3() -> Kernel:
    """Return the kernel of FlashAttention 3 (``flash_attn_interface``), for Hopper."""
    varlen = importlib.import_module("flash_attn_interface").flash_attn_varlen_func

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor,
        cu_seqlens: torch.Tensor, max_seqlen: int, variant: Variant,
    ) -> torch.Tensor:  # fmt: skip
        out = varlen(
            q_THD, k_TKD, v_TKD, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            softmax_scale=variant.scale, causal=True,
            window_size=(_tokens_before(variant), 0), softcap=variant.softcap or 0.0,
        )  # fmt: skip
        return _first(out)

    return attend


def load_flash_attn_4() -> Kernel:
    """Return the kernel of FlashAttention 4 (``flash_attn.cute``), which compiles at first use of each shape class.

    The longest length must be a Python int: given as a tensor it is part of the compiled backward, which is then
    compiled again at every step.
    """
    varlen = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def attend(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor,
        cu_seqlens: torch.Tensor, max_seqlen: int, variant: Variant,
    ) -> torch.Tensor:  # fmt: skip
        out = varlen(
            q_THD, k_TKD, v_TKD, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, softmax_scale=variant.scale, causal=True,
            window_size=(None if variant.window is None else variant.window - 1, None if variant.window is None else 0),
            learnable_sink=variant.sinks,
        )  # fmt: skip
        return _first(out)

    # its autograd function launches kernels that a tracer cannot follow
    disabled: Kernel = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
    return disabled


def _tokens_before(variant: Variant) -> int:
    """Return how many tokens before itself a token sees; -1 means all of them."""
    return -1 if variant.window is None else variant.window - 1


def _first(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the output alone; some versions return the log-sum-exp with it."""
    return out[0] if isinstance(out, tuple) else out
