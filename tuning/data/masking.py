r"""Which characters of a text are answers, and which tokens those are.

Answers are found in the text, by character, and turned into tokens by the tokenizer's offsets. A search for the ids of
a template fails as soon as the tokenizer merges its first characters with what comes before: in ``".\n\nAnswer:"``
many vocabularies have one token for ``".\n"``. A token is trained on if any of its characters belongs to an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuning.errors import DataError

__all__ = [
    "EMPTY_ANSWER",
    "EMPTY_TEXT",
    "NO_TEMPLATE",
    "Rendered",
    "RowError",
    "answer_spans",
    "token_spans",
]

EMPTY_ANSWER = "empty answer"
EMPTY_TEXT = "empty text"
NO_TEMPLATE = "response template not in the text"

Span = tuple[int, int]


class RowError(DataError):
    """What is wrong with a row, without its name, which the caller puts before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The text of one row.

    Attributes:
        text: All of it.
        spans: Where the answers are: first character and the one after the last, ascending, not touching. An answer
            that ends the text includes the EOS that is appended.
        is_complete: A chat template wrote it, so no BOS or EOS is added.
        dropped: Why the row is dropped, or None.
    """

    text: str
    spans: tuple[Span, ...]
    is_complete: bool = False
    dropped: str | None = None

    @classmethod
    def of_spans(cls, text: str, spans: Sequence[Span], *, is_complete: bool = False) -> Rendered:
        """Make it of a text and its answers; dropped if all of them are blank."""
        is_blank = all(not text[start:end].strip() for start, end in spans)
        return cls(
            text=text,
            spans=tuple(spans),
            is_complete=is_complete,
            dropped=EMPTY_ANSWER if is_blank and spans else None,
        )


def answer_spans(text: str, *, response_template: str, instruction_template: str | None) -> list[Span]:
    """Find the answers of a text by the templates around them.

    Args:
        text: One or several turns.
        response_template: Comes before each answer.
        instruction_template: Comes before each question and ends an answer. None: the text has one answer, after the
            last response template, since examples in a prompt come first.

    Returns:
        Ascending spans; empty if the response template is not in the text.
    """
    if instruction_template is None:
        found = text.rfind(response_template)
        return [] if found < 0 else [(found + len(response_template), len(text))]
    spans = []
    found = text.find(response_template)
    while found >= 0:
        start = found + len(response_template)
        end = text.find(instruction_template, start)
        end = len(text) if end < 0 else end
        spans.append((start, end))
        found = text.find(response_template, end)
    return spans


def token_spans(encoding: Any, spans: Sequence[Span]) -> list[Span]:  # noqa: ANN401 - tokenizers.Encoding
    """Turn spans of characters into spans of tokens.

    Args:
        encoding: ``tokenizers.Encoding`` of the text, without added special tokens.
        spans: Characters, ascending.

    Returns:
        First token and the one after the last; spans without a token are left out.
    """
    count = len(encoding)
    found = []
    for start, end in spans:
        if start == end:
            continue
        first = _first_token(encoding, start, count)
        last = _first_token(encoding, end, count)
        # a token that begins before the end belongs to the answer
        while last < count and encoding.token_to_chars(last)[0] < end:
            last += 1
        if last > first:
            found.append((first, last))
    return found


def _first_token(encoding: Any, char: int, count: int) -> int:  # noqa: ANN401
    """Return the first token that holds ``char`` or lies after it; ``count`` if there is none."""
    if not count or encoding.token_to_chars(count - 1)[1] <= char:
        return count
    token = encoding.char_to_token(char)
    if token is not None:
        return int(token)
    # a character that no token holds: many tokenizers leave the blank before a word out of its offsets
    return next(index for index, (_, end) in enumerate(encoding.offsets) if end > char)
