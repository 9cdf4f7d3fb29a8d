"""Flags that are no field any more: renamed, always done, or refused by name.

They come from fms-hf-tuning and from older versions of transformers, whose configurations shall keep working. What
cannot work any more is refused with what to do instead, never ignored.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from tuning.config.values import BOOL_WORDS
from tuning.errors import ConfigError

__all__ = ["ALWAYS", "REFUSED", "RENAMED", "convert_renamed", "read_always", "read_trackers"]

# old name -> flag
RENAMED: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "dtype": "torch_dtype",
        "evaluation_strategy": "eval_strategy",
        "group_by_length": "train_sampling_strategy",
        "no_cuda": "use_cpu",
        "per_gpu_eval_batch_size": "per_device_eval_batch_size",
        "per_gpu_train_batch_size": "per_device_train_batch_size",
        "warmup_ratio": "warmup_steps",
    }
)
# flag -> the only value that is what happens anyway, and why
ALWAYS: Final[Mapping[str, tuple[str, str]]] = types.MappingProxyType(
    {
        "enable_reduce_loss_sum": ("true", "the loss is always a mean over the supervised tokens of the whole step"),
        "include_tokens_per_second": ("true", "real tokens a second are always in the log"),
        "loss_across_gpus": ("mean token", "the loss is always a mean over the supervised tokens of all GPUs"),
        "save_safetensors": ("true", "checkpoints are always safetensors"),
    }
)
# flag -> why not, and what to do
REFUSED: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "accelerate_launch_args": "belongs to the launcher; give its entries to accelerate launch and drop the key",
        **dict.fromkeys(
            ("aim_experiment", "aim_remote_server_ip", "aim_remote_server_port", "aim_repo", "aim_url"),
            "needs the Aim tracker, which transformers does not support; use --report_to with another one",
        ),
        "cache_dir": "is not a flag here; set the variable HF_HOME instead",
        "fast_moe": "has no counterpart here, experts run as the model has them; drop the flag",
        "logging_dir": "is gone from transformers; set the variable TENSORBOARD_LOGGING_DIR instead",
        "lora_post_process_for_vllm": "is not done here; merge the adapter after training instead",
        "post_process_vllm": "is not done here; merge the adapter after training instead",
        "mp_parameters": "is gone from transformers; drop the flag",
        "overwrite_output_dir": "is gone from transformers; name an empty --output_dir, or say what to resume from "
        "with --resume_from_checkpoint",
        "trainer_controller_config_file": "is not supported; pass a trainer callback to tuning.run.train instead",
        "training_logs_filename": "cannot be chosen; the log is always training_logs.jsonl in --output_dir",
    }
)
_REPORT_TO_ITSELF = frozenset({"file_logger", "none"})
_UNSUPPORTED_TRACKERS = frozenset({"aim", "hf_resource_scanner"})


def convert_renamed(name: str, value: object) -> object:
    """Return ``value`` of the old flag ``name`` as its new flag takes it; None: not asked.

    Raises:
        ValueError: With what the old flag took.
    """
    if name == "group_by_length":
        on = BOOL_WORDS.get(str(value).lower())
        if on is None:
            raise ValueError("true or false")
        return "group_by_length" if on else None
    if name == "warmup_ratio":
        try:
            ratio = float(str(value))
        except ValueError as error:
            raise ValueError("a number from 0 to below 1") from error
        if not 0 <= ratio < 1:
            raise ValueError("a number from 0 to below 1")
        return ratio
    return value


def read_always(name: str, value: object, label: str) -> tuple[str | None, str | None]:
    """Judge a flag whose one good value is what happens anyway.

    Args:
        name: Key of :data:`ALWAYS`.
        value: As it was given.
        label: The flag as messages shall name it.

    Returns:
        A note or None, then a problem or None.
    """
    wanted, why = ALWAYS[name]
    text = " ".join(str(value).lower().split())
    if BOOL_WORDS.get(text, text) == BOOL_WORDS.get(wanted, wanted):
        return f"{label} {wanted} changes nothing: {why}", None
    return None, f"{label} was given {text}, but {why}; give {wanted} or drop the flag"


def read_trackers(value: str | list[str], label: str) -> list[str]:
    """Return what ``report_to`` is for a list of fms-hf-tuning's trackers.

    Raises:
        ConfigError: If a tracker is not supported, or none comes with others.
    """
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    for name in names:
        if name in _UNSUPPORTED_TRACKERS:
            raise ConfigError(
                f"{label} was given {name}, which is not supported; name a tracker that --report_to takes"
            )
    if "none" in names and len(names) > 1:
        raise ConfigError(f"{label} was given none together with other trackers; keep none or the others")
    return [name for name in names if name not in _REPORT_TO_ITSELF]
