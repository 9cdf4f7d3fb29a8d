"""``TrainingArguments``: TRL's SFTConfig with the fields that packtune decides itself.

The command line learns the fields of this class and of its bases by reading their source (``tuning.config.catalog``),
so a field declared here is a flag at once. A field redeclared with ``init=False`` is no flag: another dataclass of
ours has a flag of that name, or the plugins decide it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import SFTConfig

__all__ = ["TrainingArguments"]


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
            "device and model size and says so."
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
