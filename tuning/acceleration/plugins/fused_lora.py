"""``--fused_lora``: LoRA layers computed a block at a time, with a backward that keeps little.

Three kinds of blocks are taken, each found on the model that peft has wrapped:

- ``qkv``: the adapted query, key and value projections of one attention module. The first that is called computes
  all of them for its input, the others hand out their result if they get that same input;
- ``mlp``: a gated MLP of which at least one layer has an adapter, with its activation by the kernel of
  ``--fast_kernels swiglu`` (or its reference where Triton cannot run);
- ``linear``: every other adapted layer.

The base may be dense, GPTQ or 4-bit bitsandbytes. A layer that is switched off or merged for a moment computes as
without the plugin. docs/adr/040-quantised-bases-and-fused-lora.md has the alternatives.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tuning.acceleration.plugin import AccelerationPlugin, Facts, Patch
from tuning.config.acceleration_configs import FusedLoraConfig
from tuning.errors import PluginError
from tuning.logs import logger
from tuning.models import structure
from tuning.models.forwards import own_forward
from tuning.models.lora_layers import LoraParts, find_lora_layers, frozen_parts, why_not_sharded

__all__ = ["FusedLoraPlugin"]

_log = logger(__name__)
# as Llama names them; a family that names or shapes them otherwise gets its layers one by one
_QKV = ("q_proj", "k_proj", "v_proj")
_PARTS, _GROUP = "_fused_lora_parts", "_fused_lora_group"
# a flag that loads the base, by the name that --fused_lora has for it
_BASES = {"auto_gptq": "auto_gptq", "bitsandbytes": "bnb_qlora"}


@dataclass(slots=True)
class _Group:
    """Layers that read one input; ``ready`` holds what was computed for ``source`` and not yet handed out."""

    members: tuple[nn.Module, ...]
    source: torch.Tensor | None = None
    ready: dict[int, torch.Tensor] = field(default_factory=dict)


class FusedLoraPlugin(AccelerationPlugin[FusedLoraConfig]):
    """Computes LoRA layers in fused blocks; stable."""

    name = "fused_lora"
    config_type = FusedLoraConfig

    def check(self, facts: Facts) -> None:
        """Refuse a run without LoRA, variants of it, another base than the one named, and sharded parameters.

        Raises:
            PluginError: With the reason.
        """
        base = self.config.base_layer
        peft_config = facts.peft_config
        if getattr(getattr(peft_config, "peft_type", None), "value", None) != "LORA":
            raise PluginError(
                f"--fused_lora {base} fuses LoRA adapters, but this run trains none; add --peft_method lora or drop "
                "--fused_lora"
            )
        flag = _BASES.get(base)
        if flag is not None and flag not in facts.active:
            raise PluginError(
                f"--fused_lora {base} needs a quantised base, but --{flag} does not load one; add --{flag}, or use "
                "--fused_lora auto"
            )
        for name, what in (("use_dora", "DoRA"), ("lora_bias", "LoRA with a bias in the adapter")):
            if getattr(peft_config, name, False):
                raise PluginError(
                    f"--fused_lora {base} computes plain LoRA, but {name} asks for {what}; drop one of the two"
                )
        reason = why_not_sharded(facts.train_args)
        if reason:
            raise PluginError(
                f"--fused_lora {base} computes whole blocks of a layer at once, but {reason}; use --fsdp with version "
                "2 and TRANSFORMER_BASED_WRAP, which gathers a layer as a whole, or drop --fused_lora"
            )

    def check_model(self, model: nn.Module, facts: Facts) -> None:
        """Refuse a model with several adapters, and one of which no layer can be fused.

        Raises:
            PluginError: With the reasons.
        """
        self._plan(model)

    def patches(self, model: nn.Module, facts: Facts) -> Sequence[Patch]:
        """List the blocks, and log which layers were left out and why.

        Raises:
            PluginError: As :meth:`check_model`.
        """
        patches, unfit = self._plan(model)
        if unfit:
            reasons = "\n".join(f"  {target}: {reason}" for target, reason in _first_of_each(unfit).items())
            _log.info("%d adapted layers are computed unfused, for example\n%s", len(unfit), reasons)
        if facts.active & {"fast_kernels"} and any(patch.name == "fused_lora.mlp" for patch in patches):
            _log.info("fused_lora.mlp computes the activation by the kernel of --fast_kernels swiglu inside its blocks")
        return patches

    def _plan(self, model: nn.Module) -> tuple[list[Patch], dict[str, str]]:
        """Return the patches, and (layer, reason) for every adapted layer that is left as it is."""
        parts, unfit = find_lora_layers(model)
        if not parts:
            reasons = "; ".join(f"{target} {reason}" for target, reason in _first_of_each(unfit).items())
            raise PluginError(
                f"--fused_lora {self.config.base_layer} was asked for, but no adapted layer of {type(model).__name__} "
                f"can be fused: {reasons or 'there is none'}; drop the flag"
            )
        left = dict(parts)
        patches = [*_mlp_patches(model, left), *_qkv_patches(left)]
        patches += [
            Patch(name="fused_lora.linear", target=target, apply=functools.partial(_with_linear, parts=of))
            for target, of in left.items()
        ]
        return patches, unfit


def _first_of_each(unfit: Mapping[str, str]) -> dict[str, str]:
    first: dict[str, str] = {}
    for target, reason in unfit.items():
        if reason not in first.values():
            first[target] = reason
    return first


def _layer(parts: LoraParts) -> Any:  # noqa: ANN401 - a LoraLayer, whose module needs triton
    """Return the kernel's description of a layer as it is now."""
    from tuning.kernels.lora import LoraLayer  # noqa: PLC0415 - needs triton, which not every torch brings

    owner, bias = parts.owner, parts.base.bias
    if owner is None:
        return LoraLayer(weight=parts.weight, bias=bias)
    return LoraLayer(
        weight=parts.weight,
        bias=bias,
        down=parts.down.weight,
        up=parts.up.weight,
        scale=owner.scaling[parts.adapter],
        dropout=parts.dropout.p if isinstance(parts.dropout, nn.Dropout) and parts.dropout.training else 0.0,
    )


