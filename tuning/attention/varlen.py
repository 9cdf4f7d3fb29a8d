"""Variable-length attention: the one attention function of a padding-free run.

A flattened batch lays its samples end to end, [1, T], and says where each starts (``cu_seq_lens_q``). This module
gives transformers an attention function that reads these boundaries from the keyword arguments of the layer, where
gradient checkpointing keeps them, and hands them to a provider's kernel (:mod:`tuning.attention.providers`). A call
without boundaries, as in ``generate``, goes to the attention the model had before, with the mask made for that one.

Two names are registered with transformers, and both lead here. The resting name has the mask function of the model's
former attention, so whatever asks for a mask outside a flattened forward gets the right one. The flat name has none:
transformers then makes no mask, and does not look for samples in ``position_ids``, which would wait for the device.
:mod:`tuning.attention.switch` sets the flat name while a flattened forward lasts.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tuning.attention.providers import Choice, Request, choose
from tuning.attention.variant import PLAIN, Variant
from tuning.errors import UnsupportedError
from tuning.logs import logger

__all__ = ["NAME", "Names", "VarlenAttention", "is_flat", "registered", "varlen_attention"]

NAME = "packtune_varlen"
_FLAT_NAME = f"{NAME}_flat"
_MAX_TOKENS = 2**31 - 1  # boundaries are int32
_log = logger(__name__)


def varlen_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    variant: Variant = PLAIN,
) -> torch.Tensor:
    """Attend causally inside each sample of a flattened batch, by the fastest provider here.

    Args:
        q_THD: Queries, [T, H, D].
        k_TKD: Keys, [T, K, D]; H is a multiple of K.
        v_TKD: Values, [T, K, D of v].
        cu_seqlens: Where each sample starts, and T at the end; int32, [N + 1], on the device of the queries.
        max_seqlen: At least the tokens of the longest sample.
        variant: Window, scale, softcap, sinks and dropout.

    Returns:
        [T, H, D of v], a new tensor.

    Raises:
        UnsupportedError: If no provider can do it, or T does not fit boundaries of 32 bits.
    """
    return _Chooser()(q_THD, k_TKD, v_TKD, cu_seqlens, max_seqlen, variant)


class _Chooser:
    """A kernel that asks for a provider once for each kind of layer, and logs which it got."""

    def __init__(self) -> None:
        self._choices: dict[tuple[object, ...], Choice] = {}

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        variant: Variant,
    ) -> torch.Tensor:
        if q_THD.shape[0] > _MAX_TOKENS:
            raise UnsupportedError(
                f"A flattened batch of {q_THD.shape[0]} tokens was asked for, but its boundaries are 32-bit integers "
                f"and end at {_MAX_TOKENS}; use a smaller --per_device_train_batch_size or --max_seq_length."
            )
        needs = (
            variant.window is not None,
            variant.softcap is not None,
            variant.sinks is not None,
            variant.dropout > 0,
        )
        key = (q_THD.device.type, q_THD.dtype, q_THD.shape[-1], v_TKD.shape[-1], *needs)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._choose(q_THD, v_TKD, needs)
        return choice.kernel(q_THD, k_TKD, v_TKD, cu_seqlens, max_seqlen, variant)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # imports and logs; a compiled layer meets it once
    def _choose(self, q_THD: torch.Tensor, v_TKD: torch.Tensor, needs: tuple[bool, ...]) -> Choice:
        device = q_THD.device
        window, softcap, sinks, dropout = needs
        request = Request(
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dtype=q_THD.dtype, width=q_THD.shape[-1], value_width=v_TKD.shape[-1],
            window=window, softcap=softcap, sinks=sinks, dropout=dropout,
        )  # fmt: skip
        choice = choose(request)
        for known in self._choices.values():
            if known.name == choice.name:  # one kernel for all requests of a provider: it may keep a cache
                choice = dataclasses.replace(choice, kernel=known.kernel)
        _log.info("attention of %s: %s", request.describe(), choice.describe())
        return choice


class VarlenAttention:
    """The attention function of one patched model, in the signature of transformers' ``AttentionInterface``.

    Args:
        original: Name of the attention the model had; calls without boundaries go there.
    """

    def __init__(self, original: str) -> None:
        self.original = original
        self._kernel = _Chooser()

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
        **kwargs: Any,  # noqa: ANN401 - whatever the model passes
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Attend inside the samples that ``kwargs`` bounds, or as the model did before if it bounds none.

        Args:
            module: The attention layer.
            query: [B, H, S, D].
            key: [B, K, S, D].
            value: [B, K, S, D of v].
            attention_mask: The former attention's mask; with boundaries it is not used, since they say all.
            scaling: Factor on the scores.
            dropout: Of attention weights.
            **kwargs: ``cu_seq_lens_q``, ``max_length_q``, ``sliding_window``, ``softcap``, ``s_aux``.

        Returns:
            Output [B, S, H, D of v], and the attention weights where the former attention gives them.
        """
        if kwargs.get("cu_seq_lens_q") is None:
            former = _find_attention(self.original, module)
            return former(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
        return self._attend_flat(module, query, key, value, scaling, dropout, **kwargs), None

    def attend_flat(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
        **kwargs: Any,  # noqa: ANN401 - whatever the model passes
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Attend as :meth:`attend` in a flattened forward, where boundaries must have come.

        Raises:
            UnsupportedError: If the model's layers did not pass them on.
        """
        if kwargs.get("cu_seq_lens_q") is None:
            raise UnsupportedError(
                f"--padding_free was asked for, but {type(module).__name__} is not told where samples begin: a layer "
                "above it drops these keyword arguments. Train this model without --padding_free."
            )
        return self._attend_flat(module, query, key, value, scaling, dropout, **kwargs), None

    def _attend_flat(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        scaling: float | None, dropout: float, **kwargs: Any,  # noqa: ANN401
    ) -> torch.Tensor:  # fmt: skip
        _refuse_what_boundaries_cannot_say(module, query, key, kwargs)
        rows, heads, length, _ = query.shape
        query, key, value = _cast_alike(query, key, value)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        max_length, window = kwargs["max_length_q"], kwargs.get("sliding_window")
        variant = Variant(
            # a window that no sample reaches over is none: more kernels can do that, and faster
            window=None if window is None or window >= max_length else window,
            scale=scaling, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"), dropout=dropout,
        )  # fmt: skip
        out = self._kernel(q, k, v, kwargs["cu_seq_lens_q"], max_length, variant)
        return out.view(rows, length, heads, v.shape[-1])


def _refuse_what_boundaries_cannot_say(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]
) -> None:
    reason = None
    if query.shape[2] != key.shape[2]:
        reason = f"a cache or cross-attention ({query.shape[2]} queries, {key.shape[2]} keys)"
    elif not (kwargs["is_causal"] if kwargs.get("is_causal") is not None else getattr(module, "is_causal", True)):
        reason = "attention that looks ahead"
    elif kwargs.get("position_bias") is not None:
        reason = "a learned position bias"
    elif "sliding_window" not in kwargs and _is_windowed(module):
        reason = "a sliding window that it tells its mask alone"
    if reason is not None:
        raise UnsupportedError(
            f"--padding_free was asked for, but {type(module).__name__} has {reason}, which the boundaries of samples "
            "cannot express. Train this model without --padding_free."
        )


def _is_windowed(module: nn.Module) -> bool:
    """Say whether the config gives this layer a window."""
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    index = getattr(module, "layer_idx", None)
    return index is not None and index < len(layer_types) and layer_types[index] == "sliding_attention"


def _cast_alike(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast to the autocast dtype as torch's own attention is, or else to the values' dtype.

    Rotary embeddings in fp32 leave queries and keys wider than values.
    """
    device_type = query.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _find_attention(name: str, module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the attention function called ``name``; the eager one is in the module's own file."""
    if name in ALL_ATTENTION_FUNCTIONS:
        found: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS[name]
        return found
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise UnsupportedError(
        f"--padding_free cannot find the {name} attention of {type(module).__name__}, which a batch without "
        "boundaries needs. Train this model without --padding_free."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What transformers calls the attention of one patched model.

    Attributes:
        resting: With the mask function of the model's former attention.
        flat: Without a mask function.
    """

    resting: str
    flat: str


def is_flat(config: PreTrainedConfig) -> bool:
    """Say whether a flattened forward of this config's model is under way."""
    return (config._attn_implementation or "").startswith(_FLAT_NAME)


@contextmanager
def registered(attention: VarlenAttention) -> Iterator[Names]:
    """Register ``attention`` with transformers while the context lasts.

    Yields:
        Its names; a second one at the same time gets others.
    """
    suffix = next(text for i in count() if f"{NAME}{(text := str(i or ''))}" not in ALL_ATTENTION_FUNCTIONS)
    names = Names(resting=f"{NAME}{suffix}", flat=f"{_FLAT_NAME}{suffix}")
    masks = ALL_MASK_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS[names.resting] = attention.attend
    ALL_ATTENTION_FUNCTIONS[names.flat] = attention.attend_flat
    # transformers looks for mask functions in the class's mapping only, which has no public way to take one out
    AttentionMaskInterface.register(
        names.resting, masks[attention.original if attention.original in masks else "eager"]
    )
    try:
        yield names
    finally:
        AttentionMaskInterface._global_mapping.pop(names.resting)
        del ALL_ATTENTION_FUNCTIONS[names.resting], ALL_ATTENTION_FUNCTIONS[names.flat]
