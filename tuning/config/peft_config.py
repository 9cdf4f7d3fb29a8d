"""Parameter-efficient tuning: LoRA and prompt tuning, as fms-hf-tuning names them."""

from dataclasses import dataclass, field

__all__ = ["LoraConfig", "PromptTuningConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """``--peft_method lora``: low-rank adapters (Hu et al. 2021, arXiv:2106.09685)."""

    r: int = field(default=8, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale: an adapter adds lora_alpha / r times B A x."})
    target_modules: list[str] | None = field(
        default=None,
        metadata={"help": "Modules that get an adapter, by name, or all-linear; default: all-linear."},
    )
    bias: str = field(
        default="none",
        metadata={"help": "Which biases train: none, all, or lora_only.", "choices": ["none", "all", "lora_only"]},
    )
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapter, 0 to below 1."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale by lora_alpha / sqrt(r) (arXiv:2312.03732)."})
    use_dora: bool = field(default=False, metadata={"help": "Weight-decomposed adapters (arXiv:2402.09353)."})
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained and saved in full beside the adapters; default: none."}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTuningConfig:
    """``--peft_method pt``: trained virtual tokens before each sample (Lester et al. 2021, arXiv:2104.08691)."""

    prompt_tuning_init: str = field(
        default="TEXT",
        metadata={"help": "Start of the virtual tokens: TEXT or RANDOM.", "choices": ["TEXT", "RANDOM"]},
    )
    num_virtual_tokens: int = field(default=8, metadata={"help": "Virtual tokens a sample."})
    prompt_tuning_init_text: str = field(
        default="Classify if the tweet is a complaint or not:",
        metadata={"help": "Text the virtual tokens start from with prompt_tuning_init TEXT."},
    )
