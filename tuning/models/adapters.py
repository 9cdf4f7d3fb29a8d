"""Adapters: our peft flags to peft's config objects, and a model wrapped by them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.errors import ConfigError, ModelError
from tuning.logs import logger

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["ALL_LINEAR", "build_peft_config", "wrap"]

ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the head
# Llama's names; other families have other ones
EMBEDDING, HEAD = "embed_tokens", "lm_head"
_log = logger(__name__)


def build_peft_config(
    config: LoraConfig | PromptTuningConfig | None, *, tokenizer_name: str, has_new_tokens: bool
) -> Any:  # noqa: ANN401 - a peft config
    """Return peft's own config for ours.

    Args:
        config: From the command line, None for full fine-tuning, or a peft config, which is returned as it is.
        tokenizer_name: Tokenizer that prompt tuning reads its start text with.
        has_new_tokens: Tokens were added, so embedding and head train and are saved in full.

    Raises:
        ConfigError: If peft refuses the values, or prompt tuning is to train new tokens.
    """
    import peft  # noqa: PLC0415 - a second; full fine-tuning does not need it

    if config is None:
        return None
    if isinstance(config, PromptTuningConfig) and has_new_tokens:
        raise ConfigError(
            "--add_special_tokens with --peft_method pt would leave the new tokens untrained, since prompt tuning "
            "trains virtual tokens alone; use --peft_method lora or none"
        )
    try:
        if isinstance(config, LoraConfig):
            return peft.LoraConfig(
                task_type="CAUSAL_LM",
                r=config.r,
                lora_alpha=config.lora_alpha,
                target_modules=_targets(config.target_modules),
                bias=config.bias,
                lora_dropout=config.lora_dropout,
                use_rslora=config.use_rslora,
                use_dora=config.use_dora,
                modules_to_save=_modules_to_save(config.modules_to_save, has_new_tokens=has_new_tokens),
            )
        if isinstance(config, PromptTuningConfig):
            starts_from_text = config.prompt_tuning_init == "TEXT"
            return peft.PromptTuningConfig(
                task_type="CAUSAL_LM",
                prompt_tuning_init=config.prompt_tuning_init,
                num_virtual_tokens=config.num_virtual_tokens,
                prompt_tuning_init_text=config.prompt_tuning_init_text if starts_from_text else None,
                tokenizer_name_or_path=tokenizer_name if starts_from_text else None,
            )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The adapter options were refused: {error}") from error
    return config


def wrap(model: PreTrainedModel, peft_config: Any) -> nn.Module:  # noqa: ANN401 - a peft config
    """Return ``model`` wrapped by peft; its own modules are changed in place.

    Embedding and head are found by what they are, so ``modules_to_save`` may name them as Llama does in any model;
    where they share a weight, they share what is trained too.

    Raises:
        ModelError: If a module that was asked for is not in the model, or the head is to get an adapter.
    """
    import peft  # noqa: PLC0415 - a second; full fine-tuning does not need it

    peft_config = _fit_config(model, peft_config)
    try:
        wrapped = peft.get_peft_model(model, peft_config)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"The adapters do not fit {type(model).__name__}: {error}") from error
    trainable, total = wrapped.get_nb_trainable_parameters()
    _log.info("training %s of %s parameters (%.2f %%)", f"{trainable:,}", f"{total:,}", 100 * trainable / total)
    return wrapped


def _fit_config(model: PreTrainedModel, peft_config: Any) -> Any:  # noqa: ANN401 - a peft config
    """Return ``peft_config`` with the names of this model's embedding and head, all names checked."""
    ends = {id(model.get_input_embeddings()): EMBEDDING, id(model.get_output_embeddings()): HEAD}
    own = {ends[id(module)]: name for name, module in model.named_modules() if id(module) in ends}
    fitted = copy.copy(peft_config)
    if getattr(peft_config, "modules_to_save", None):
        named = [own[name].rpartition(".")[2] if name in own else name for name in peft_config.modules_to_save]
        fitted.modules_to_save = named
        ends_named = {own[end].rpartition(".")[2] for end in own} & set(named)
        if ends_named and _shares_ends(model):
            fitted.ensure_weight_tying = True
        _check_names(model, "modules_to_save", named)
    targets = getattr(peft_config, "target_modules", None)
    if targets is not None and not isinstance(targets, str):
        _check_names(model, "target_modules", sorted(targets))
        head = own.get(HEAD, HEAD)
        if any(_matches(head, name) for name in targets):
            raise ModelError(
                f"--target_modules names {head}, the head, whose output the loss computes in parts without calling "
                "it, so an adapter there would never train; drop it, or train the head in full by --modules_to_save"
            )
    return fitted


def _shares_ends(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _check_names(model: nn.Module, flag: str, names: Sequence[str]) -> None:
    known = [name for name, _ in model.named_modules()]
    absent = [name for name in names if not any(_matches(module, name) for module in known)]
    if absent:
        leaves = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if _is_leaf(module)})
        raise ModelError(
            f"--{flag} names {', '.join(absent)}, which {type(model).__name__} does not have; its modules are "
            f"{', '.join(leaves)}"
        )


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and any(True for _ in module.parameters())


def _matches(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _targets(names: list[str] | None) -> str | list[str]:
    if not names or list(names) == [ALL_LINEAR]:
        return ALL_LINEAR
    return list(names)


def _modules_to_save(names: list[str] | None, *, has_new_tokens: bool) -> list[str] | None:
    modules = list(names or [])
    if has_new_tokens:
        modules += [name for name in (EMBEDDING, HEAD) if name not in modules]
        _log.info("tokens were added: %s train and are saved in full beside the adapters", ", ".join(modules))
    return modules or None
