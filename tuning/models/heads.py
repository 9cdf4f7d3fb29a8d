"""Find the output head of a causal model, and what it makes of its input.

What a model does to its logits after the product (a factor in Granite and Cohere, a softcap in Gemma) is asked of its
own forward, run on stand-ins for its layers and its head; no name of a configuration value is relied on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tuning.models.stand_ins import Backbone, call, shallow_copy, small_linear

__all__ = ["Head", "base_and_low_rank", "find_causal_model", "find_head", "head_parts"]

_WIDTH, _VOCAB = 6, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The causal model's last step: ``softcap(scale * head(hidden))``.

    Attributes:
        model: Qualified name of the causal model, ``""`` for the model itself.
        layer: Attribute of that model which holds the head.
        scale: Factor on the logits.
        softcap: Bound of the logits after the factor; 0 is none.
    """

    model: str
    layer: str
    scale: float
    softcap: float


def find_causal_model(model: nn.Module) -> str | None:
    """Return the name of the part of ``model`` that holds an output head; ``""`` is the model itself."""
    for target, module in model.named_modules():
        if hasattr(type(module), "get_output_embeddings") and isinstance(call(module.get_output_embeddings), nn.Module):
            return target
    return None


def find_head(model: nn.Module) -> tuple[Head | None, str]:
    """Return the head of the causal model in ``model``, or None and why there is none that can be described."""
    target = find_causal_model(model)
    if target is None:
        return None, "has no output head"
    module: Any = model.get_submodule(target)
    head, layers = module.get_output_embeddings(), getattr(module, "base_model", None)
    layer = next((name for name, child in module.named_children() if child is head), None)
    below = next((name for name, child in module.named_children() if child is layers), None)
    if layer is None or below is None:
        return None, "holds its head or its layers deeper than as a direct part"
    answer = _scale_and_softcap(module, layer, below)
    if answer is None:
        return None, "calls its layers in a way of its own, or changes its logits by more than a factor and a softcap"
    return Head(model=target, layer=layer, scale=answer[0], softcap=answer[1]), ""


def _scale_and_softcap(module: nn.Module, layer: str, below: str) -> tuple[float, float] | None:
    """Ask a causal model on stand-ins what it does to its logits; None if it is not ``softcap(scale * x)``."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 7, _WIDTH, generator=generator, dtype=torch.float64)
    head = small_linear(_WIDTH, _VOCAB, generator, dtype=torch.float64)
    plain = head(hidden)
    stand_in = shallow_copy(module)

    def logits(factor: float) -> torch.Tensor | None:
        stand_in.__dict__["_modules"].update({layer: head, below: Backbone(hidden * factor)})
        answer = call(type(module).forward, stand_in, input_ids=torch.zeros(1, 7, dtype=torch.long))
        out = getattr(answer, "logits", None)
        if not isinstance(out, torch.Tensor) or out.shape != plain.shape or not torch.isfinite(out).all():
            return None
        return out.double()

    tiny, small, middle, huge = (logits(factor) for factor in (1e-6, 1.0, 30.0, 1e9))
    if tiny is None or small is None or middle is None or huge is None:
        return None
    # 12 digits: what a division or a softcap leaves behind them is not part of the factor
    scale = float(f"{float((tiny / (1e-6 * plain)).median()):.12g}")
    capped = float(huge.abs().max()) < 0.5 * abs(scale) * 1e9 * float(plain.abs().max())
    softcap = float(huge.abs().max()) if capped else 0.0
    for factor, out in ((1.0, small), (30.0, middle)):
        expected = scale * factor * plain
        if softcap:
            expected = softcap * torch.tanh(expected / softcap)
        if not torch.allclose(out, expected, rtol=1e-4, atol=1e-6):
            return None
    return scale, softcap


def head_parts(head: nn.Module) -> tuple[list[nn.Module], str]:
    """Return the modules that may make the logits in ``head``, or none and why it is no head that can be described.

    A plain linear layer, a LoRA layer around one, or peft's pair of the original and the copy that is trained.
    """
    copies = getattr(head, "modules_to_save", None)
    parts = [head]
    if isinstance(copies, nn.ModuleDict):
        parts = [head.get_submodule("original_module"), *copies.values()]
    for part in parts:
        reason = _why_not_linear(part) if _adapters(part) is None else _why_not_lora(part)
        if reason:
            return [], reason
    return parts, ""


def _adapters(part: Any) -> Any:  # noqa: ANN401 - peft's dictionaries of layers
    return getattr(part, "lora_A", None) if hasattr(part, "base_layer") else None


def _why_not_linear(part: Any) -> str:  # noqa: ANN401 - any module, or none
    if not isinstance(part, nn.Linear) or type(part).forward is not nn.Linear.forward:
        return f"the head is a {type(part).__name__}, not a plain linear layer"
    return "" if part.weight.is_floating_point() else "the head's weight is quantised"


def _why_not_lora(part: Any) -> str:  # noqa: ANN401 - a LoRA layer of peft
    active = list(part.active_adapters)
    if len(active) != 1 or active[0] not in part.lora_A:
        return f"the head has {len(active)} active adapters, not one"
    if getattr(part, "lora_variant", None) or (getattr(part, "use_dora", None) or {}).get(active[0]):
        return "the head's adapter is a variant of LoRA"
    if part.lora_B[active[0]].bias is not None:
        return "the head's adapter has a bias"
    return _why_not_linear(part.base_layer)


def base_and_low_rank(part: Any, hidden: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, torch.Tensor] | None]:  # noqa: ANN401
    """Return the linear layer of a head, and what a LoRA layer around it adds to the logits."""
    if _adapters(part) is None:
        return part, None
    if part.disable_adapters or part.merged:
        return part.base_layer, None
    name = part.active_adapters[0]
    down, up = part.lora_A[name], part.lora_B[name]
    inner = down(part.lora_dropout[name](hidden.to(down.weight.dtype))) * part.scaling[name]
    return part.base_layer, (inner.reshape(-1, inner.shape[-1]), up.weight)
