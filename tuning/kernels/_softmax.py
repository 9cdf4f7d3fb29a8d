"""The row kernel that ``cross_entropy`` and ``linear_cross_entropy`` share: one program reads one row of logits.

``z = softcap * tanh(scale * (x + bias) / softcap)``, or ``scale * (x + bias)`` without a softcap. With
``L = log sum exp z``, label ``y``, smoothing ``e`` and ``V`` columns that count::

    loss = L - (1 - e) z_y - e mean(z)          p = exp(z - L)
    dx   = g * (p - (1 - e) [column = y] - e / V) * scale * (1 - (z / softcap)^2)
    entropy = L - sum(p z)                      correct = (first arg-max of z) = y

The first pass over the row finds ``L`` online (running maximum, rescaled sum), the second writes ``dx``. Together in
one launch the second pass reads mostly from the L2 cache. All arithmetic is fp32, offsets are int64.

Reference for the online sum: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tuning.kernels._launch import device_guard, num_warps

__all__ = ["Launch", "LossOptions", "RowTerms", "softmax_rows_"]


class LossOptions(NamedTuple):
    """What the loss is, as plain numbers.

    Attributes:
        ignore_index: Rows with this label count nothing.
        label_smoothing: Weight of the uniform distribution, 0 to 1.
        logit_scale: Factor on the logits: ``1 / logits_scaling`` (Granite), ``logit_scale`` (Cohere).
        softcap: Bound of the logits (Gemma 2), after the factor; 0 is none.
        vocab_size: Columns that count; columns from there on are padding.
    """

    ignore_index: int
    label_smoothing: float
    logit_scale: float
    softcap: float
    vocab_size: int


class RowTerms(NamedTuple):
    """Results of each row, fp32 ``[T]``; 0 where the label is ignored. The last two are empty unless asked for."""

    loss: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    correct: torch.Tensor


class Launch(NamedTuple):
    """Launch parameters, a sweep's subject.

    Attributes:
        block: Columns a program reads at once.
        warps: Warps a program.
        stages: Software-pipelining depth of both passes.
    """

    block: int
    warps: int
    stages: int


def _launch_of(width: int) -> Launch:
    block = min(8192, triton.next_power_of_2(width))
    return Launch(block, num_warps(block, 16), 2)


@triton.jit
def _logits(row_ptr, bias_ptr, cols, mask, logit_scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    z = tl.load(row_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    z *= logit_scale
    if HAS_SOFTCAP:
        # tanh(u) = 2 * logistic(2 u) - 1
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)
    return z


@triton.jit
def _softmax_rows_kernel(  # noqa: C901 - compile-time branches
    logits_ptr,
    bias_ptr,
    labels_ptr,
    grad_ptr,
    grad_scale_ptr,
    loss_ptr,
    lse_ptr,
    entropy_ptr,
    correct_ptr,
    logits_row_stride,
    grad_row_stride,
    num_cols,
    num_padded_cols,
    ignore_index,
    label_smoothing,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    STATISTICS: tl.constexpr,
    FORWARD: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid_row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + pid_row * logits_row_stride
    label = tl.load(labels_ptr + pid_row)
    counts = label != ignore_index
    if counts:
        in_range = (label >= 0) & (label < num_cols)
        if FORWARD:
            # a label outside the vocabulary makes the loss NaN: it is never read out of bounds, and never silent
            z_label = _logits(row_ptr, bias_ptr, label, in_range, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            z_label = tl.where(in_range, z_label, float("nan"))
            running_max = -float("inf")
            running_sum = 0.0
            weighted_sum = 0.0
            plain_sum = 0.0
            better = 0
            for start in tl.range(0, num_cols, BLOCK, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK)
                mask = cols < num_cols
                z = _logits(row_ptr, bias_ptr, cols, mask, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
                if HAS_SMOOTHING:
                    plain_sum += tl.sum(tl.where(mask, z, 0.0), axis=0)
                if STATISTICS:
                    beats = tl.where(cols < label, z >= z_label, z > z_label) & mask
                    better += tl.sum(beats.to(tl.int32), axis=0)
                z = tl.where(mask, z, -float("inf"))
                new_max = tl.maximum(running_max, tl.max(z, axis=0))
                # rows may start with -inf; exp(-inf - -inf) would be NaN
                shift = tl.where(new_max == -float("inf"), 0.0, new_max)
                e = tl.exp(z - shift)
                rescale = tl.exp(running_max - shift)
                running_sum = running_sum * rescale + tl.sum(e, axis=0)
                if STATISTICS:
                    weighted_sum = weighted_sum * rescale + tl.sum(e * tl.where(e > 0.0, z, 0.0), axis=0)
                running_max = new_max
            lse = running_max + tl.log(running_sum)
            loss = lse - (1.0 - label_smoothing) * z_label
            if HAS_SMOOTHING:
                loss -= label_smoothing * plain_sum / num_cols
            tl.store(loss_ptr + pid_row, loss)
            tl.store(lse_ptr + pid_row, lse)
            if STATISTICS:
                tl.store(entropy_ptr + pid_row, lse - weighted_sum / running_sum)
                tl.store(correct_ptr + pid_row, tl.where(better == 0, 1.0, 0.0))
        else:
            lse = tl.load(lse_ptr + pid_row)
        if BACKWARD:
            # the label's logit was read by every thread above, before any thread writes the row
            tl.debug_barrier()
            scale = tl.load(grad_scale_ptr).to(tl.float32) * logit_scale
            grad_row_ptr = grad_ptr + pid_row * grad_row_stride
            for start in tl.range(0, num_padded_cols, BLOCK, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK)
                mask = cols < num_cols
                z = _logits(row_ptr, bias_ptr, cols, mask, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP)
                d = tl.exp(z - lse) - tl.where(cols == label, 1.0 - label_smoothing, 0.0)
                if HAS_SMOOTHING:
                    d -= label_smoothing / num_cols
                if HAS_SOFTCAP:
                    d *= 1.0 - (z / softcap) * (z / softcap)
                d = tl.where(mask, d * scale, 0.0)
                tl.store(grad_row_ptr + cols, d.to(grad_ptr.dtype.element_ty), mask=cols < num_padded_cols)
    else:
        if FORWARD:
            tl.store(loss_ptr + pid_row, 0.0)
            tl.store(lse_ptr + pid_row, 0.0)
            if STATISTICS:
                tl.store(entropy_ptr + pid_row, 0.0)
                tl.store(correct_ptr + pid_row, 0.0)
        if BACKWARD:
            grad_row_ptr = grad_ptr + pid_row * grad_row_stride
            for start in range(0, num_padded_cols, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], dtype=grad_ptr.dtype.element_ty)
                tl.store(grad_row_ptr + cols, zeros, mask=cols < num_padded_cols)


def softmax_rows_(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    options: LossOptions,
    *,
    bias_V: torch.Tensor | None = None,
    grad_TV: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    lse_T: torch.Tensor | None = None,
    statistics: bool = False,
    launch: Launch | None = None,
) -> RowTerms:
    """Compute the loss of each row, and write its gradient into ``grad_TV`` where given.

    Args:
        logits_TV: Last stride 1. May be the memory of ``grad_TV``, and is then overwritten.
        labels_T: Integers, contiguous.
        options: What the loss is.
        bias_V: Added to the logits, or None.
        grad_TV: Receives the gradient of the logits; columns from ``vocab_size`` on, of which it may have more than
            the logits, get 0. None computes the loss alone.
        grad_scale: fp32 scalar on the device; the gradient is multiplied by it.
        lse_T: ``lse`` of an earlier call: skips the loss and computes the gradient alone.
        statistics: Compute entropy and correctness as well.
        launch: Launch parameters; None takes the measured ones.

    Returns:
        The terms of each row; only ``lse`` is meaningful when ``lse_T`` was given.
    """
    num_rows, width = logits_TV.shape
    forward = lse_T is None

    def rows(*, wanted: bool) -> torch.Tensor:
        return torch.empty(num_rows if wanted else 0, dtype=torch.float32, device=logits_TV.device)

    terms = RowTerms(
        rows(wanted=forward), rows(wanted=True) if lse_T is None else lse_T, rows(wanted=statistics),
        rows(wanted=statistics),
    )  # fmt: skip
    if not num_rows:
        return terms
    launch = launch or _launch_of(width)
    with device_guard(logits_TV):
        _softmax_rows_kernel[(num_rows,)](
            logits_TV,
            logits_TV if bias_V is None else bias_V,
            labels_T,
            logits_TV if grad_TV is None else grad_TV,
            logits_TV if grad_scale is None else grad_scale,
            *terms,
            logits_TV.stride(0),
            0 if grad_TV is None else grad_TV.stride(0),
            options.vocab_size,
            width if grad_TV is None else grad_TV.shape[1],
            options.ignore_index,
            options.label_smoothing,
            options.logit_scale,
            options.softcap,
            HAS_BIAS=bias_V is not None,
            HAS_SOFTCAP=options.softcap > 0,
            HAS_SMOOTHING=options.label_smoothing > 0,
            STATISTICS=statistics,
            FORWARD=forward,
            BACKWARD=grad_TV is not None,
            BLOCK=launch.block,
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
    return terms
