"""``TrainingArguments``: TRL's SFTConfig with the fields that packtune decides itself.

The command line learns the fields of this class and of its bases by reading their source (``tuning.config.catalog``),
so a field declared here is a flag at once. A field redeclared with ``init=False`` is no flag: another dataclass of
ours has a flag of that name, or the plugins decide it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import SFTConfig

from tuning.errors import ConfigError

__all__ = ["TrainingArguments", "build"]


@dataclass
class TrainingArguments(SFTConfig):
    """All of Hugging Face's and TRL's training arguments, and a few of our own."""

    # ours: --padding_free is an acceleration flag, --dataset_text_field a data argument
    padding_free: bool = field(default=False, init=False)
    dataset_text_field: str = field(default="text", init=False)

    max_length: int | None = field(
        default=None, metadata={"help": "TRL's name of max_seq_length; giving both with different values is an error."}
    )
    gradient_checkpointing: str = field(
        default="auto",
        metadata={
            "help": "Recompute activations in the backward pass: true, false, or auto (default), which decides by "
            "device and model size and says so.",
            "choices": ["auto", "true", "false"],
            "nargs": "?",
            "const": "true",
        },
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={
            "help": "Replace a NaN or infinite loss in the logs by the running mean. Off by default: it waits for "
            "the device at every micro-step, and it hides what happened."
        },
    )
    save_model_dir: str | None = field(
        default=None,
        metadata={"help": "Folder for the final model and tokenizer; default: output_dir."},
    )
    isolation_check: str = field(
        default="on",
        metadata={
            "help": "Prove before training that samples of one flattened batch cannot see each other: on or off.",
            "choices": ["on", "off"],
        },
    )

    def __post_init__(self) -> None:
        """Resolve our own choices, then let TRL and transformers resolve theirs.

        Raises:
            ConfigError: If ``gradient_checkpointing`` is no known word, its two names contradict each other, fp16 or
                offloading is asked for on the CPU, or a tracker is unknown or not installed.
        """
        on_cpu = self.use_cpu or not torch.cuda.is_available()
        if self.fp16 and on_cpu:
            raise ConfigError(
                "--fp16 needs a GPU, and this run is on the CPU; drop it, or use --bf16 true, which the CPU can do"
            )
        if self.activation_offloading and on_cpu:
            raise ConfigError(
                "--activation_offloading moves activations from the GPU to the CPU, and this run is on the CPU; drop it"
            )
        if getattr(self, "bf16", None) is None and on_cpu:
            # TRL's default, mixed bfloat16, raises there or costs time
            self.bf16 = False
        wanted, self.is_checkpointing_auto = _read_checkpointing(self.gradient_checkpointing, on_cpu=on_cpu)
        self._set_checkpointing(wanted)
        super().__post_init__()
        _check_trackers(self.report_to)

    def _set_checkpointing(self, wanted: bool) -> None:  # noqa: FBT001 - private
        names = {item.name for item in dataclasses.fields(self)}
        if "activation_checkpointing" not in names:
            # transformers before 5.24 knows the old name alone; a flag is text until here
            self.gradient_checkpointing = wanted  # type: ignore[assignment]
            return
        newer = getattr(self, "activation_checkpointing", None)
        if newer is None:
            self.activation_checkpointing = wanted
        elif self.is_checkpointing_auto:
            self.is_checkpointing_auto = False
        elif newer != wanted:
            raise _contradiction("checkpointing", str(wanted).lower(), str(not wanted).lower())
        old_kwargs = getattr(self, "gradient_checkpointing_kwargs", None)
        new_kwargs = getattr(self, "activation_checkpointing_kwargs", None)
        if old_kwargs and new_kwargs and old_kwargs != new_kwargs:
            raise _contradiction("checkpointing_kwargs", old_kwargs, new_kwargs)
        self.activation_checkpointing_kwargs = new_kwargs or old_kwargs
        # the old names mirror the new ones; left as they are, transformers warns of them
        for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
            setattr(self, name, None)


def _contradiction(name: str, older: object, newer: object) -> ConfigError:
    return ConfigError(f"--gradient_{name} {older} and --activation_{name} {newer} contradict each other; keep one")


def _read_checkpointing(value: object, *, on_cpu: bool) -> tuple[bool, bool]:
    """Return (recompute activations?, was it left to us?)."""
    if value is None or str(value).lower() == "auto":
        return not on_cpu, True
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "none": False}
    if str(value).lower() not in words:
        raise ConfigError(f"--gradient_checkpointing {value} is not known; use true, false or auto")
    return words[str(value).lower()], False


def _check_trackers(names: Sequence[str] | str) -> None:
    """Refuse trackers that are unknown or not installed; upstream does so after the model was loaded."""
    known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
    # transformers has no test for these two
    installed = {*get_available_reporting_integrations(), "azure_ml", "flyte"}
    for name in [names] if isinstance(names, str) else names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(f"--report_to names {name}, which is no tracker; name one of {known}, all, or none")
        if name not in installed:
            raise ConfigError(
                f"--report_to names {name}, but its package is not installed; pip install {name}, or use --report_to "
                "none"
            )


def build(values: Mapping[str, Any]) -> TrainingArguments:
    """Make the training arguments of the values a user gave.

    Args:
        values: Field name to value, typed; what is not in it keeps its default.

    Raises:
        ConfigError: With what transformers or TRL say of a value they refuse.
    """
    try:
        return TrainingArguments(**values)
    except ConfigError:
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(f"The training arguments were refused: {error}") from error
