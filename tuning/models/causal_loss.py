"""A forward for causal models that answers with the sums of their loss.

The model's own forward runs, so everything in it stays: layers, hooks, adapters, auxiliary losses. Either its head
answers for the logits: it hands its input and weights to a function that computes the loss, and returns a column of
zeros, which the rest of the forward scales or caps in vain. Or the logits it returns go to such a function. The
function comes from outside: this room knows models, not kernels.

The alternative, running the layers and the head from outside, misses what a model's forward does between them, and
the wrappers that gather weights or run hooks at the time of the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tuning.models.forwards import own_forward
from tuning.models.heads import base_and_low_rank, head_parts

__all__ = ["IGNORE_INDEX", "HeadInputs", "next_labels", "with_head_loss", "with_logits_loss"]

IGNORE_INDEX = -100  # torch.nn.CrossEntropyLoss
Terms = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadInputs:
    """What a head gives to the loss of one batch, ``T`` positions.

    Attributes:
        hidden_TD: Hidden states.
        weight_VD: Weight of the head.
        labels_T: What the model must say at each position, -100 for nothing.
        bias_V: Bias of the head, or None.
        low_rank: ``(a [T, R], b [V, R])`` whose product is added to the logits, or None.
        supervised_index: The positions with a label, or None if that is not known.
        loss_factor: Upstream gradient that will come, a scalar on the device, or None.
    """

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    labels_T: torch.Tensor
    bias_V: torch.Tensor | None
    low_rank: tuple[torch.Tensor, torch.Tensor] | None
    supervised_index: torch.Tensor | None
    loss_factor: torch.Tensor | None


@dataclass
class _Request:
    """One forward that wants terms: what it knows, and the answer."""

    labels_T: torch.Tensor
    supervised_index: torch.Tensor | None
    loss_factor: torch.Tensor | float | None
    terms: Terms | None = None


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return ``[B * S]``: the label that the model must say at each position; none at the end of a row."""
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)


@contextmanager
def with_head_loss(module: nn.Module, *, layer: str, compute: Callable[[HeadInputs], Terms]) -> Iterator[None]:
    """Let ``module(..., labels=labels, fast_loss=True)`` return terms that ``compute`` makes of the head's input.

    Args:
        module: A causal model; changed while the context lasts.
        layer: Attribute that holds its head, of which ``heads.head_parts`` knows the parts.
        compute: Makes loss terms of a head's inputs.
    """
    requests: list[_Request] = []
    with ExitStack() as stack:
        for part in head_parts(getattr(module, layer))[0]:
            stack.enter_context(own_forward(part, _answer_for(part.forward, requests, compute)))

        def run(original: Callable[..., Any], request: _Request, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            requests.append(request)
            try:
                return original(*args, **kwargs)
            finally:
                requests.pop()

        stack.enter_context(own_forward(module, _with_terms(module, run)))
        yield


@contextmanager
def with_logits_loss(module: nn.Module, *, compute: Callable[[torch.Tensor, torch.Tensor], Terms]) -> Iterator[None]:
    """Let ``module(..., labels=labels, fast_loss=True)`` return terms that ``compute`` makes of its logits.

    Args:
        module: A causal model; changed while the context lasts.
        compute: Makes loss terms of logits ``[T, V]`` and labels ``[T]``.
    """

    def run(original: Callable[..., Any], request: _Request, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        output = original(*args, **kwargs)
        logits = output.logits
        request.terms = compute(logits.reshape(-1, logits.shape[-1]), request.labels_T.to(logits.device))
        return output

    with own_forward(module, _with_terms(module, run)):
        yield


def _with_terms(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    original = module.forward

    # keep the signature: generate and the trainer read it
    @functools.wraps(type(module).forward)
    def forward(
        self: nn.Module,
        *args: Any,  # noqa: ANN401
        fast_loss: bool = False,
        labels: torch.Tensor | None = None,
        supervised_index: torch.Tensor | None = None,
        loss_factor: torch.Tensor | float | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - terms, or the model's own output
        if not fast_loss or labels is None:
            return original(*args, **kwargs) if labels is None else original(*args, labels=labels, **kwargs)
        request = _Request(next_labels(labels), supervised_index, loss_factor)
        output = run(original, request, *args, **kwargs)
        if request.terms is None:
            raise RuntimeError(f"{type(self).__name__} ran without calling its head")
        aux_loss = getattr(output, "aux_loss", None)
        return dict(request.terms) if aux_loss is None else {**request.terms, "aux_loss": aux_loss}

    return forward


def _answer_for(
    original: Callable[..., Any], requests: list[_Request], compute: Callable[[HeadInputs], Terms]
) -> Callable[..., Any]:
    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not requests:
            return original(hidden, *args, **kwargs)
        request = requests[-1]
        base, low_rank = base_and_low_rank(self, hidden)
        device = base.weight.device
        index, factor = request.supervised_index, request.loss_factor
        request.terms = compute(
            HeadInputs(
                hidden_TD=hidden.to(device).reshape(-1, hidden.shape[-1]),
                weight_VD=base.weight,
                labels_T=request.labels_T.to(device),
                bias_V=base.bias,
                low_rank=low_rank,
                supervised_index=None if index is None else index.to(device),
                loss_factor=None if factor is None else torch.as_tensor(factor, dtype=torch.float32, device=device),
            )
        )
        return hidden.new_zeros((*hidden.shape[:-1], 1))

    return forward
