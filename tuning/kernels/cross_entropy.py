"""Cross-entropy of logits that exist, summed over the labels that count.

Formulas are in ``_softmax``. The forward reads the logits once and keeps one number a row; the backward reads them
again and writes the gradient: three passes over ``[T, V]`` in all, against about eight in eager torch, and no fp32
copy. Writing the gradient already in the forward would need a fourth and fifth pass to multiply it by the upstream
gradient. Use ``linear_cross_entropy`` where the logits need not exist.

:func:`cross_entropy_` writes the gradient over the logits, which spares the second ``[T, V]`` tensor.
"""

from typing import NamedTuple

import torch

from tuning.kernels import reference
from tuning.kernels._launch import can_launch
from tuning.kernels._softmax import LossOptions, softmax_rows_

__all__ = ["CrossEntropy", "cross_entropy", "cross_entropy_"]


class CrossEntropy(NamedTuple):
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


def _unit_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _CrossEntropyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, options, statistics, overwrite):
        rows = _unit_last(logits)
        labels = labels.contiguous()
        terms = softmax_rows_(rows, labels, options, statistics=statistics)
        ctx.save_for_backward(rows, labels, terms.lse)
        ctx.options = options
        # a copy was made: writing there would not spare what the caller holds, but is harmless
        ctx.overwrite = overwrite
        ctx.overwritten = False
        loss, entropy, correct = terms.loss.sum(), terms.entropy.sum(), terms.correct.sum()
        ctx.mark_non_differentiable(entropy, correct)
        return loss, entropy, correct

    @staticmethod
    def backward(ctx, dloss, _dentropy, _dcorrect):
        if ctx.overwritten:
            raise RuntimeError(
                "cross_entropy_ wrote the gradient over the logits, so its graph has no second backward; "
                "use cross_entropy for that"
            )
        logits, labels, lse = ctx.saved_tensors
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        ctx.overwritten = ctx.overwrite
        softmax_rows_(logits, labels, ctx.options, grad_TV=grad, grad_scale=dloss, lse_T=lse)
        return grad, None, None, None, None


@torch.library.custom_op("packtune::cross_entropy", mutates_args=())
def _cross_entropy_op(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    softcap: float,
    vocab_size: int,
    statistics: bool,  # noqa: FBT001 - the schema of an operator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    options = LossOptions(ignore_index, label_smoothing, logit_scale, softcap, vocab_size)
    terms = softmax_rows_(_unit_last(logits), labels.contiguous(), options, statistics=statistics)
    return terms.loss.sum(), terms.lse, terms.entropy.sum(), terms.correct.sum()


@_cross_entropy_op.register_fake
def _(logits, labels, ignore_index, label_smoothing, logit_scale, softcap, vocab_size, statistics):
    scalars = [logits.new_empty((), dtype=torch.float32) for _ in range(3)]
    return scalars[0], logits.new_empty(logits.shape[0], dtype=torch.float32), scalars[1], scalars[2]


@torch.library.custom_op("packtune::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward_op(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    logit_scale: float,
    softcap: float,
    vocab_size: int,
) -> torch.Tensor:
    options = LossOptions(ignore_index, label_smoothing, logit_scale, softcap, vocab_size)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    softmax_rows_(_unit_last(logits), labels.contiguous(), options, grad_TV=grad, grad_scale=dloss, lse_T=lse)
    return grad


@_cross_entropy_backward_op.register_fake
def _(dloss, logits, labels, lse, ignore_index, label_smoothing, logit_scale, softcap, vocab_size):
    return logits.new_empty(logits.shape)


def _setup_context(ctx, inputs, output):
    logits, labels, *options, _ = inputs
    ctx.save_for_backward(logits, labels, output[1])
    ctx.options = options


def _op_backward(ctx, dloss, *_):
    logits, labels, lse = ctx.saved_tensors
    grad = torch.ops.packtune.cross_entropy_backward(dloss, logits, labels, lse, *ctx.options)
    return grad, None, None, None, None, None, None, None


_cross_entropy_op.register_autograd(_op_backward, setup_context=_setup_context)


def _loss(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, options: LossOptions, *, statistics: bool, overwrite: bool
) -> CrossEntropy:
    if logits_TV.dim() != 2 or labels_T.shape != logits_TV.shape[:1]:
        raise ValueError(
            f"cross_entropy needs logits [T, V] and labels [T]; got {tuple(logits_TV.shape)} and "
            f"{tuple(labels_T.shape)}"
        )
    if not can_launch(logits_TV):
        loss, count, entropy, correct = reference.cross_entropy(logits_TV, labels_T, **options._asdict())
        return CrossEntropy(loss, count, entropy if statistics else None, correct.float() if statistics else None)
    if torch.compiler.is_compiling():
        loss, _, entropy, correct = torch.ops.packtune.cross_entropy(logits_TV, labels_T, *options, statistics)
    else:
        loss, entropy, correct = _CrossEntropyLoss.apply(logits_TV, labels_T, options, statistics, overwrite)
    count = (labels_T != options.ignore_index).sum()
    return CrossEntropy(loss, count, entropy if statistics else None, correct if statistics else None)


def cross_entropy(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    vocab_size: int | None = None,
    statistics: bool = False,
) -> CrossEntropy:
    """Sum the cross-entropy over the labels that count; 0 with zero gradients where none does.

    Args:
        logits_TV: Any float dtype, any strides.
        labels_T: Integers; a label outside the vocabulary that is not ``ignore_index`` makes the loss NaN.
        ignore_index: Label of rows that count nothing.
        label_smoothing: Weight of the uniform distribution over ``vocab_size`` columns.
        logit_scale: Factor on the logits.
        softcap: Bound of the logits, after the factor; 0 is none.
        vocab_size: Columns that count; later ones are padding. None is all.
        statistics: Compute entropy and correctness as well.

    Returns:
        Sums over the labels that count; divide by ``num_tokens`` for a mean.

    Raises:
        ValueError: If the shapes do not fit.
    """
    vocab_size = logits_TV.shape[-1] if vocab_size is None else vocab_size
    options = LossOptions(ignore_index, label_smoothing, logit_scale, softcap, vocab_size)
    return _loss(logits_TV, labels_T, options, statistics=statistics, overwrite=False)


def cross_entropy_(
    logits_TV: torch.Tensor,
    labels_T: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    vocab_size: int | None = None,
    statistics: bool = False,
) -> CrossEntropy:
    """Overwrite ``logits_TV`` with their gradient in the backward; else :func:`cross_entropy`.

    The graph refuses a second backward, and nobody may read the logits after the first.

    Args:
        logits_TV: Any float dtype; overwritten if its last stride is 1.
        labels_T: As there.
        ignore_index: As there.
        label_smoothing: As there.
        logit_scale: As there.
        softcap: As there.
        vocab_size: As there.
        statistics: As there.

    Returns:
        Sums over the labels that count.

    Raises:
        ValueError: If the shapes do not fit.
    """
    vocab_size = logits_TV.shape[-1] if vocab_size is None else vocab_size
    options = LossOptions(ignore_index, label_smoothing, logit_scale, softcap, vocab_size)
    return _loss(logits_TV, labels_T, options, statistics=statistics, overwrite=True)
