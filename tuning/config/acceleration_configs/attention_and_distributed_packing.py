"""``--padding_free`` and ``--multipack``."""

from dataclasses import dataclass, field

__all__ = ["AttentionAndDistributedPackingConfig", "MultiPack", "PaddingFree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddingFree:
    """``--padding_free``: no token of padding is computed."""

    method: str = field(
        default="huggingface",
        metadata={
            "help": "How: huggingface (samples are laid end to end and the model is told their boundaries).",
            "choices": ["huggingface"],
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiPack:
    """``--multipack``: every GPU gets equal work."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionAndDistributedPackingConfig:
    """The attention and packing flags together."""

    padding_free: PaddingFree | None = field(
        default=None, metadata={"help": "Compute no padding: huggingface. Default: off."}
    )
    multipack: MultiPack | None = field(
        default=None, metadata={"help": "Balance the work of all ranks; see docs/multipack.md. Default: off."}
    )
