"""Small parts that stand in for a model's own, so that a module can be asked what it computes.

A shallow copy of a module keeps its class, its settings and its code, and gets small random parts on the CPU. Neither
the weights of the model nor the global random numbers are touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Backbone", "call", "shallow_copy", "small_linear"]

# how a fault in the code of a model that is run on stand-ins may show
_PROBE_ERRORS = (AttributeError, AssertionError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError,
                 ValueError)  # fmt: skip


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module of the same class in training mode, without hooks, that shares parts and settings."""
    stand_in = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        stand_in.__dict__[name] = dict(module.__dict__[name])
    for name in [name for name in stand_in.__dict__ if name.endswith("_hooks")]:
        stand_in.__dict__[name] = type(stand_in.__dict__[name])()
    stand_in.__dict__.pop("forward", None)
    # what happens in training only, such as dropout, must show
    stand_in.training = True
    return stand_in


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a model's own result
    """Return the result of a model's function on stand-ins, or None where it cannot work on them."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            return function(*args, **kwargs)
    except _PROBE_ERRORS:
        return None


def small_linear(width: int, out: int, generator: torch.Generator, *, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Return a frozen random linear layer without a bias, drawn from ``generator`` alone."""
    # no init: it would draw from the global generator and change the run
    layer = nn.Linear(width, out, bias=False, device="meta")
    layer.weight = nn.Parameter(torch.randn(out, width, generator=generator, dtype=dtype), requires_grad=False)
    return layer


class Backbone(nn.Module):
    """Stands in for the layers below the head: gives hidden states whatever it is asked."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_args: object, **_kwargs: object) -> _BackboneOutput:
        """Return the hidden states, whatever the arguments."""
        return _BackboneOutput(self.hidden)


class _BackboneOutput:
    """Has every attribute; all but the hidden states are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: object) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None