@contextmanager
def _with_attribute(module: nn.Module, name: str, value: object) -> Iterator[None]:
    module.__dict__[name] = value
    try:
        yield
    finally:
        module.__dict__.pop(name, None)


# ---- single layers ----


def _linear_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
    from tuning.kernels.lora import lora_linear  # noqa: PLC0415 - as above

    parts: LoraParts = self.__dict__[_PARTS]
    if args or kwargs or not parts.is_plain_now():
        return type(self).forward(self, x, *args, **kwargs)
    return lora_linear(x, [_layer(parts)])[0]


@contextmanager
def _with_linear(module: nn.Module, *, parts: LoraParts) -> Iterator[None]:
    with _with_attribute(module, _PARTS, parts), own_forward(module, _linear_forward):
        yield


# ---- queries, keys and values ----


def _qkv_patches(left: dict[str, LoraParts]) -> list[Patch]:
    """Return a patch for each attention module with two or three adapted projections; they are taken from ``left``."""
    patches = []
    for owner in dict.fromkeys(target.rpartition(".")[0] for target in left):
        names = [name for name in _QKV if f"{owner}.{name}" in left]
        if len(names) < 2:
            continue
        parts = {name: left.pop(f"{owner}.{name}") for name in names}
        patches.append(
            Patch(name="fused_lora.qkv", target=owner, apply=functools.partial(_with_qkv, parts=parts)),
        )
    return patches


def _qkv_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
    """Compute all layers of the group for ``x``, or hand out what another one has computed for it."""
    from tuning.kernels.lora import lora_linear  # noqa: PLC0415 - as above

    group: _Group = self.__dict__[_GROUP]
    if group.source is x and id(self) in group.ready:
        out = group.ready.pop(id(self))
        if not group.ready:
            group.source = None
        return out
    parts = [member.__dict__[_PARTS] for member in group.members]
    if args or kwargs or not all(part.is_plain_now() for part in parts):
        return type(self).forward(self, x, *args, **kwargs)
    group.ready.clear()
    if self is not group.members[0]:
        # not called first: an attention that reads keys from elsewhere
        return lora_linear(x, [_layer(self.__dict__[_PARTS])])[0]
    outs = lora_linear(x, [_layer(part) for part in parts])
    group.source = x
    group.ready.update({id(member): out for member, out in zip(group.members[1:], outs[1:], strict=True)})
    return outs[0]


@contextmanager
def _with_qkv(module: nn.Module, *, parts: Mapping[str, LoraParts]) -> Iterator[None]:
    members = tuple(module.get_submodule(name) for name in parts)
    group = _Group(members)
    with ExitStack() as stack:
        for member, of in zip(members, parts.values(), strict=True):
            stack.enter_context(_with_attribute(member, _PARTS, of))
            stack.enter_context(_with_attribute(member, _GROUP, group))
            stack.enter_context(own_forward(member, _qkv_forward))
        yield


# ---- gated MLPs ----


def _mlp_patches(model: nn.Module, left: dict[str, LoraParts]) -> list[Patch]:
    """Return a patch for each gated MLP with an adapter in it; its layers are taken from ``left``."""
    patches = []
    for site in structure.find_gated_mlps(model)[0]:
        if site.up is None:
            continue
        names = (site.gate, site.up, site.down)
        prefix = f"{site.target}." if site.target else ""
        parts = [left.get(prefix + name) or frozen_parts(model.get_submodule(prefix + name)) for name in names]
        if not any(prefix + name in left for name in names) or None in parts:
            continue
        for name in names:
            left.pop(prefix + name, None)
        known = tuple(part for part in parts if part is not None)
        patches.append(
            Patch(
                name="fused_lora.mlp",
                target=site.target,
                apply=functools.partial(_with_mlp, parts=known, activation=site.activation),
            )
        )
    return patches


@dataclass(frozen=True, slots=True)
class _MLP:
    parts: tuple[LoraParts, ...]
    activation: str


def _mlp_forward(self: Any, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    from tuning.kernels.lora import lora_gated_mlp  # noqa: PLC0415 - as above
    from tuning.kernels.swiglu import glu_backward, glu_forward  # noqa: PLC0415 - as above

    block: _MLP = self.__dict__[_PARTS]
    if not all(part.is_plain_now() for part in block.parts):
        return type(self).forward(self, *args, **kwargs)
    (x,) = (*args, *kwargs.values())
    gate, up, down = (_layer(part) for part in block.parts)
    return lora_gated_mlp(
        x, gate, up, down,
        glu=functools.partial(glu_forward, activation=block.activation),
        glu_backward=functools.partial(glu_backward, activation=block.activation),
    )  # fmt: skip


@contextmanager
def _with_mlp(module: nn.Module, *, parts: tuple[LoraParts, ...], activation: str) -> Iterator[None]:
    with _with_attribute(module, _PARTS, _MLP(parts, activation)), own_forward(module, _mlp_forward):
        yield
