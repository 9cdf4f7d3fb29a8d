"""Root-mean-square norm over the last dimension, forward and backward.

Forward, a row ``x`` of width ``D``, weight ``w``::

    r = 1 / sqrt(mean(x^2) + eps)        x_hat = x * r        y = (offset + w) * x_hat

Backward, ``g = dy * (offset + w)``::

    dx = r * (g - x_hat * mean(g * x_hat))        dw = sum over rows of dy * x_hat

Two conventions exist. Llama rounds ``x_hat`` to the dtype of ``x`` before it multiplies by ``w``
(``cast_before_weight=True``), and its result has the promoted dtype of both. Gemma (``offset=1``), OLMo 2 and GPT-OSS
multiply in fp32 and round once, to the dtype of ``x``. All sums are fp32.

Only ``r`` is saved beside the inputs: 4 bytes a row. Five passes over memory are needed (read x, write y; read x and
dy, write dx), and these kernels make five: a row stays in registers between its reduction and its use. ``dw`` is
summed by a fixed set of persistent programs in registers, written as one fp32 row a program, and added up in a fixed
order, so it is the same in every run; the alternative, atomics into one row, is neither deterministic nor faster.

Reference: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tuning.kernels import reference
from tuning.kernels._launch import (
    MAX_ROW,
    as_rows,
    can_launch,
    device_guard,
    like_rows,
    num_programs,
    num_warps,
    row_order,
)

__all__ = ["rms_norm"]


class Launch(NamedTuple):
    """Launch parameters, a sweep's subject.

    Attributes:
        rows: Rows a program holds at once.
        warps: Warps a program.
        programs: Resident programs a multiprocessor; the backward only.
        stages: Software-pipelining depth of the row loop; the backward only.
    """

    rows: int
    warps: int
    programs: int = 1
    stages: int = 1


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_fwd_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    x_row_stride,
    num_rows,
    eps,
    OFFSET: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid_row = tl.program_id(0).to(tl.int64)
    rows = pid_row * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_D)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (cols < D)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32) + OFFSET
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    x_hat = x * rstd[:, None]
    if CAST_BEFORE_WEIGHT:
        x_hat = x_hat.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = x_hat * w[None, :]
    tl.store(y_ptr + rows[:, None] * D + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_partial_ptr,
    dy_row_stride,
    x_row_stride,
    num_rows,
    OFFSET: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    row_offsets = tl.arange(0, BLOCK_R).to(tl.int64)
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32) + OFFSET
    dw = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for block in tl.range(pid, tl.cdiv(num_rows, BLOCK_R), tl.num_programs(0), num_stages=STAGES):
        rows = block * BLOCK_R + row_offsets
        row_mask = rows < num_rows
        mask = row_mask[:, None] & (cols < D)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        x_hat = x * rstd[:, None]
        if WEIGHT_GRAD:
            dw += dy * x_hat
        g = dy * w[None, :]
        mean = tl.sum(g * x_hat, axis=1) / D
        dx = rstd[:, None] * (g - x_hat * mean[:, None])
        tl.store(dx_ptr + rows[:, None] * D + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if WEIGHT_GRAD:
        pid_long = pid.to(tl.int64)
        tl.store(dw_partial_ptr + pid_long * D + cols, tl.sum(dw, axis=0), mask=cols < D)


@triton.jit(do_not_specialize=["num_partials"])
def _rms_norm_bwd_sum_kernel(
    dw_partial_ptr, dw_ptr, num_partials, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_P, BLOCK_D], dtype=tl.float32)
    for start in range(0, num_partials, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P).to(tl.int64)
        mask = (rows < num_partials)[:, None] & (cols < D)[None, :]
        total += tl.load(dw_partial_ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(total, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < D)


def _forward_launch(width: int) -> Launch:
    block_width = triton.next_power_of_2(width)
    # 4,096 elements a program: narrow rows share one
    block_rows = max(1, min(32, 4096 // block_width))
    return Launch(block_rows, num_warps(block_rows * block_width, 32))


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    *,
    cast_before_weight: bool,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``y`` in the memory order of ``x`` and fp32 ``r``, one a row in that order."""
    width = x.shape[-1]
    order = row_order(x)
    rows = as_rows(x, order)
    num_rows = rows.shape[0]
    dtype = torch.promote_types(x.dtype, weight.dtype) if cast_before_weight else x.dtype
    y = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        launch = launch or _forward_launch(width)
        with device_guard(x):
            _rms_norm_fwd_kernel[(triton.cdiv(num_rows, launch.rows),)](
                rows,
                weight,
                y,
                rstd,
                rows.stride(0),
                num_rows,
                eps,
                OFFSET=offset,
                CAST_BEFORE_WEIGHT=cast_before_weight,
                D=width,
                BLOCK_R=launch.rows,
                BLOCK_D=triton.next_power_of_2(width),
                num_warps=launch.warps,
            )
    return like_rows(y, x.shape, order), rstd


