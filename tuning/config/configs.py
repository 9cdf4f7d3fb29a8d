"""Model, data and training arguments.

``ModelArguments`` and ``DataArguments`` are plain dataclasses. ``TrainingArguments`` is a real dataclass too, a
subclass of ``trl.SFTConfig``, but importing trl takes seconds, so the name is resolved at first use
(:pep:`562`) and lives in ``tuning.trainers.arguments``; see docs/adr/ for the design.
"""

from __future__ import annotations

import importlib
import re
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuning.trainers.arguments import TrainingArguments

__all__ = ["DEFAULT_MAX_SEQ_LENGTH", "DataArguments", "ModelArguments", "TrainingArguments"]

_ESCAPE = re.compile(r"\\([ntr])")
_ESCAPED = types.MappingProxyType({"n": "\n", "t": "\t", "r": "\r"})
# 4096: the default of fms-hf-tuning, whose users change nothing
DEFAULT_MAX_SEQ_LENGTH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """Which model and tokenizer, and how to load them."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Folder of a checkpoint, hub name, or a .gguf file. Required."},
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Folder or hub name of the tokenizer; default: that of the model."},
    )
    gguf_file: str | None = field(
        default=None,
        metadata={"help": "Name of a .gguf file inside model_name_or_path; its weights are dequantised at load."},
    )
    model_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a hub model; default: the hub's main branch."}
    )
    use_flash_attn: bool = field(
        default=True,
        metadata={
            "help": "Use the fastest variable-length attention of this device (FlashAttention 3, 4 or 2 where "
            "installed, torch's own otherwise; torch's flash kernel on the CPU). False: transformers' sdpa."
        },
    )
    torch_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of the weights: bfloat16, float16, float32, or auto (as the checkpoint has it). "
            "Default: bfloat16 on a GPU, float32 on the CPU."
        },
    )
    embedding_size_multiple_of: int = field(
        default=1,
        metadata={"help": "When added tokens do not fit, the embedding grows to a multiple of this many rows."},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataArguments:
    """Which rows, and what of them is trained on."""

    training_data_path: str | None = field(
        default=None,
        metadata={
            "help": "File (.json, .jsonl, .csv, .parquet, .arrow), folder of such files, or hub name. Required "
            "unless data_config_path is given."
        },
    )
    validation_data_path: str | None = field(
        default=None, metadata={"help": "Like training_data_path, for evaluation; default: no evaluation."}
    )
    validation_split: float = field(
        default=0.0,
        metadata={"help": "Share of the training rows held out for evaluation, 0 to below 1; 0: none."},
    )
    data_config_path: str | None = field(
        default=None,
        metadata={"help": "JSON or YAML file that lists several data sets and how they are mixed; see docs/data.md."},
    )
    dataset_text_field: str | None = field(
        default=None, metadata={"help": "Column that holds one whole training text a row."}
    )
    response_template: str | None = field(
        default=None,
        metadata={"help": "Text that comes before each answer; only tokens after it are trained on."},
    )
    instruction_template: str | None = field(
        default=None,
        metadata={"help": "Text that comes before each question; ends an answer in texts of several turns."},
    )
    data_formatter_template: str | None = field(
        default=None,
        metadata={"help": "Makes the text of a row from its columns, written as {{column}}."},
    )
    dataset_conversation_field: str | None = field(
        default=None, metadata={"help": "Column that holds a list of messages; default: messages."}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja chat template, or a file with one, in place of the tokenizer's."}
    )
    add_special_tokens: list[str] | None = field(
        default=None, metadata={"help": "Tokens to add to the tokenizer; their embedding rows are trained."}
    )
    max_seq_length: int | None = field(
        default=None,
        metadata={
            "help": f"Longest sample in tokens; default: {DEFAULT_MAX_SEQ_LENGTH} or the model's positions, "
            "whichever is less."
        },
    )
    max_seq_length_policy: str = field(
        default="truncate",
        metadata={
            "help": "What happens to a longer sample: truncate (keep its start), drop, or error.",
            "choices": ["truncate", "drop", "error"],
        },
    )
    train_on_input: bool = field(
        default=False,
        metadata={"help": "Train on the prompt too, not on the answer alone."},
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Read rows as training goes instead of preparing them first; needs max_steps."},
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenize; default: one a core."}
    )

    def __post_init__(self) -> None:
        """Read backslash n, t and r in the templates as the characters, since a shell passes them on as two."""
        for name in ("response_template", "instruction_template", "data_formatter_template"):
            text = getattr(self, name)
            if text is not None:
                object.__setattr__(self, name, _ESCAPE.sub(lambda match: _ESCAPED[match[1]], text))


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562 returns whatever the name stands for
    """Resolve ``TrainingArguments`` at first use."""
    if name == "TrainingArguments":
        return importlib.import_module("tuning.trainers.arguments").TrainingArguments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
