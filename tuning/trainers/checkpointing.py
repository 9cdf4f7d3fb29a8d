"""How activations are recomputed where the user left it to us: the way that costs the host least.

At small batches a step is bound by the host, and recomputing doubles what it has to do. Two habits of
``torch.utils.checkpoint`` cost much of that: hooks around every saved tensor (``use_reentrant=False``), and a copy of
the random state of every layer (``preserve_rng_state``). Neither changes a bit of the result where it is left out here:
reentrant recomputation needs an input that requires a gradient and no side output such as router logits, and the random
state matters to dropout alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from tuning.trainers.arguments import TrainingArguments

__all__ = ["choose_checkpointing_", "has_dropout"]


def choose_checkpointing_(args: TrainingArguments, model: nn.Module) -> None:
    """Write into ``args`` how activations are recomputed, unless they are kept or the user said how.

    Args:
        args: Complete training arguments.
        model: Ready to train, wrapped by peft where asked.
    """
    if not args.gradient_checkpointing or args.gradient_checkpointing_kwargs:
        return
    kwargs: dict[str, Any] = {"use_reentrant": _may_be_reentrant(args, model)}
    if not has_dropout(model):
        kwargs["preserve_rng_state"] = False
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        # transformers from 5.24 has both names
        if hasattr(args, name):
            setattr(args, name, dict(kwargs))


def has_dropout(model: nn.Module) -> bool:
    """Say whether any module of ``model`` drops out: by a dropout layer, or by a rate it hands to a function."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "dropout" in name or (name == "p" and "dropout" in type(module).__name__.lower())
            if is_rate and isinstance(value, float) and value > 0:
                return True
    return False


def _may_be_reentrant(args: TrainingArguments, model: Any) -> bool:  # noqa: ANN401 - a model of transformers
    alone = args.world_size == 1 and not args.deepspeed and not args.fsdp and not args.torch_compile
    has_router = hasattr(model.config.get_text_config(), "output_router_logits")
    embedding = model.get_input_embeddings()
    # peft's adapters train under a frozen embedding; TRL makes its output require a gradient
    has_gradient = hasattr(model, "peft_config") or any(p.requires_grad for p in embedding.parameters())
    return alone and not has_router and has_gradient
