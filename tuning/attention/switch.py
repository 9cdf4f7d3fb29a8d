"""Switch a loaded model to variable-length attention, and back.

Transformers reads the name of the attention from the config at every layer, so switching is setting that name in each
config the model's modules hold; the name is not part of what a config saves. Hooks on the model's own classes set the
flat name for the time of a flattened forward (see :mod:`tuning.attention.varlen`) and take care of three keyword
arguments there: no cache is kept, positions must have come, and an attention mask that masks nothing is dropped, since
with one transformers would take the whole row for one sample.

Why hooks and not a second name for good: outside a flattened forward the model must make masks as before (padded
evaluation, ``generate`` with a static cache). Why the name and not a wrapped ``forward``: peft calls ``forward`` of the
outer class directly, and the trainer replaces it; the inner class is always called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tuning.attention.varlen import Names, VarlenAttention, is_flat, registered
from tuning.errors import DataError, UnsupportedError

__all__ = ["BOUNDARY_KEYS", "find_configs", "has_exchangeable_attention", "switched"]

# what a flattened batch carries beside ids, labels and positions
BOUNDARY_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@contextmanager
def switched(model: nn.Module, *, bound: Callable[[int], int] | None = None) -> Iterator[None]:
    """Let ``model`` attend inside samples wherever boundaries come with a batch, while the context lasts.

    Args:
        model: Any model whose attention is transformers'; peft may wrap it.
        bound: Makes an upper bound of a batch's longest length, so that a compiler sees few values; None: as it is.

    Raises:
        UnsupportedError: If parts of the model have different kinds of attention.
    """
    configs = find_configs(model)
    originals = sorted({config._attn_implementation or "eager" for config in configs})
    if len(originals) != 1:
        raise UnsupportedError(
            f"--padding_free was asked for, but the parts of {type(model).__name__} attend in different ways "
            f"({', '.join(originals) or 'no part has an attention of transformers'}). Load it with one "
            "attn_implementation, or train it without --padding_free."
        )
    attention = VarlenAttention(_right_for_all(originals[0], configs))
    with registered(attention) as names, _named(configs, names.resting), ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                hooks.enter_context(_hooked(module, _FlatForward(configs, names, bound)))
        yield


def find_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return each config object that a module of ``model`` holds, once."""
    found = {
        id(config): config
        for module in model.modules()
        if isinstance(config := module.__dict__.get("config"), PreTrainedConfig)
    }
    return list(found.values())


def _right_for_all(original: str, configs: Sequence[PreTrainedConfig]) -> str:
    """Return the attention for batches without boundaries: not one that leaves out what the model asks for.

    Torch's own has no softcap; transformers before 5.24 takes it for Gemma 2 all the same and drops the cap.
    """
    capped = any(getattr(config, "attn_logit_softcapping", None) is not None for config in configs)
    return "eager" if capped and original == "sdpa" else original


def has_exchangeable_attention(model_class: type[PreTrainedModel]) -> bool:
    """Say whether a model class looks its attention up by name, so that another can be put in.

    The class says so itself, or its file holds transformers' table of attentions (some classes forget to say).
    """
    if getattr(model_class, "_supports_attention_backend", False):
        return True
    return hasattr(sys.modules.get(model_class.__module__), "ALL_ATTENTION_FUNCTIONS")


def _set_implementation(configs: Sequence[PreTrainedConfig], names: Sequence[str | None]) -> None:
    # the public setter would also write into sub-configs, which are in the list themselves
    for config, name in zip(configs, names, strict=True):
        config._attn_implementation_internal = name


@contextmanager
def _named(configs: Sequence[PreTrainedConfig], name: str) -> Iterator[None]:
    before = [config._attn_implementation_internal for config in configs]
    _set_implementation(configs, [name] * len(configs))
    try:
        yield
    finally:
        _set_implementation(configs, before)


@contextmanager
def _hooked(module: PreTrainedModel, forward: _FlatForward) -> Iterator[None]:
    handles = (
        module.register_forward_pre_hook(forward.enter, with_kwargs=True, prepend=True),
        module.register_forward_hook(forward.leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _FlatForward:
    """The hooks of one module: what is set up before its forward is put back after it, also if it raises.

    Args:
        configs: Of the whole model.
        names: Of its attention.
        bound: As in :func:`switched`.
    """

    def __init__(self, configs: Sequence[PreTrainedConfig], names: Names, bound: Callable[[int], int] | None) -> None:
        self._configs = configs
        self._names = names
        self._bound = bound
        self._before: list[list[str | None]] = []  # of forwards under way; an exception in enter leaves it as it was

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Set the flat name if boundaries came; runs before the module's forward."""
        self._before.append([config._attn_implementation_internal for config in self._configs])
        if kwargs.get("cu_seq_lens_q") is None:
            _set_implementation(self._configs, [self._names.resting] * len(self._configs))
            return None
        kwargs = _clean(type(module).__name__, kwargs)
        is_outermost = not any(is_flat(config) for config in self._configs)
        if self._bound is not None and is_outermost:
            kwargs["max_length_q"] = kwargs["max_length_k"] = self._bound(kwargs["max_length_q"])
        _set_implementation(self._configs, [self._names.flat] * len(self._configs))
        return args, kwargs

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        """Put the name back; runs after the forward, also if it raised."""
        _set_implementation(self._configs, self._before.pop())


def _clean(class_name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a flattened forward without what would undo the boundaries."""
    if kwargs.get("position_ids") is None:
        raise DataError(
            f"{class_name} was given the boundaries of samples without position_ids; a collator that flattens must "
            "make both."
        )
    for cache in ("past_key_values", "cache", "past_key_value"):
        if kwargs.get(cache) is not None:
            raise DataError(f"{class_name} was given the boundaries of samples and a cache ({cache}); give one.")
    mask = kwargs.get("attention_mask")
    if mask is not None and not _masks_nothing(mask):
        raise DataError(
            f"{class_name} was given the boundaries of samples and an attention_mask that hides tokens; a flattened "
            "batch has nothing to hide. Use the collator of --padding_free, or train without the flag."
        )
    return {**kwargs, "attention_mask": None, "use_cache": False}


def _masks_nothing(mask: Any) -> bool:  # noqa: ANN401 - a tensor, a BlockMask or a dict of masks
    """Say whether a mask is all ones; looks at the values, so a GPU is waited for, and only if a mask came."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all())
