"""Output head and cross-entropy in one: ``cross_entropy(hidden @ weight.T + bias)`` without ``[T, V]`` logits.

Rows are taken in tiles against the whole vocabulary. For a tile ``h``, logits ``x = h W^T`` (``_softmax`` has the
loss and ``dx`` for a row of ``x``)::

    dh = dx W            dW = sum over tiles of dx^T h            db = sum over tiles and rows of dx

Logits, ``dh`` and ``dW`` are three products by the vendor's library; between them one Triton kernel turns the logits
into their gradient in place. The gradients are computed in the forward, so that no product is made twice: the price
is that a forward under grad mode does the work of the backward. The backward multiplies by the upstream gradient
over ``grad_scale``, and does nothing where that is 1.

What it costs beside the gradients is one tile, at most :data:`TILE_BYTES`. Rows that are not supervised need not be
computed: ``supervised_index`` names those that are, and with 10 % of them the work is a tenth.

Precision of ``dW`` over several tiles. A bf16 running sum would round at every tile; an fp32 one needs twice the
memory of the gradient. Here the running sum is fp16, with three more bits than bf16 in the same two bytes, and its
narrow range is guarded by exact powers of two: one for ``dx``, one for each column of ``h``, chosen so that no sum can
overflow whatever the labels are. A weight in fp32 is summed in fp32, and a single tile is not summed at all.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tuning.kernels import reference
from tuning.kernels._launch import can_launch, device_guard
from tuning.kernels._softmax import LossOptions, RowTerms, softmax_rows_

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]

# 504 MiB: 8,192 rows of a 32,000-word vocabulary in bf16 are one tile, and 0.5 GiB holds it with all small tensors
TILE_BYTES = 504 * 2**20
# rows of a tile whose products run fast; sweep on H200, scripts/bench/linear_cross_entropy.py, 2026-12-01: 8,192 rows
# of 4,096 x 151,936 take 51.5 ms with 2,048 rows and 52.7 with 1,280, but 53.9 with 1,664 and 55.2 with 1,536
_GOOD_ROWS = (8192, 4096, 2048, 1280, 1024, 768, 512, 256, 128)
# rows of the logits start at multiples of 128 bytes, as the matrix units' loads want
_ROW_ALIGNMENT = 64
# dx is scaled to at most 2**6: probabilities down to 1e-6 keep all bits of fp16
_GRADIENT_EXPONENT = 6
# bound of |dW| in fp16; its largest number is 65504
_SUM_EXPONENT = 15


class LinearCrossEntropy(NamedTuple):
    """Sums over the labels that count.

    Attributes:
        loss_sum: Differentiable fp32 scalar.
        num_tokens: int64 scalar, labels that are not the ignored index.
        entropy_sum: fp32 scalar; None if not asked for.
        num_correct: fp32 scalar, labels that are the first arg-max; None if not asked for.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    entropy_sum: torch.Tensor | None
    num_correct: torch.Tensor | None


