"""``--padding_free`` and ``--multipack``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuning.config.nested import build_config, check_choices, names_off

__all__ = ["AttentionAndDistributedPackingConfig", "MultiPack", "PaddingFree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingFree:
    """``--padding_free``: no token of padding is computed.

    Raises:
        ConfigError: If ``method`` is none of the choices.
    """

    method: str = field(
        default="huggingface",
        metadata={
            "help": "How: huggingface (samples are laid end to end and the model is told their boundaries).",
            "choices": ["huggingface"],
            "retired": {
                "huggingface-injected": "which patched old versions of transformers and is gone; use huggingface"
            },
        },
    )

    def __post_init__(self) -> None:
        """Refuse an unknown method."""
        check_choices(self, flag="padding_free")


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiPack:
    """``--multipack``: every GPU gets equal work.

    Raises:
        ConfigError: If an option is none of its choices.
    """

    num_processes: int = field(
        default=16, metadata={"help": "Processes that measure lengths where the data does not know them."}
    )
    mode: str = field(
        default="exact",
        metadata={
            "help": "exact: each optimizer step holds the samples it would hold without multipack; "
            "budget: micro-steps are filled to max_tokens.",
            "choices": ["exact", "budget"],
        },
    )
    max_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Tokens a rank a micro-step; default: batch size x mean length in budget mode, no cap in exact."
        },
    )
    cost: str = field(
        default="model",
        metadata={
            "help": "Work of a sample: model (tokens plus attention, from the model's shape) or tokens.",
            "choices": ["model", "tokens"],
        },
    )
    over_long: str = field(
        default="own_step",
        metadata={
            "help": "A sample longer than max_tokens: own_step, truncate, drop, or error.",
            "choices": ["own_step", "truncate", "drop", "error"],
        },
    )
    resume: str = field(
        default="same",
        metadata={
            "help": "A checkpoint of another number of GPUs: same (an error that says what changed) or replan "
            "(mode=exact goes on if the samples of a step stay the same).",
            "choices": ["same", "replan"],
        },
    )

    def __post_init__(self) -> None:
        """Refuse an unknown mode, cost or policy."""
        check_choices(self, flag="multipack")


if TYPE_CHECKING:
    _PaddingFreeOption = PaddingFree | None
    _MultiPackOption = MultiPack | None
else:
    # texts, lists and objects are built in __post_init__; `str` is what HfArgumentParser takes for such a field
    _PaddingFreeOption = PaddingFree | str | None
    _MultiPackOption = MultiPack | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionAndDistributedPackingConfig:
    """The attention and packing flags together; text, lists and objects are built into the config objects.

    Raises:
        ConfigError: If an option cannot be read.
    """

    padding_free: _PaddingFreeOption = field(
        default=None, metadata={"help": "Compute no padding: huggingface. Default: off.", "nargs": "*"}
    )
    multipack: _MultiPackOption = field(
        default=None,
        metadata={"help": "Balance the work of all ranks; see docs/multipack.md. Default: off.", "nargs": "*"},
    )

    def __post_init__(self) -> None:
        """Build the config objects, once."""
        for name, config_type in (("padding_free", PaddingFree), ("multipack", MultiPack)):
            value = getattr(self, name)
            built = None if names_off(value) else build_config(config_type, value, flag=name)
            object.__setattr__(self, name, built)
