"""What kind of rows a data set has, and how one becomes a text with answers.

The first that fits counts: what a flag asks for, then columns that can mean one thing only (see docs/data.md).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuning.config.configs import DataArguments
from tuning.data.chat import Chat
from tuning.data.masking import EMPTY_TEXT, NO_TEMPLATE, Rendered, RowError, answer_spans
from tuning.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RowKind", "choose"]

_PLACEHOLDER = re.compile(r"\{\{\s*(.+?)\s*\}\}")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKind:
    """How the rows of a data set are read.

    Attributes:
        title: For the report: what they are and what of them is trained on.
        columns: Columns that every row must have.
        optional: Columns that are used where a row has them.
        render: Makes the text of a row; None for rows that are tokens already.
    """

    title: str
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()
    render: Callable[[Row], Rendered] | None


def choose(columns: Sequence[str], config: DataArguments, tokenizer: PreTrainedTokenizerBase) -> RowKind:
    """Say of which kind the rows are.

    Args:
        columns: Columns of the data set.
        config: Flags that name columns and templates.
        tokenizer: Its chat template renders conversations.

    Raises:
        DataError: If a flag names a column that is not there, flags contradict the rows, or no kind fits.
    """
    for flag in ("response_template", "instruction_template", "data_formatter_template"):
        if getattr(config, flag) == "":
            raise DataError(f"--{flag} is empty, so it stands everywhere; give a text or drop the flag")
    if config.instruction_template is not None and config.response_template is None:
        raise DataError(
            "--instruction_template ends an answer, but nothing says where one begins; give --response_template too"
        )
    kind = _by_flags(columns, config, tokenizer) or _by_columns(columns, config, tokenizer)
    if kind is None:
        raise DataError(
            f"The rows have the columns {', '.join(columns) or '(none)'}, which are of no known kind; needed are "
            "input_ids, or messages, or prompt and completion, or output with instruction or input, or text, or a "
            "column named by --dataset_text_field, --dataset_conversation_field or --data_formatter_template"
        )
    return kind


def _by_flags(columns: Sequence[str], config: DataArguments, tokenizer: PreTrainedTokenizerBase) -> RowKind | None:
    if config.data_formatter_template is not None:
        template = config.data_formatter_template
        names = tuple(dict.fromkeys(_PLACEHOLDER.findall(template)))
        _check_column(columns, "--data_formatter_template", *names)
        if not names:
            raise DataError(
                f"--data_formatter_template {template!r} names no column, so all rows would be the same; write a "
                "column as {{column}}"
            )
        return _text_kind(
            config,
            title=f"formatted from {', '.join(names)}",
            columns=names,
            make=lambda row: _PLACEHOLDER.sub(lambda found: _text(row, found.group(1)), template),
        )
    if config.dataset_text_field is not None:
        _check_column(columns, "--dataset_text_field", config.dataset_text_field)
        return _column_kind(config, config.dataset_text_field)
    if config.dataset_conversation_field is not None:
        _check_column(columns, "--dataset_conversation_field", config.dataset_conversation_field)
        return _chat_kind(columns, config, tokenizer, config.dataset_conversation_field)
    return None


def _by_columns(columns: Sequence[str], config: DataArguments, tokenizer: PreTrainedTokenizerBase) -> RowKind | None:
    if "input_ids" in columns:
        if config.response_template is not None:
            raise DataError(
                "--response_template looks for text, but the rows are tokens already (column input_ids); give labels "
                "or a completion_mask with them, or give rows of text"
            )
        labels = "all" if config.train_on_input else "labels and masks where they are given"
        return RowKind(title=f"tokens; trained on: {labels}", columns=("input_ids",), render=None)
    if "messages" in columns:
        return _chat_kind(columns, config, tokenizer, "messages")
    if "prompt" in columns and "completion" in columns:
        return _prompt_kind(config, tokenizer)
    if "output" in columns and ("instruction" in columns or "input" in columns):
        return _instruction_kind(config, [name for name in ("instruction", "input") if name in columns])
    if "text" in columns:
        return _column_kind(config, "text")
    return None


def _column_kind(config: DataArguments, name: str) -> RowKind:
    return _text_kind(config, title=f"texts in {name}", columns=(name,), make=lambda row: _text(row, name))


def _text_kind(config: DataArguments, *, title: str, columns: tuple[str, ...], make: Callable[[Row], str]) -> RowKind:
    """Rows of which each makes one text; the answers in it are found by templates, or all of it is trained on."""

    def render(row: Row) -> Rendered:
        return _masked(make(row), config)

    return RowKind(title=f"{title}; {_trained_on(config, 'all')}", columns=columns, render=render)


def _chat_kind(columns: Sequence[str], config: DataArguments, tokenizer: PreTrainedTokenizerBase, name: str) -> RowKind:
    chat = _chat(config, tokenizer)
    has_no_place = "tools" in columns and "tools" not in str(tokenizer.chat_template)
    note = "; the chat template has no place for the column tools" if has_no_place else ""

    def render(row: Row) -> Rendered:
        return chat.render(row[name], tools=_tools(row.get("tools")))

    return RowKind(
        title=f"conversations in {name}; {_trained_on(config, 'assistant turns')}{note}",
        columns=(name,),
        optional=("tools",),
        render=render,
    )


def _prompt_kind(config: DataArguments, tokenizer: PreTrainedTokenizerBase) -> RowKind:
    chat: list[Chat] = []  # made when the first conversation comes: a tokenizer without a template does for texts

    def render(row: Row) -> Rendered:
        prompt, completion = row["prompt"], row["completion"]
        if not isinstance(completion, list):
            return _answered(_text(row, "prompt"), _text(row, "completion"), config)
        if not chat:
            chat.append(_chat(config, tokenizer))
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return chat[0].render([*given, *completion], tools=_tools(row.get("tools")), num_given=len(given))

    return RowKind(
        title=f"prompt and completion; {_trained_on(config, 'completion')}",
        columns=("prompt", "completion"),
        optional=("tools",),
        render=render,
    )


def _instruction_kind(config: DataArguments, names: Sequence[str]) -> RowKind:
    def render(row: Row) -> Rendered:
        parts = [_text(row, name) for name in names if row.get(name) is not None]
        prompt = "".join(part + "\n" for part in parts if part)
        return _answered(prompt, _text(row, "output"), config)

    return RowKind(
        title=f"{', '.join(names)} and output; {_trained_on(config, 'output')}",
        columns=(names[0], "output"),
        optional=tuple(names[1:]),
        render=render,
    )


def _chat(config: DataArguments, tokenizer: PreTrainedTokenizerBase) -> Chat:
    return Chat(
        tokenizer,
        response_template=config.response_template,
        instruction_template=config.instruction_template,
        train_on_all=config.train_on_input,
    )


def _answered(prompt: str, answer: str, config: DataArguments) -> Rendered:
    """Return prompt and answer as one text of which the answer is trained on."""
    text = prompt + answer
    if config.train_on_input or config.response_template is not None:
        return _masked(text, config)
    return Rendered.of_spans(text, [(len(prompt), len(text))])


def _masked(text: str, config: DataArguments) -> Rendered:
    """Return a text whose answers are found by the templates of the flags."""
    if not text.strip():
        return Rendered(text=text, spans=(), dropped=EMPTY_TEXT)
    if config.train_on_input or config.response_template is None:
        return Rendered.of_spans(text, [(0, len(text))])
    spans = answer_spans(
        text, response_template=config.response_template, instruction_template=config.instruction_template
    )
    return Rendered.of_spans(text, spans) if spans else Rendered(text=text, spans=(), dropped=NO_TEMPLATE)


def _trained_on(config: DataArguments, what: str) -> str:
    if config.train_on_input:
        what = "all"
    elif config.response_template is not None:
        what = f"what follows {config.response_template!r}"
    return f"trained on: {what}"


def _text(row: Row, name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        # what pandas writes for a cell without a value; the text nan would be trained on
        raise RowError(f"the column {name!r} holds {value}, which is no number, where a text is expected; mend the row")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise RowError(f"the column {name!r} holds {_name(value)} where a text is expected; mend the row")


def _tools(value: object) -> list[Mapping[str, Any]] | None:
    """Return the functions of a row; some data sets keep them as JSON text."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RowError(f"the column 'tools' holds a text that is no JSON ({error.msg}); mend the row") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise RowError(f"the column 'tools' holds {_name(value)} where a list of objects is expected; mend the row")
    return value


def _check_column(columns: Sequence[str], flag: str, *names: str) -> None:
    for name in names:
        if name not in columns:
            raise DataError(f"{flag} names the column {name!r}, which is not there; the rows have {', '.join(columns)}")


def _name(value: object) -> str:
    names = {list: "a list", dict: "an object", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
