"""``--fast_kernels`` and ``--fused_lora``."""

from dataclasses import dataclass, field

__all__ = ["FastKernelsConfig", "FusedLoraConfig", "FusedOpsAndKernelsConfig", "KERNELS"]

KERNELS = ("cross_entropy", "linear_cross_entropy", "rms_norm", "rope", "swiglu")


@dataclass(frozen=True, kw_only=True, slots=True)
class FastKernelsConfig:
    """``--fast_kernels``: which Triton kernels replace the model's own operations."""

    kernels: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Kernels that must be applied, sorted, from: " + ", ".join(KERNELS) + "."},
    )
    auto: bool = field(
        default=False, metadata={"help": "Apply whatever fits this model and device, and say what does not."}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedLoraConfig:
    """``--fused_lora``: base product, adapters and activation in one step."""

    base_layer: str = field(
        default="auto",
        metadata={
            "help": "Kind of base layer: auto_gptq, bitsandbytes, or auto.",
            "choices": ["auto_gptq", "bitsandbytes", "auto"],
        },
    )
    fused_lora: bool = field(default=True, metadata={"help": "Whether to fuse."})


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedOpsAndKernelsConfig:
    """The kernel flags together."""

    fused_lora: FusedLoraConfig | None = field(
        default=None, metadata={"help": "Fuse LoRA layers: auto_gptq True, bitsandbytes True, or auto. Default: off."}
    )
    fast_kernels: FastKernelsConfig | None = field(
        default=None,
        metadata={"help": "Fast kernels by name, all, auto, or none; see docs/kernels.md. Default: off."},
    )
