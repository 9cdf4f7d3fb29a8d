"""Keep samples apart in layers that mix tokens without attention: convolutions and state spaces (Mamba).

Their fast kernels take the number of the sample each token is in (``seq_idx``). Transformers' plain versions, used on
the CPU and wherever ``mamba-ssm`` and ``causal-conv1d`` are not installed, take no notice of it or refuse. There each
layer is run sample by sample, which is exact for any causal layer and needs nothing but the boundaries.

The cost is one call of the layer a sample; on a GPU the boundaries are read back once a layer as well, so it is the
slow way there, and the log says which packages would make it fast.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from tuning.attention.switch import BOUNDARY_KEYS
from tuning.attention.varlen import is_flat
from tuning.errors import UnsupportedError

__all__ = ["KERNEL_PACKAGES", "find_mixers", "has_kernels", "run_apart", "takes_boundaries"]

# import names of the packages that hold the fast kernels
KERNEL_PACKAGES = ("mamba_ssm", "causal_conv1d")


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name to module of each layer that mixes neighbouring tokens by a convolution of its own."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    }


def takes_boundaries(mixer: nn.Module) -> bool:
    """Say whether the layer's forward has room for boundaries, so that its caller may pass them."""
    parameters = inspect.signature(mixer.forward).parameters
    return "seq_idx" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def has_kernels(device_type: str) -> bool:
    """Say whether the fast kernels, which keep samples apart themselves, can run on this kind of device."""
    if device_type != "cuda":
        return False
    try:
        for package in KERNEL_PACKAGES:
            importlib.import_module(package)
    except ImportError:
        return False
    return True


@contextmanager
def run_apart(mixer: nn.Module, configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Run ``mixer`` sample by sample wherever boundaries come, while the context lasts.

    Args:
        mixer: A layer from :func:`find_mixers`; its ``forward`` is replaced and put back.
        configs: Of its model, which tell a flattened forward from others.
    """
    original = mixer.forward
    had_own = "forward" in mixer.__dict__

    @functools.wraps(original)
    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the layer's own
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None:
            if any(is_flat(config) for config in configs):
                raise UnsupportedError(
                    f"--padding_free was asked for, but {type(mixer).__name__} is not told where samples begin: a "
                    "layer above it drops these keyword arguments. Train this model without --padding_free."
                )
            return original(hidden_states, *args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in BOUNDARY_KEYS}
        lengths = [length for length in cu_seqlens.diff().tolist() if length]
        outputs = [original(sample, *args, **rest) for sample in torch.split(hidden_states, lengths, dim=1)]
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs, dim=1)
        # (output, weights or state ...): only the output belongs to tokens
        return (torch.cat([output[0] for output in outputs], dim=1), *(None for _ in outputs[0][1:]))

    mixer.forward = forward
    try:
        yield
    finally:
        if had_own:
            mixer.forward = original
        else:
            del mixer.forward
