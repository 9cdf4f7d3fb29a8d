"""The adapted linear layers of a model that peft has wrapped: which can be computed in one go, and their parts.

A layer qualifies by what it is made of: one active plain adapter over a frozen linear layer whose dense weight can be
had, be it stored dense, by GPTQ, or in 4 bits by bitsandbytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tuning.errors import PluginError
from tuning.models.gptq import GPTQLinear

__all__ = ["LoraParts", "find_lora_layers", "frozen_parts", "why_not_sharded"]

Weight = Callable[[torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoraParts:
    """The modules of one layer, looked up once.

    Attributes:
        base: The frozen layer.
        weight: Gives its dense weight ``[out, in]`` in a dtype.
        owner: peft's layer, or None without an adapter.
        down: ``A``, a linear layer.
        up: ``B``, a linear layer.
        dropout: Before ``A``.
        adapter: Name of the adapter.
    """

    base: Any
    weight: Weight
    owner: Any = None
    down: Any = None
    up: Any = None
    dropout: Any = None
    adapter: str = ""

    def is_plain_now(self) -> bool:
        """Say whether the layer computes what it was found to: not switched off, merged, or another adapter."""
        owner = self.owner
        return owner is None or not (
            owner.disable_adapters or owner.merged or list(owner.active_adapters) != [self.adapter]
        )


def find_lora_layers(model: nn.Module) -> tuple[dict[str, LoraParts], dict[str, str]]:
    """Return the adapted layers that can be fused, and the others with their reasons.

    Raises:
        PluginError: If a layer has several active adapters.
    """
    from peft.tuners.lora import LoraLayer as AdaptedLayer  # noqa: PLC0415 - a second; runs without LoRA do not need it

    found: dict[str, LoraParts] = {}
    unfit: dict[str, str] = {}
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    for target, module in model.named_modules():
        if not isinstance(module, AdaptedLayer):
            continue
        active = list(module.active_adapters)
        if len(active) != 1:
            raise PluginError(
                f"--fused_lora computes one adapter, but {target} has {len(active)} active ({', '.join(active)}); "
                "activate one, or drop --fused_lora"
            )
        reason = "is the embedding or the head" if any(module is end for end in ends) else ""
        reason = reason or _why_not(module, active[0])
        if reason:
            unfit[target] = reason
            continue
        base: Any = module.get_base_layer()
        found[target] = LoraParts(
            base, _weight_of(base), module, module.lora_A[active[0]], module.lora_B[active[0]],
            module.lora_dropout[active[0]], active[0],
        )  # fmt: skip
    return found, unfit


def _why_not(module: Any, adapter: str) -> str:  # noqa: ANN401 - a LoRA layer of peft
    """Return why an adapted layer cannot be fused, or nothing."""
    if adapter not in module.lora_A:
        return f"({type(module).__name__}) adapts no matrix of a linear layer"
    if adapter in module.lora_variant:
        return "has a variant of LoRA"
    if module.fan_in_fan_out:
        return "stores its weight the other way round"
    if module.lora_A[adapter].bias is not None or module.lora_B[adapter].bias is not None:
        return "has an adapter with a bias"
    if "forward" in module.__dict__:
        return "has another forward already"
    return _why_not_base(module.get_base_layer())


def _why_not_base(base: nn.Module) -> str:
    if isinstance(base, GPTQLinear) or _is_bnb(base):
        return ""
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        return f"is over a {type(base).__name__}, which is no linear layer that it knows"
    if not base.weight.is_floating_point():
        return "is over a quantised weight that it does not know"
    return "is over a weight that trains" if base.weight.requires_grad else ""


def _is_bnb(base: nn.Module) -> bool:
    return hasattr(getattr(base, "weight", None), "quant_state")


def _weight_of(base: Any) -> Weight:  # noqa: ANN401 - a linear layer of any library
    """Return what gives the dense weight of a base."""
    if isinstance(base, GPTQLinear):
        return base.unpacked
    return functools.partial(_bnb_weight if _is_bnb(base) else _dense_weight, base)


def _dense_weight(base: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    return base.weight.to(dtype)


def _bnb_weight(base: Any, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401 - bitsandbytes' layer
    from bitsandbytes import functional  # noqa: PLC0415 - an extra

    # a weight that FSDP has gathered is a plain tensor; the layer keeps the state too
    state = getattr(base.weight, "quant_state", None) or base.quant_state
    return functional.dequantize_4bit(base.weight.data, state).to(dtype)


def frozen_parts(module: nn.Module) -> LoraParts | None:
    """Return the parts of a layer without an adapter, or None if its weight cannot be had or trains."""
    if "forward" in module.__dict__ or _why_not_base(module):
        return None
    return LoraParts(module, _weight_of(module))


def why_not_sharded(train_args: Any) -> str:  # noqa: ANN401 - training arguments
    """Return why a run would not gather the parameters of a decoder layer as a whole, or nothing."""
    if getattr(train_args, "deepspeed", None):
        return "--deepspeed gathers the parameters of each module by itself"
    if not getattr(train_args, "fsdp", None):
        return ""
    config = getattr(train_args, "fsdp_config", None) or {}
    if int(config.get("version", 2)) != 2:
        return "version 1 of --fsdp flattens the adapters of each module by themselves"
    if config.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP") == "SIZE_BASED_WRAP":
        return "SIZE_BASED_WRAP of --fsdp gathers the parameters of each module by itself"
    return ""
