"""RunConfig: everything the user asked for, as one frozen value."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuning.config.acceleration_configs import AccelerationFrameworkConfig
from tuning.config.configs import DataArguments, ModelArguments
from tuning.config.peft_config import LoraConfig, PromptTuningConfig

__all__ = ["RunConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What one run was asked to do.

    Attributes:
        model: Which model, and how it is loaded.
        data: Which rows, and what of them is trained on.
        train: Fields of ``TrainingArguments`` by name, typed: from the command line only those the user gave, from
            Python any or all.
        peft_method: ``"none"``, ``"lora"`` or ``"pt"``.
        peft: Options of that method, or None for full fine-tuning.
        acceleration: Every acceleration flag.
        exp_metadata: The user's own JSON object, kept with the logs; None if not given.
        given: Names of the flags that were given, on the command line or in a file, null excepted.
        source: The configuration file, or None.
        notes: What to tell the user that is no error, one sentence each, for the log.
    """

    model: ModelArguments = field(default_factory=ModelArguments)
    data: DataArguments = field(default_factory=DataArguments)
    train: Mapping[str, Any] = field(default_factory=lambda: types.MappingProxyType({}))
    peft_method: str = "none"
    peft: LoraConfig | PromptTuningConfig | None = None
    acceleration: AccelerationFrameworkConfig = field(default_factory=AccelerationFrameworkConfig)
    exp_metadata: Mapping[str, Any] | None = None
    given: frozenset[str] = frozenset()
    source: str | None = None
    notes: tuple[str, ...] = ()
