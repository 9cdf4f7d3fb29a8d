"""``--auto_gptq`` and ``--bitsandbytes`` (old name ``--bnb_qlora``)."""

from dataclasses import dataclass, field

__all__ = ["AutoGPTQLoraConfig", "BNBQLoraConfig", "QuantizedLoraConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoGPTQLoraConfig:
    """``--auto_gptq``: LoRA over a GPTQ checkpoint."""

    kernel: str = field(
        default="triton_v2", metadata={"help": "Dequantisation kernel: triton_v2.", "choices": ["triton_v2"]}
    )
    from_quantized: bool = field(
        default=True, metadata={"help": "The checkpoint is quantised already; False is not supported."}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BNBQLoraConfig:
    """``--bitsandbytes``: LoRA over a base quantised to 4 bits at load."""

    quant_type: str = field(default="nf4", metadata={"help": "4-bit data type: nf4 or fp4.", "choices": ["nf4", "fp4"]})
    no_peft_model: bool = field(default=False, metadata={"help": "Do not prepare the model for peft."})


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedLoraConfig:
    """The quantisation flags together."""

    auto_gptq: AutoGPTQLoraConfig | None = field(
        default=None, metadata={"help": "Load a GPTQ checkpoint as a frozen base: triton_v2. Default: off."}
    )
    bnb_qlora: BNBQLoraConfig | None = field(
        default=None, metadata={"help": "Quantise the base to 4 bits: nf4 or fp4. Default: off."}
    )
