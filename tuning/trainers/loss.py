r"""The trainer's own loss: TRL's fused head, or full logits where label smoothing needs them.

For every supervised token with target :math:`y` and logits :math:`z`

.. math:: \ell = \log \sum_v e^{z_v} - z_y

and the loss of a step is the sum of :math:`\ell` over all micro-steps and ranks, divided once by their number of
supervised tokens. A mean per micro-step would weigh short samples up. Label smoothing
:math:`\epsilon` gives :math:`(1-\epsilon)\,\ell + \epsilon\,(\log\sum_v e^{z_v} - \bar z)` (Szegedy et al. 2016,
arXiv:1512.00567); dynamic fine-tuning (``loss_type dft``, arXiv:2508.05629) weighs each :math:`\ell` by the
probability of its target, held constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tuning.seats import LossTerms

if TYPE_CHECKING:
    from torch import nn

__all__ = ["IGNORE_INDEX", "HeadLoss"]

IGNORE_INDEX = -100  # torch.nn.CrossEntropyLoss


class HeadLoss:
    """Loss through the forward that ``trl.trainer.utils.add_fused_lm_head`` adds to the model.

    Args:
        label_smoothing: From 0 to below 1; above 0 the full logits are built.
        dynamic: Weigh each token by its probability (``loss_type dft``).
        with_router_loss: Ask a mixture of experts for its router logits.
        full_logits: Build the full logits also without label smoothing, for models that the fused head cannot serve.
    """

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        dynamic: bool = False,
        with_router_loss: bool = False,
        full_logits: bool = False,
    ) -> None:
        self.label_smoothing = label_smoothing
        self.full_logits = full_logits or label_smoothing > 0
        self.dynamic = dynamic
        self.with_router_loss = with_router_loss

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> LossTerms:
        """Return the summed loss of one batch; see :class:`tuning.seats.Loss`."""
        kwargs = dict(inputs)
        if self.with_router_loss:
            kwargs["output_router_logits"] = True
        if self.full_logits:
            return self._from_logits(model, kwargs)
        outputs = model(**kwargs, fused_lm_head=True)
        log_probs = outputs.log_probs
        weights = log_probs.exp().detach() if self.dynamic else 1.0
        return LossTerms(
            nll_sum=-(log_probs * weights).float().sum(),
            num_tokens=outputs.label_mask.sum(),
            entropy_sum=outputs.entropy.detach().float().sum(),
            num_correct=outputs.is_top1.sum(),
            aux_loss=outputs.aux_loss if self.with_router_loss else None,
        )

    def _from_logits(self, model: nn.Module, kwargs: dict[str, Any]) -> LossTerms:
        labels = kwargs.pop("labels")
        outputs = model(**kwargs)
        # prompt tuning puts virtual tokens before the sample: only the last columns have labels
        logits = outputs.logits[:, -labels.shape[1] :][:, :-1]
        targets = labels[:, 1:]
        mask = targets != IGNORE_INDEX
        logits_TV, targets_T = logits[mask].float(), targets[mask]
        log_probs_TV = logits_TV.log_softmax(-1)
        nll_T = -log_probs_TV.gather(1, targets_T[:, None])[:, 0]
        loss_T = nll_T * nll_T.neg().exp().detach() if self.dynamic else nll_T
        if self.label_smoothing > 0:
            loss_T = (1 - self.label_smoothing) * nll_T - self.label_smoothing * log_probs_TV.mean(-1)
        with torch.no_grad():
            entropy = -(log_probs_TV.exp() * log_probs_TV).sum()
            correct = (logits_TV.argmax(-1) == targets_T).sum()
        return LossTerms(
            nll_sum=loss_T.sum(),
            num_tokens=mask.sum(),
            entropy_sum=entropy,
            num_correct=correct,
            aux_loss=outputs.aux_loss if self.with_router_loss else None,
        )
