"""The list of every flag, from our dataclasses and from the source of the installed training arguments.

Help, parsing and the checks of names all come from this list, and it imports neither torch nor transformers nor trl;
see docs/adr/001-command-line.md.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from tuning.config.acceleration_configs import (
    AttentionAndDistributedPackingConfig,
    AutoGPTQLoraConfig,
    BNBQLoraConfig,
    FastKernelsConfig,
    FusedLoraConfig,
    FusedOpsAndKernelsConfig,
    MultiPack,
    PaddingFree,
    QuantizedLoraConfig,
)
from tuning.config.configs import DataArguments, ModelArguments
from tuning.config.nested import field_kinds
from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.config.training_fields import read_training_fields
from tuning.config.values import UNSET, Kind

__all__ = ["NESTED_TYPES", "PATH_OR_OBJECT", "PLUGIN_GROUP", "FieldSpec", "list_flags", "own_flags"]

PLUGIN_GROUP = "tuning.plugins"
NESTED_TYPES: Final[Mapping[str, type]] = types.MappingProxyType(
    {
        "padding_free": PaddingFree,
        "multipack": MultiPack,
        "fast_kernels": FastKernelsConfig,
        "fused_lora": FusedLoraConfig,
        "auto_gptq": AutoGPTQLoraConfig,
        "bnb_qlora": BNBQLoraConfig,
    }
)
# training arguments whose text may be the path of a JSON file
PATH_OR_OBJECT = frozenset({"accelerator_config", "deepspeed", "fsdp_config"})
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = types.MappingProxyType({"bnb_qlora": ("bitsandbytes",)})
# dataclass -> the name it goes by in FieldSpec.owner
_GROUPS: Final[Mapping[type, str]] = types.MappingProxyType(
    {
        ModelArguments: "model",
        DataArguments: "data",
        AttentionAndDistributedPackingConfig: "acceleration",
        FusedOpsAndKernelsConfig: "acceleration",
        QuantizedLoraConfig: "acceleration",
        LoraConfig: "lora",
        PromptTuningConfig: "pt",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One flag.

    Attributes:
        name: Of the flag, without dashes, and of the key in a file.
        kind: What it takes.
        default: Used when it is not given; ``UNSET`` if unknown.
        help: One or two sentences.
        owner: Whose field it is: ``run``, ``model``, ``data``, ``acceleration``, ``lora``, ``pt``, ``plugin``, or the
            package that declares the training argument: ``tuning``, ``trl`` or ``transformers``.
        const: Value of the flag alone, or ``UNSET`` if it needs one.
        aliases: Other names of it.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    owner: str
    const: Any = UNSET
    aliases: tuple[str, ...] = ()

    @property
    def is_training(self) -> bool:
        """Whether it is a field of ``TrainingArguments``."""
        return self.owner in ("tuning", "trl", "transformers")


_TEXT = Kind(bases=("str",), optional=True)
_TEXTS = Kind(bases=("list", "str"), optional=True)


def _run_flags() -> tuple[FieldSpec, ...]:
    """Return the flags that belong to no dataclass."""
    return (
        FieldSpec(
            name="config", kind=_TEXT, default=None, owner="run",
            help="JSON or YAML file with any of these flags as keys; also a path without a flag. "
            "The command line wins over the file.",
        ),
        FieldSpec(
            name="peft_method", default="none", owner="run",
            kind=Kind(bases=("str",), optional=True, choices=("lora", "pt", "none")),
            help="Parameter-efficient tuning: lora, pt (prompt tuning), or none for full fine-tuning.",
        ),
        FieldSpec(
            name="exp_metadata", kind=Kind(bases=("dict",), optional=True), default=None, owner="run",
            help="JSON object of your own that is kept with the run's logs.",
        ),
        FieldSpec(
            name="trackers", kind=_TEXTS, default=None, owner="run", aliases=("tracker",),
            help="Experiment trackers by name, as report_to; file_logger (always on) and none are accepted.",
        ),
        FieldSpec(
            name="acceleration_framework_config_file", kind=_TEXT, default=None, owner="run",
            help="YAML file of fms-acceleration plugins; each setting in it means the flag of that name here.",
        ),
        FieldSpec(
            name="loss_across_gpus", kind=_TEXTS, default=None, owner="run",
            help="Accepted for old configurations: mean token, which is always done.",
        ),
    )  # fmt: skip


def own_flags() -> tuple[FieldSpec, ...]:
    """Return every flag of ours but the training arguments, in the order of the help."""
    specs = list(_run_flags())
    for config_type, owner in _GROUPS.items():
        kinds = field_kinds(config_type)
        for item in dataclasses.fields(config_type):
            nested = item.name in NESTED_TYPES
            specs.append(
                FieldSpec(
                    name=item.name,
                    kind=Kind(bases=("nested",), optional=True) if nested else kinds[item.name],
                    default=UNSET if item.default is dataclasses.MISSING else item.default,
                    help=item.metadata["help"],
                    owner=owner,
                    const=True if nested or "bool" in kinds[item.name].bases else UNSET,
                    aliases=_ALIASES.get(item.name, ()),
                )
            )
    return tuple(specs)


def _without_free_text(name: str, kind: Kind) -> Kind:
    """Return ``kind`` without texts where an object is meant: transformers reads such a text as an object or fails."""
    if "dict" not in kind.bases or name in PATH_OR_OBJECT:
        return kind
    return Kind(bases=tuple(base for base in kind.bases if base != "str"), optional=kind.optional)


def _training_flags() -> tuple[FieldSpec, ...]:
    return tuple(
        FieldSpec(
            name=item.name,
            kind=_without_free_text(item.name, item.kind),
            default=item.default,
            help=item.help,
            owner=item.owner,
            const=True if "bool" in item.kind.bases else item.const,
        )
        for item in read_training_fields()
    )


def _plugin_flags(taken: set[str]) -> tuple[FieldSpec, ...]:
    points = {point.name: point.value for point in metadata.entry_points(group=PLUGIN_GROUP)}
    return tuple(
        FieldSpec(
            name=name, kind=Kind(bases=("nested",), optional=True), default=None, owner="plugin", const=True,
            help=f"Options of the plugin {value}.",
        )
        for name, value in sorted(points.items())
        if name not in taken
    )  # fmt: skip


def list_flags() -> dict[str, FieldSpec]:
    """Return every flag by name, ours first, third-party plugins last.

    Raises:
        UnsupportedError: If the training arguments of the installed packages cannot be read.
    """
    specs = [*own_flags(), *_training_flags()]
    specs += _plugin_flags({spec.name for spec in specs})
    return {spec.name: spec for spec in specs}
