"""Adapters: our peft flags to peft's config objects, and a model wrapped by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.errors import ConfigError, ModelError
from tuning.logs import logger

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ALL_LINEAR", "build_peft_config", "wrap"]

ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the head
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
            if has_new_tokens:
                raise ConfigError(
                    "--add_special_tokens with --peft_method pt would leave the new tokens untrained, since prompt "
                    "tuning trains virtual tokens alone; use --peft_method lora or none"
                )
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


def wrap(model: nn.Module, peft_config: Any) -> nn.Module:  # noqa: ANN401 - a peft config
    """Return ``model`` wrapped by peft; its own modules are changed in place.

    Raises:
        ModelError: If no module of the model has the names asked for.
    """
    import peft  # noqa: PLC0415 - a second; full fine-tuning does not need it

    try:
        wrapped = peft.get_peft_model(model, peft_config)
    except (ValueError, KeyError) as error:
        raise ModelError(f"The adapters do not fit {type(model).__name__}: {error}") from error
    trainable, total = wrapped.get_nb_trainable_parameters()
    _log.info("training %s of %s parameters (%.2f %%)", f"{trainable:,}", f"{total:,}", 100 * trainable / total)
    return wrapped


def _targets(names: list[str] | None) -> str | list[str]:
    if not names or list(names) == [ALL_LINEAR]:
        return ALL_LINEAR
    return list(names)


def _modules_to_save(names: list[str] | None, *, has_new_tokens: bool) -> list[str] | None:
    modules = list(names or [])
    if has_new_tokens:
        modules += [name for name in ("embed_tokens", "lm_head") if name not in modules]
        _log.info("tokens were added: %s train and are saved in full beside the adapters", ", ".join(modules))
    return modules or None