def _backward_launch(width: int) -> Launch:
    block_width = triton.next_power_of_2(width)
    # sweep on H200, scripts/bench/rms_norm.py, 2026-12-01: 16,384 x 4,096 and 655,360 x 128
    if block_width >= 1024:
        return Launch(max(1, 8192 // block_width), 8, 1, 3)
    return Launch(max(1, min(16, 4096 // block_width)), 4, 4, 3)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    *,
    weight_grad: bool,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``dx`` in the memory order of ``x`` and ``dw`` in the dtype of the weight (empty if not asked for)."""
    width = x.shape[-1]
    order = row_order(x)
    rows, dy_rows = as_rows(x, order), as_rows(dy, order)
    num_rows = rows.shape[0]
    dx = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if not num_rows:
        return like_rows(dx, x.shape, order), torch.zeros_like(weight) if weight_grad else weight.new_empty(0)
    block_width = triton.next_power_of_2(width)
    launch = launch or _backward_launch(width)
    programs = min(num_programs(x, launch.programs), triton.cdiv(num_rows, launch.rows))
    partial = torch.empty((programs if weight_grad else 0, width), dtype=torch.float32, device=x.device)
    dw = torch.empty_like(weight) if weight_grad else weight.new_empty(0)
    with device_guard(x):
        _rms_norm_bwd_kernel[(programs,)](
            dy_rows,
            rows,
            weight,
            rstd,
            dx,
            partial,
            dy_rows.stride(0),
            rows.stride(0),
            num_rows,
            OFFSET=offset,
            WEIGHT_GRAD=weight_grad,
            D=width,
            BLOCK_R=launch.rows,
            BLOCK_D=block_width,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
        if weight_grad:
            _rms_norm_bwd_sum_kernel[(triton.cdiv(width, 32),)](
                partial, dw, programs, D=width, BLOCK_P=64, BLOCK_D=32, num_warps=4
            )
    return like_rows(dx, x.shape, order), dw


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, cast_before_weight):
        y, rstd = _forward(x, weight, eps, offset, cast_before_weight=cast_before_weight)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        weight_grad = ctx.needs_input_grad[1]
        dx, dw = _backward(dy, x, weight, rstd, ctx.offset, weight_grad=weight_grad)
        return dx if ctx.needs_input_grad[0] else None, dw if weight_grad else None, None, None, None


@torch.library.custom_op("packtune::rms_norm", mutates_args=())
def _rms_norm_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    cast_before_weight: bool,  # noqa: FBT001 - the schema of an operator
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(x, weight, eps, offset, cast_before_weight=cast_before_weight)


@_rms_norm_op.register_fake
def _(x, weight, eps, offset, cast_before_weight):
    order = row_order(x)
    dtype = torch.promote_types(x.dtype, weight.dtype) if cast_before_weight else x.dtype
    y = x.new_empty((x.numel() // x.shape[-1], x.shape[-1]), dtype=dtype)
    return like_rows(y, x.shape, order), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@torch.library.custom_op("packtune::rms_norm_backward", mutates_args=())
def _rms_norm_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    weight_grad: bool,  # noqa: FBT001 - the schema of an operator
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(dy, x, weight, rstd, offset, weight_grad=weight_grad)


@_rms_norm_backward_op.register_fake
def _(dy, x, weight, rstd, offset, weight_grad):
    dx = x.new_empty((x.numel() // x.shape[-1], x.shape[-1]))
    return like_rows(dx, x.shape, row_order(x)), torch.empty_like(weight) if weight_grad else weight.new_empty(0)


def _setup_context(ctx, inputs, output):
    x, weight, _, offset, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.offset = offset


def _op_backward(ctx, dy, _drstd):
    x, weight, rstd = ctx.saved_tensors
    weight_grad = ctx.needs_input_grad[1]
    dx, dw = torch.ops.packtune.rms_norm_backward(dy, x, weight, rstd, ctx.offset, weight_grad)
    return dx, dw if weight_grad else None, None, None, None


_rms_norm_op.register_autograd(_op_backward, setup_context=_setup_context)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    cast_before_weight: bool = True,
) -> torch.Tensor:
    """Normalise the last dimension of ``x`` by its root mean square and scale it by ``offset + weight``.

    Args:
        x: ``[..., D]``, fp32, bf16 or fp16, any strides; ``D`` at most 65,536.
        weight: ``[D]``.
        eps: Added to the mean square.
        offset: Added to the weight: 0 (Llama) or 1 (Gemma).
        cast_before_weight: Round the normalised row to the dtype of ``x`` before the product (Llama).

    Returns:
        A new tensor of the shape of ``x``, in its memory order; shares nothing.

    Raises:
        ValueError: If ``weight`` is not ``[D]``, or ``D`` is 0 or too large for one program.
    """
    if weight.shape != x.shape[-1:] or not 0 < x.shape[-1] <= MAX_ROW:
        raise ValueError(
            f"rms_norm needs a weight as wide as the rows and rows of 1 to {MAX_ROW}; "
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
        )
    if not can_launch(x):
        return reference.rms_norm(x, weight, eps, offset=offset, cast_before_weight=cast_before_weight)
    if torch.compiler.is_compiling():
        return torch.ops.packtune.rms_norm(x, weight, eps, offset, cast_before_weight)[0]
    return _RMSNorm.apply(x, weight, eps, offset, cast_before_weight)