class _Inputs(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    supervised: torch.Tensor | None
    low_rank_in: torch.Tensor | None
    low_rank_out: torch.Tensor | None


class _Wanted(NamedTuple):
    hidden: bool
    weight: bool
    bias: bool
    low_rank_in: bool
    low_rank_out: bool


class Tiling(NamedTuple):
    """How the rows are cut, a sweep's subject.

    Attributes:
        rows: Rows a tile, or 0 for as many as fit ``TILE_BYTES``.
        half_sum: Sum a bf16 weight gradient over tiles in guarded fp16; else in fp32.
    """

    rows: int = 0
    half_sum: bool = True


@triton.jit
def _rescale_kernel(
    src_ptr, dst_ptr, factor_ptr, num_elements, num_cols, PER_COLUMN: tl.constexpr, BLOCK: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    if PER_COLUMN:
        factor = tl.load(factor_ptr + offsets % num_cols, mask=mask, other=0.0)
        x = tl.load(src_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * factor
        tl.store(dst_ptr + offsets, x.to(dst_ptr.dtype.element_ty), mask=mask)
    else:
        factor = tl.load(factor_ptr)
        # nothing to do is the common case of the backward, and the device knows it without the host
        if (factor != 1.0) | (src_ptr.dtype.element_ty != dst_ptr.dtype.element_ty):
            x = tl.load(src_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * factor
            tl.store(dst_ptr + offsets, x.to(dst_ptr.dtype.element_ty), mask=mask)


def _rescale_(dst: torch.Tensor, src: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Write ``src * factor`` into ``dst``, which may be the same memory under another dtype of the same size.

    Args:
        dst: Contiguous.
        src: Contiguous.
        factor: fp32 scalar, or ``[num_cols]`` for the last dimension.
    """
    num_elements = src.numel()
    if num_elements:
        with device_guard(src):
            _rescale_kernel[(triton.cdiv(num_elements, 4096),)](
                src, dst, factor, num_elements, src.shape[-1] if src.dim() else 1,
                PER_COLUMN=factor.dim() > 0, BLOCK=4096, num_warps=8,
            )  # fmt: skip
    return dst


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that is not above ``x``."""
    return torch.exp2(torch.floor(torch.log2(x)))


def _mm_wide_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, add: bool) -> None:
    """Write ``a @ b`` (plus ``out`` if ``add``) into ``out``, which may be fp32 where ``a`` and ``b`` are not."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out) if add else torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        product = torch.mm(a.to(out.dtype), b.to(out.dtype))
        out.add_(product) if add else out.copy_(product)


class _WeightGradient:
    """Running sum of ``dx^T h`` over tiles, in the best dtype that the memory allows."""

    def __init__(
        self, inputs: _Inputs, options: LossOptions, grad_scale: torch.Tensor, tiling: Tiling, *, num_tiles: int
    ) -> None:
        weight = inputs.weight
        narrow = weight.dtype == torch.bfloat16 and num_tiles > 1
        self.half = narrow and tiling.half_sum
        self.dtype = weight.dtype
        self.started = False
        self.sum = torch.empty(weight.shape, dtype=torch.float32 if narrow and not self.half else weight.dtype,
                               device=weight.device)  # fmt: skip
        if self.half:
            num_rows = (inputs.labels if inputs.supervised is None else inputs.supervised).numel()
            # |dx| <= grad_scale * logit_scale, so that |dx * dx_factor| <= 2**6
            size = (grad_scale.abs() * abs(options.logit_scale)).clamp_min(1e-30)
            self.dx_factor = _power_of_two(2.0**_GRADIENT_EXPONENT / size)
            columns = torch.linalg.vector_norm(inputs.hidden, float("inf"), dim=0).float().clamp_min(1e-20)
            bound = 2.0 ** (_SUM_EXPONENT - _GRADIENT_EXPONENT) / num_rows
            self.h_factor = _power_of_two(bound / columns)
            self.undo = 1.0 / (self.dx_factor * self.h_factor)

    def add_(self, tile: torch.Tensor, dx: torch.Tensor, h: torch.Tensor) -> None:
        """Add one tile; overwrites the memory of ``dx``, a slice of the rows of ``tile``."""
        total = self.sum
        if self.half:
            rows = tile[: dx.shape[0]]
            dx = _rescale_(rows.view(torch.float16), rows, self.dx_factor)[:, : dx.shape[1]]
            h = _rescale_(torch.empty(h.shape, dtype=torch.float16, device=h.device), h.contiguous(), self.h_factor)
            total = total.view(torch.float16)
        _mm_wide_(total, dx.t(), h, add=self.started)
        self.started = True

    def finish(self) -> torch.Tensor:
        """Return the sum in the dtype of the weight."""
        if not self.started:
            return self.sum.zero_().to(self.dtype)
        if self.half:
            return _rescale_(self.sum, self.sum.view(torch.float16), self.undo)
        return self.sum.to(self.dtype)


def _tile_rows(num_rows: int, row_bytes: int, tiling: Tiling) -> int:
    """Return the rows of a tile: all of them, or the largest good number within ``TILE_BYTES``."""
    most = tiling.rows or max(1, TILE_BYTES // row_bytes)
    if num_rows <= most:
        return max(1, num_rows)
    return tiling.rows or next((rows for rows in _GOOD_ROWS if rows <= most), max(1, most))


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _take(x: torch.Tensor, index: torch.Tensor | None, start: int, stop: int) -> torch.Tensor:
    return x[start:stop] if index is None else x.index_select(0, index[start:stop])


def _put_(out: torch.Tensor, index: torch.Tensor | None, start: int, stop: int, a: torch.Tensor, b: torch.Tensor):
    """Write ``a @ b`` into rows of ``out``."""
    if index is None and out.dtype == a.dtype:
        torch.mm(a, b, out=out[start:stop])
    elif index is None:
        out[start:stop] = torch.mm(a, b)
    else:
        out.index_copy_(0, index[start:stop], torch.mm(a, b).to(out.dtype))


class _Gradients:
    """The gradients of one call, filled tile by tile."""

    def __init__(self, inputs: _Inputs, wanted: _Wanted) -> None:
        def rows_of(x: torch.Tensor | None, *, want: bool) -> torch.Tensor | None:
            if x is None or not want:
                return None
            return torch.empty_like(x) if inputs.supervised is None else torch.zeros_like(x)

        self.index = inputs.supervised
        self.hidden = rows_of(inputs.hidden, want=wanted.hidden)
        self.low_rank_in = rows_of(inputs.low_rank_in, want=wanted.low_rank_in)
        self.bias = _wide_zeros(inputs.bias) if wanted.bias else None
        self.low_rank_out = _wide_zeros(inputs.low_rank_out) if wanted.low_rank_out else None

    def add_(
        self,
        start: int,
        dx: torch.Tensor,
        weight: torch.Tensor,
        low_rank: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Add the tile of rows from ``start`` on, whose gradient of the logits is ``dx``."""
        stop = start + dx.shape[0]
        if self.hidden is not None:
            _put_(self.hidden, self.index, start, stop, dx, weight)
        if self.bias is not None:
            self.bias += dx.sum(0, dtype=torch.float32)
        if self.low_rank_in is not None and low_rank is not None:
            _put_(self.low_rank_in, self.index, start, stop, dx, low_rank[1])
        if self.low_rank_out is not None and low_rank is not None:
            _mm_wide_(self.low_rank_out, dx.t(), low_rank[0], add=True)


def _wide_zeros(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def _sums(terms: list[RowTerms], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).sum() if parts else torch.zeros((), device=device)

    return total([t.loss for t in terms]), total([t.entropy for t in terms]), total([t.correct for t in terms])


def _forward(
    inputs: _Inputs,
    options: LossOptions,
    wanted: _Wanted,
    grad_scale: torch.Tensor,
    *,
    statistics: bool,
    tiling: Tiling | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, ...]]:
    """Return (loss, entropy, correct) and the gradients in the order of :class:`_Wanted`, times ``grad_scale``."""
    tiling = tiling or Tiling()
    dtype = _compute_dtype(inputs.hidden)
    index = inputs.supervised
    num_rows = (inputs.labels if index is None else index).numel()
    vocab, device = inputs.weight.shape[0], inputs.hidden.device
    padded = triton.cdiv(vocab, _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    rows = _tile_rows(num_rows, padded * dtype.itemsize, tiling)
    terms: list[RowTerms] = []
    with torch.autocast(device.type, enabled=False):
        weight, low_out = inputs.weight.to(dtype), _cast(inputs.low_rank_out, dtype)
        grads = _Gradients(inputs, wanted)
        num_tiles = triton.cdiv(num_rows, rows)
        weight_grad = None
        if wanted.weight:
            weight_grad = _WeightGradient(inputs, options, grad_scale, tiling, num_tiles=num_tiles)
        tile = torch.empty((rows, padded), dtype=dtype, device=device)
        for start in range(0, num_rows, rows):
            stop = min(start + rows, num_rows)
            h = _take(inputs.hidden, index, start, stop).to(dtype)
            x = tile[: stop - start, :vocab]
            torch.mm(h, weight.t(), out=x)
            low_rank = None
            if inputs.low_rank_in is not None and low_out is not None:
                low_rank = _take(inputs.low_rank_in, index, start, stop).to(dtype), low_out
                x.addmm_(low_rank[0], low_out.t())
            terms.append(
                softmax_rows_(
                    x, _take(inputs.labels, index, start, stop), options, bias_V=inputs.bias,
                    grad_TV=tile[: stop - start] if any(wanted) else None, grad_scale=grad_scale, statistics=statistics,
                )
            )  # fmt: skip
            grads.add_(start, x, weight, low_rank)
            if weight_grad is not None:
                weight_grad.add_(tile, x, h)
        dw = weight_grad.finish() if weight_grad is not None else None
        db, dlow = _cast_like(grads.bias, inputs.bias), _cast_like(grads.low_rank_out, inputs.low_rank_out)
        return _sums(terms, device), (grads.hidden, dw, db, grads.low_rank_in, dlow)


def _cast(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if x is None else x.to(dtype)


def _cast_like(x: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None or other is None else x.to(other.dtype)


class _LinearCrossEntropyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, bias, index, low_in, low_out, grad_scale, options, statistics, tiling):
        need = ctx.needs_input_grad
        wanted = _Wanted(need[0], need[1], need[3], need[5], need[6])
        inputs = _Inputs(hidden, weight, labels, bias, index, low_in, low_out)
        sums, ctx.grads = _forward(inputs, options, wanted, grad_scale, statistics=statistics, tiling=tiling)
        ctx.grad_scale = grad_scale
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    def backward(ctx, dloss, _dentropy, _dcorrect):
        if ctx.grads is None:
            raise RuntimeError(
                "linear_cross_entropy gave its gradients away in the first backward; its graph has no second one"
            )
        ratio = (dloss / ctx.grad_scale).float()
        grads, ctx.grads = ctx.grads, None
        hidden, weight, bias, low_in, low_out = (None if g is None else _rescale_(g, g, ratio) for g in grads)
        return hidden, weight, None, bias, None, low_in, low_out, None, None, None, None


@torch.library.custom_op("packtune::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor | None,
    low_in: torch.Tensor | None,
    low_out: torch.Tensor | None,
    grad_scale: torch.Tensor,
    numbers: list[float],
    integers: list[int],
    wanted: list[bool],
    statistics: bool,  # noqa: FBT001 - the schema of an operator
) -> list[torch.Tensor]:
    inputs = _Inputs(hidden, weight, labels, bias, index, low_in, low_out)
    options = LossOptions(integers[0], numbers[0], numbers[1], numbers[2], integers[1])
    sums, grads = _forward(inputs, options, _Wanted(*wanted), grad_scale, statistics=statistics)
    return [*sums, *(hidden.new_empty(0) if g is None else g for g in grads)]


@_linear_cross_entropy_op.register_fake
def _(hidden, weight, labels, bias, index, low_in, low_out, grad_scale, numbers, integers, wanted, statistics):
    sums = [hidden.new_empty((), dtype=torch.float32) for _ in range(3)]
    like = (hidden, weight, bias, low_in, low_out)
    return [
        *sums,
        *(torch.empty_like(x) if want else hidden.new_empty(0) for x, want in zip(like, wanted, strict=True)),
    ]


def _setup_context(ctx, inputs, output):
    ctx.wanted = inputs[10]
    ctx.save_for_backward(inputs[7], *output[3:])


def _op_backward(ctx, dsums):
    grad_scale, *grads = ctx.saved_tensors
    ratio = dsums[0] / grad_scale
    scaled = [(g * ratio).to(g.dtype) if want else None for g, want in zip(grads, ctx.wanted, strict=True)]
    return scaled[0], scaled[1], None, scaled[2], None, scaled[3], scaled[4], None, None, None, None, None


_linear_cross_entropy_op.register_autograd(_op_backward, setup_context=_setup_context)


def _check(inputs: _Inputs, vocab_size: int) -> None:
    hidden, weight = inputs.hidden, inputs.weight
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy needs hidden [T, D] and weight [V, D]; got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if inputs.labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy needs one label a row; got {tuple(inputs.labels.shape)} for {tuple(hidden.shape)}"
        )
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(f"vocab_size must be 1 to {weight.shape[0]}, the rows of the weight; got {vocab_size}")


def _run(
    inputs: _Inputs, options: LossOptions, grad_scale: torch.Tensor, *, statistics: bool, tiling: Tiling | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, entropy, correct) by the way that fits: no gradient, torch.compile, or eager."""
    tracked = (inputs.hidden, inputs.weight, inputs.bias, inputs.low_rank_in, inputs.low_rank_out)
    wanted = _Wanted(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in tracked))
    if torch.compiler.is_compiling():
        numbers = [options.label_smoothing, options.logit_scale, options.softcap]
        integers = [options.ignore_index, options.vocab_size]
        sums = torch.ops.packtune.linear_cross_entropy(*inputs, grad_scale, numbers, integers, list(wanted), statistics)
        return sums[0], sums[1], sums[2]
    if not any(wanted):
        return _forward(inputs, options, wanted, grad_scale, statistics=statistics, tiling=tiling)[0]
    return _LinearCrossEntropyLoss.apply(*inputs, grad_scale, options, statistics, tiling)


def linear_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    supervised_index: torch.Tensor | None = None,
    grad_scale: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    vocab_size: int | None = None,
    statistics: bool = False,
    tiling: Tiling | None = None,
) -> LinearCrossEntropy:
    """Sum the cross-entropy of ``hidden @ weight.T + bias`` over the labels that count.

    Under autocast the products are in its dtype, else in that of ``hidden_TD``. A frozen weight costs no gradient
    product. The graph refuses a second backward.

    Args:
        hidden_TD: Hidden states, already shifted against the labels.
        weight_VD: Head weight, or the tied embedding; its gradient has its dtype.
        labels_T: Integers; a label outside the vocabulary that is not ``ignore_index`` makes the loss NaN.
        bias_V: Head bias, or None.
        low_rank: ``(a [T, R], b [V, R])``: adds ``a @ b.T`` to the logits, as a LoRA adapter of the head does.
        supervised_index: Distinct rows to compute, int64 on the device; every row outside must have the label
            ``ignore_index``. None computes all rows. Make it on the CPU, where the labels come from: asking a GPU
            tensor for its non-zeros waits for the device.
        grad_scale: fp32 scalar on the device, the upstream gradient that is expected, such as one over
            ``num_items_in_batch``. If it comes, the gradients are final at once and rounded once. None is 1.
        ignore_index: Label of rows that count nothing.
        label_smoothing: Weight of the uniform distribution over ``vocab_size`` columns.
        logit_scale: Factor on the logits.
        softcap: Bound of the logits, after the factor; 0 is none.
        vocab_size: Columns that count; later ones are padding. None is all.
        statistics: Compute entropy and correctness as well.
        tiling: How rows are cut; None is by :data:`TILE_BYTES`.

    Returns:
        Sums over the labels that count; divide by ``num_tokens`` or by ``num_items_in_batch``.

    Raises:
        ValueError: If the shapes do not fit.
    """
    vocab_size = weight_VD.shape[0] if vocab_size is None else vocab_size
    low_in, low_out = low_rank or (None, None)
    labels_T = labels_T.contiguous()
    inputs = _Inputs(hidden_TD, weight_VD, labels_T, bias_V, supervised_index, low_in, low_out)
    _check(inputs, vocab_size)
    options = LossOptions(ignore_index, label_smoothing, logit_scale, softcap, vocab_size)
    count = (labels_T != ignore_index).sum()
    if can_launch(hidden_TD):
        # fp16 gradients would vanish under a small factor; they are scaled afterwards
        if grad_scale is None or _compute_dtype(hidden_TD) == torch.float16:
            grad_scale = torch.ones((), dtype=torch.float32, device=hidden_TD.device)
        loss, entropy, correct = _run(inputs, options, grad_scale, statistics=statistics, tiling=tiling)
    else:
        loss, _, entropy, correct = reference.linear_cross_entropy(
            hidden_TD, weight_VD, labels_T, bias_V, low_rank, **options._asdict()
        )
    if not statistics:
        return LinearCrossEntropy(loss, count, None, None)
    return LinearCrossEntropy(loss, count, entropy, correct.float())
