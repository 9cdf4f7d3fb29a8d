"""``--auto_gptq`` and ``--bitsandbytes`` (old name ``--bnb_qlora``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuning.config.nested import build_config, check_choices, names_off

__all__ = ["AutoGPTQLoraConfig", "BNBQLoraConfig", "QuantizedLoraConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoGPTQLoraConfig:
    """``--auto_gptq``: LoRA over a GPTQ checkpoint.

    Raises:
        ConfigError: If ``kernel`` is none of the choices.
    """

    kernel: str = field(
        default="triton_v2", metadata={"help": "Dequantisation kernel: triton_v2.", "choices": ["triton_v2"]}
    )
    from_quantized: bool = field(
        default=True, metadata={"help": "The checkpoint is quantised already; False is not supported."}
    )

    def __post_init__(self) -> None:
        """Refuse an unknown kernel."""
        check_choices(self, flag="auto_gptq")


@dataclass(frozen=True, kw_only=True, slots=True)
class BNBQLoraConfig:
    """``--bitsandbytes``: LoRA over a base quantised to 4 bits at load.

    Raises:
        ConfigError: If ``quant_type`` is none of the choices.
    """

    quant_type: str = field(default="nf4", metadata={"help": "4-bit data type: nf4 or fp4.", "choices": ["nf4", "fp4"]})
    no_peft_model: bool = field(default=False, metadata={"help": "Do not prepare the model for peft."})

    def __post_init__(self) -> None:
        """Refuse an unknown data type."""
        check_choices(self, flag="bitsandbytes")


if TYPE_CHECKING:
    _AutoGPTQOption = AutoGPTQLoraConfig | None
    _BNBOption = BNBQLoraConfig | None
else:
    # texts, lists and objects are built in __post_init__; `str` is what HfArgumentParser takes for such a field
    _AutoGPTQOption = AutoGPTQLoraConfig | str | None
    _BNBOption = BNBQLoraConfig | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedLoraConfig:
    """The quantisation flags together; text, lists and objects are built into the config objects.

    Raises:
        ConfigError: If an option cannot be read.
    """

    auto_gptq: _AutoGPTQOption = field(
        default=None,
        metadata={"help": "Load a GPTQ checkpoint as a frozen base: triton_v2. Default: off.", "nargs": "*"},
    )
    bnb_qlora: _BNBOption = field(
        default=None,
        metadata={
            "help": "Quantise the base to 4 bits: nf4 or fp4. Default: off.",
            "nargs": "*",
            "aliases": ["--bitsandbytes"],
        },
    )

    def __post_init__(self) -> None:
        """Build the config objects, once."""
        for name, config_type in (("auto_gptq", AutoGPTQLoraConfig), ("bnb_qlora", BNBQLoraConfig)):
            value = getattr(self, name)
            built = None if names_off(value) else build_config(config_type, value, flag=name)
            object.__setattr__(self, name, built)
