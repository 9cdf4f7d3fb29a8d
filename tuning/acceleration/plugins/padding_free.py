"""``--padding_free``: samples are laid end to end, and no token of padding is computed.

The collator flattens a batch and says where each sample starts; the model's attention is switched to one that keeps
samples apart by these boundaries; layers that mix tokens otherwise run sample by sample where their kernels cannot.
Before training the promise is proven on the loaded model and the first batch (``--isolation_check off`` skips that).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from tuning.acceleration.plugin import AccelerationPlugin, Collator, Facts, Patch
from tuning.attention.isolation import check_isolation
from tuning.attention.mixers import KERNEL_PACKAGES, find_mixers, has_kernels, run_apart, takes_boundaries
from tuning.attention.providers import Request, choose
from tuning.attention.switch import find_configs, has_exchangeable_attention, switched
from tuning.config.acceleration_configs import PaddingFree
from tuning.data.collators import FlattenedCollator
from tuning.errors import UnsupportedError
from tuning.logs import logger

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["PaddingFreePlugin"]

_log = logger(__name__)

# what config.layer_types may hold; mixers of the linear kind are looked at once the model is there
_LAYER_TYPES = frozenset(
    {"full_attention", "sliding_attention", "attention", "linear_attention", "mamba", "conv", "hybrid"}
)
# plugins that compile layers
_COMPILING = frozenset({"compile_layers", "compiled"})


class PaddingFreePlugin(AccelerationPlugin[PaddingFree]):
    """Trains without padding; stable."""

    name = "padding_free"
    config_type = PaddingFree

    def __init__(self, config: PaddingFree) -> None:
        super().__init__(config)
        self._facts: Facts | None = None

    def check(self, facts: Facts) -> None:
        """Refuse adapters, options, model types and devices that cannot work.

        Raises:
            UnsupportedError: With the first reason.
        """
        _check_options(facts)
        _check_config(facts.model_config)
        _check_provider(facts)

    def check_model(self, model: nn.Module, facts: Facts) -> None:
        """Refuse a loaded model with a part that cannot be told where samples start.

        Raises:
            UnsupportedError: With the part and the reason.
        """
        for module in model.modules():
            name = type(module).__name__
            if isinstance(module, PreTrainedModel):
                if not has_exchangeable_attention(type(module)):
                    raise _refusal(f"{name} has an attention of its own, which cannot be exchanged")
                if not _takes_any_keyword(module):
                    raise _refusal(
                        f"{name} takes no keyword arguments beside its own, so it cannot be told where samples start"
                    )
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise _refusal(f"{name} normalizes over all tokens of a batch, so samples see each other")
        for name, mixer in find_mixers(model).items():
            if not takes_boundaries(mixer):
                raise _refusal(f"{name} ({type(mixer).__name__}) mixes tokens and cannot be told where samples start")

    def patches(self, model: nn.Module, facts: Facts) -> Sequence[Patch]:
        """Switch the attention, and run layers that mix tokens otherwise sample by sample where they must be."""
        self._facts = facts
        compiles = bool(facts.active & _COMPILING) or bool(getattr(facts.train_args, "torch_compile", False))
        bound = next_power_of_two if compiles else None
        patches = [Patch(name="padding_free.attention", target="", apply=functools.partial(switched, bound=bound))]
        mixers = find_mixers(model)
        if mixers and not has_kernels(facts.device_type):
            if facts.device_type == "cuda":
                _log.warning(
                    "%d layers of %s run sample by sample, which is slow on a GPU: install %s",
                    len(mixers), type(model).__name__, " and ".join(KERNEL_PACKAGES),
                )  # fmt: skip
            apart = functools.partial(run_apart, configs=find_configs(model))
            patches += [Patch(name="padding_free.mixer", target=name, apply=apart) for name in mixers]
        return patches

    def self_test(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Prove that no sample of the first batch can see another.

        Raises:
            PluginError: With the first layer that leaks.
        """
        train_args = self._facts.train_args if self._facts is not None else None
        if getattr(train_args, "isolation_check", "on") == "off":
            _log.warning("--isolation_check off: nothing proves that samples of one batch stay apart")
            return
        autocast = None
        if getattr(train_args, "bf16", False) or getattr(train_args, "fp16", False):
            autocast = torch.bfloat16 if getattr(train_args, "bf16", False) else torch.float16
        seconds = check_isolation(model, batch, autocast=autocast)
        _log.info("isolation: samples of one batch cannot see each other (%.2f s, every layer looked at)", seconds)

    def collator(self, inner: Collator, facts: Facts) -> Collator:
        """Return the flattening collator; ``inner`` pads and is not used."""
        return FlattenedCollator()


def next_power_of_two(length: int) -> int:
    """Return the least power of two that is not below ``length``: few values, so a compiler rarely starts again."""
    return 1 << max(length - 1, 0).bit_length()


def _refusal(reason: str) -> UnsupportedError:
    return UnsupportedError(f"--padding_free was asked for, but {reason}. Train this model without --padding_free.")


def _check_options(facts: Facts) -> None:
    peft = facts.peft_config
    if peft is not None and peft.is_prompt_learning:
        kind = str(getattr(peft.peft_type, "value", peft.peft_type)).lower()
        raise UnsupportedError(
            f"--padding_free was asked for together with {kind}, but its virtual tokens stand before each row, and a "
            "flattened batch has one row for all samples. Use --peft_method lora, or train without --padding_free."
        )
    if getattr(facts.train_args, "packing", False):
        raise UnsupportedError(
            "--padding_free was asked for together with --packing, but both lay samples end to end, and packing loses "
            "where they start. Drop --packing."
        )


def _check_config(config: PretrainedConfig) -> None:
    kind = config.model_type
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise _refusal(f"{kind} is an encoder-decoder, whose two sides have boundaries of their own")
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        raise _refusal(f"{kind} attends in both directions, and the kernels of --padding_free are causal")
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        raise _refusal(
            f"{kind} has layers of type {', '.join(unknown)}, whose rules the boundaries of samples cannot express"
        )
    model_class = cast("Mapping[type, Any]", MODEL_FOR_CAUSAL_LM_MAPPING).get(type(config), None)
    # a class of the checkpoint's own code is looked at once it is loaded
    if model_class is not None and not has_exchangeable_attention(model_class):
        raise _refusal(f"{model_class.__name__} has an attention of its own, which cannot be exchanged")


def _check_provider(facts: Facts) -> None:
    """Refuse a device that has no kernel for this model's attention; the text is the provider table's."""
    # a plain dict: some configs forbid asking for what differs between layers
    text = facts.model_config.get_text_config().to_dict()
    heads = text.get("num_attention_heads") or text.get("n_head")
    hidden = text.get("hidden_size") or text.get("n_embd")
    width = text.get("head_dim") or (hidden // heads if heads and hidden else None)
    if not isinstance(width, int):
        return
    choose(
        Request(
            device_type=facts.device_type,
            capability=facts.compute_capability,
            dtype=_compute_dtype(facts),
            width=width,
            value_width=text.get("v_head_dim") or width,
            window=text.get("sliding_window") is not None,
            softcap=text.get("attn_logit_softcapping") is not None,
            sinks=False,
            dropout=(text.get("attention_dropout") or 0.0) > 0,
        )
    )


def _compute_dtype(facts: Facts) -> torch.dtype:
    if getattr(facts.train_args, "bf16", False):
        return torch.bfloat16
    if getattr(facts.train_args, "fp16", False):
        return torch.float16
    dtype = facts.model_kwargs.get("dtype")
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(facts.model_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _takes_any_keyword(module: nn.Module) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(module.forward).parameters.values())
