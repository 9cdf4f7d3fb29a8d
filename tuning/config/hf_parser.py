"""``get_parser`` and ``parse_arguments`` under their names of fms-hf-tuning, with a real ``HfArgumentParser``.

The command line does not come this way: importing transformers and TRL takes seconds, and ``HfArgumentParser`` takes
wrong types from a file as they are. Python programs that build on these two names keep working, and the tests use the
parser to prove that :mod:`tuning.config.catalog` lists the same flags.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import HfArgumentParser

from tuning.config import configs, validation
from tuning.config.acceleration_configs import (
    AttentionAndDistributedPackingConfig,
    FusedOpsAndKernelsConfig,
    QuantizedLoraConfig,
)
from tuning.config.parsing import parse, parse_mapping
from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.environment import detect_launch

if TYPE_CHECKING:
    from tuning.config.configs import DataArguments, ModelArguments, TrainingArguments

__all__ = ["ParsedArguments", "get_parser", "parse_arguments"]


class ParsedArguments(NamedTuple):
    """What :func:`parse_arguments` returns, in the order in which ``train`` takes it."""

    model_args: ModelArguments
    data_args: DataArguments
    train_args: TrainingArguments
    peft_config: LoraConfig | PromptTuningConfig | None
    quantized_lora_config: QuantizedLoraConfig
    fusedops_kernels_config: FusedOpsAndKernelsConfig
    attention_and_distributed_packing_config: AttentionAndDistributedPackingConfig
    exp_metadata: Mapping[str, Any] | None


def get_parser() -> HfArgumentParser:
    """Return an ``HfArgumentParser`` over every dataclass of flags, without abbreviations."""
    parser = HfArgumentParser(
        (
            configs.ModelArguments,
            configs.DataArguments,
            configs.TrainingArguments,
            LoraConfig,
            PromptTuningConfig,
            QuantizedLoraConfig,
            FusedOpsAndKernelsConfig,
            AttentionAndDistributedPackingConfig,
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--peft_method", default="none", choices=["lora", "pt", "none"])
    parser.add_argument("--exp_metadata", default=None)
    return parser


def parse_arguments(
    parser: HfArgumentParser | None = None, json_config: Mapping[str, Any] | None = None
) -> ParsedArguments:
    """Read the command line, or a configuration that is already a mapping.

    Args:
        parser: Ignored but for its place in old programs; the flags are the same.
        json_config: Flags by name; None reads the process's command line.

    Raises:
        ConfigError: With everything that cannot be read or breaks a rule.
    """
    launch = detect_launch()
    config = parse(sys.argv[1:], launch) if json_config is None else parse_mapping(json_config)
    config = validation.resolve(config, launch)
    validation.check(config, launch)
    return ParsedArguments(
        model_args=config.model,
        data_args=config.data,
        train_args=configs.TrainingArguments(**config.train),
        peft_config=config.peft,
        quantized_lora_config=config.acceleration.quantized,
        fusedops_kernels_config=config.acceleration.kernels,
        attention_and_distributed_packing_config=config.acceleration.attention,
        exp_metadata=config.exp_metadata,
    )
