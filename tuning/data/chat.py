"""Conversations to text and answers, by the tokenizer's chat template.

A template that marks the assistant's words by ``{% generation %}`` says itself what is trained on. For one without
marks the words are found by comparing renderings, of the characters and not of the tokens:

1. The conversation up to an assistant message, with the generation prompt, must begin the conversation with that
   message; what follows is the answer, with the token that ends the turn. This is what the model sees when it is used.
2. Where that does not hold (templates that print a turn otherwise when others follow), the message's content is
   replaced by a character that occurs nowhere: what changes is the answer. The token that ends a turn is added where
   the template prints it.

Where neither works the row is refused, since a guess would train on the wrong tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from tuning.data.masking import EMPTY_ANSWER, NO_TEMPLATE, Rendered, RowError, Span, answer_spans
from tuning.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Chat", "Message"]

Message = Mapping[str, Any]

# a private-use character, which no text of a conversation holds for a reason of its own
_STAND_IN = "\ue0f1"
_TAG = re.compile(r"\{%[-+]?\s*(\w+)(.*?)%\}", re.DOTALL)
# what a template raises for a conversation that it does not take
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


class Chat:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: Has the template.
        response_template: Finds the answers in the rendered text instead; None: by marks or comparison.
        instruction_template: As in :func:`tuning.data.masking.answer_spans`.
        train_on_all: Every token is trained on.

    Raises:
        DataError: If there is no chat template, or it is no valid Jinja.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        response_template: str | None,
        instruction_template: str | None,
        train_on_all: bool,
    ) -> None:
        if tokenizer.chat_template is None:
            raise DataError(
                "The rows are conversations, but the tokenizer has no chat template; give one by --chat_template"
            )
        self._tokenizer = tokenizer
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._added_tokens = tuple(tokenizer.get_added_vocab())
        self._response_template = response_template
        self._instruction_template = instruction_template
        self._train_on_all = train_on_all
        self._is_marked = {}  # of each template, as some tokenizers have one for tools
        for template in _templates(tokenizer.chat_template):
            try:
                self._is_marked[template] = _has_marks(template)
                jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TAG.sub(_without_marks, template))
            except jinja2.TemplateSyntaxError as error:
                raise DataError(
                    f"The chat template is not valid Jinja, line {error.lineno}: {error.message}; mend it, or give "
                    "another by --chat_template"
                ) from error

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None, num_given: int = 0
    ) -> Rendered:
        """Render one conversation.

        Args:
            messages: One or more.
            tools: Functions that the assistant may call, or None.
            num_given: So many messages are prompt: assistant turns among them are not trained on.

        Raises:
            RowError: If the template refuses the conversation, or the answers cannot be told from the rest.
        """
        _check_messages(messages)
        template = self._tokenizer.get_chat_template(tools=tools)
        conversation = _Conversation(messages, template, tools, self._special_tokens)
        is_marked = self._is_marked[template]
        text, marks = conversation.settle(with_marks=is_marked)
        if self._train_on_all:
            return Rendered.of_spans(text, [(0, len(text))], is_complete=True)
        if self._response_template is not None:
            spans = answer_spans(
                text, response_template=self._response_template, instruction_template=self._instruction_template
            )
            if not spans:
                return Rendered(text=text, spans=(), is_complete=True, dropped=NO_TEMPLATE)
            return Rendered.of_spans(text, spans, is_complete=True)
        answers = [index for index in range(num_given, len(messages)) if messages[index]["role"] == "assistant"]
        if answers and all(_is_empty(messages[index]) for index in answers):
            return Rendered(text=text, spans=(), is_complete=True, dropped=EMPTY_ANSWER)
        if is_marked:
            spans = _after_prompt(conversation, text, marks, num_given=num_given, num_answers=len(answers))
        else:
            spans = [self._answer(conversation, text, index) for index in answers]
        return Rendered(text=text, spans=tuple(spans), is_complete=True)

    def _answer(self, conversation: _Conversation, text: str, index: int) -> Span:
        span = conversation.answer_by_prefix(text, index) or conversation.answer_by_stand_in(text, index)
        if span is None:
            raise RowError(
                "the chat template has no {% generation %} marks, and what it prints for message "
                f"{index} cannot be told from the rest; add the marks to the template, or give --response_template"
            )
        start, end = span
        # blanks after the token that ends the turn belong to the next one
        answer = text[start:end].rstrip()
        if answer.endswith(self._added_tokens):
            end = start + len(answer)
        return start, end


class _Conversation:
    """One conversation, its template, and renderings of it and of its parts."""

    def __init__(
        self,
        messages: Sequence[Message],
        template: str,
        tools: Sequence[Mapping[str, Any]] | None,
        special_tokens: Mapping[str, Any],
    ) -> None:
        self.messages = list(messages)
        self.template = template
        self.tools = tools
        self.special_tokens = special_tokens

    def settle(self, *, with_marks: bool) -> tuple[str, list[Span]]:
        """Render all, and keep the messages as they were rendered.

        A content that is null (an assistant turn that only calls tools) must add nothing. Templates differ: some look
        for the null, some print the word None, some fail without a text. The null stays where the template copes.
        """
        if all(message.get("content") is not None for message in self.messages):
            return self._render(self.messages, with_marks=with_marks)
        original = self.messages
        self.messages = [
            message if message.get("content") is not None else {**message, "content": ""} for message in original
        ]
        try:
            filled = self._render(self.messages, with_marks=with_marks)
        except RowError:
            # the template may need the null
            self.messages = original
            return self._render(self.messages, with_marks=with_marks)
        try:
            plain = self._render(original, with_marks=with_marks)
        except RowError:
            return filled
        if plain[0].count("None") > filled[0].count("None"):
            return filled
        self.messages = original
        return plain

    def part(self, count: int, *, add_generation_prompt: bool = False) -> str | None:
        """Render the first ``count`` messages; None if the template takes no such part."""
        try:
            return self._render(self.messages[:count], add_generation_prompt=add_generation_prompt)[0]
        except RowError:
            return None

    def answer_by_prefix(self, text: str, index: int) -> Span | None:
        """Find message ``index`` as what follows the generation prompt, if the renderings allow it."""
        before = self.part(index)
        prompt = self.part(index, add_generation_prompt=True)
        until = text if index == len(self.messages) - 1 else self.part(index + 1)
        if before is None or prompt is None or until is None or prompt == before:
            return None
        if until.startswith(prompt) and text.startswith(until):
            return len(prompt), len(until)
        return None

    def answer_by_stand_in(self, text: str, index: int) -> Span | None:
        """Find the content of message ``index`` as what changes with it, and the end of its turn."""
        span = self._content(text, len(self.messages), index)
        if span is None:
            return None
        start, end = span
        prompt = self.part(index, add_generation_prompt=True)
        if prompt is not None and text.startswith(prompt) and text[len(prompt) : start].isspace():
            # a blank between prompt and content is the model's to write
            start = len(prompt)
        for last in range(index, len(self.messages)):
            # an assistant turn at the end shows what the template prints after one
            shown = self.part(last + 1) if self.messages[last]["role"] == "assistant" else None
            found = None if shown is None else self._content(shown, last + 1, last)
            if shown is not None and found is not None:
                ending = shown[found[1] :]
                if not text.startswith(ending, end):
                    ending = ending.rstrip()
                return (start, end + len(ending)) if text.startswith(ending, end) else (start, end)
        return None

    def _content(self, text: str, count: int, index: int) -> Span | None:
        changed = list(self.messages[:count])
        if not isinstance(changed[index].get("content"), str) or not changed[index]["content"]:
            return None
        changed[index] = {**changed[index], "content": _STAND_IN}
        try:
            other = self._render(changed)[0]
        except RowError:
            return None
        if other.count(_STAND_IN) != 1:
            return None
        before, after = other.split(_STAND_IN)
        if len(before) + len(after) > len(text) or not (text.startswith(before) and text.endswith(after)):
            return None
        return len(before), len(text) - len(after)

    def _render(
        self, messages: Sequence[Message], *, with_marks: bool = False, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            texts, marks = render_jinja_template(
                conversations=[messages],
                tools=self.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=with_marks,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except _TEMPLATE_ERRORS as error:
            raise RowError(f"the chat template refuses the conversation: {error}") from error
        return texts[0], [tuple(mark) for mark in marks[0]] if with_marks else []


def _after_prompt(
    conversation: _Conversation, text: str, marks: Sequence[Span], *, num_given: int, num_answers: int
) -> list[Span]:
    """Return the marks of the answers that come after the given messages."""
    if num_given == 0:
        return list(marks)
    prompt = conversation.part(num_given, add_generation_prompt=True)
    if prompt is not None and text.startswith(prompt):
        return [(max(start, len(prompt)), end) for start, end in marks if end > len(prompt)]
    if len(marks) == sum(message["role"] == "assistant" for message in conversation.messages):
        return list(marks[len(marks) - num_answers :])
    raise RowError(
        "the chat template prints the prompt otherwise when the completion follows, so the completion cannot be told "
        "from it; put both into one column of messages"
    )


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RowError("the conversation is no list of messages; a message is an object with role and content")
    if not messages:
        raise RowError("the conversation has no message; remove the row")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            names = f"it has {', '.join(message)}" if isinstance(message, Mapping) else "it is no object"
            raise RowError(f"message {index} has no role; a message is an object with role and content, {names}")
        _check_parts(index, message.get("content"))


def _check_parts(index: int, content: object) -> None:
    """Refuse images and sound, which no tokenizer turns into tokens: templates print a mark for them, or nothing."""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
    other = [kind for kind in kinds if kind not in (None, "text")]
    if other:
        raise RowError(f"message {index} has a part of type {other[0]!r}, but only text is trained on; remove the row")


def _is_empty(message: Message) -> bool:
    """Say whether a message says and calls nothing."""
    return not any(
        value.strip() if isinstance(value, str) else value
        for name, value in message.items()
        if name not in ("role", "name")
    )


def _templates(chat_template: str | Mapping[str, str]) -> list[str]:
    return [chat_template] if isinstance(chat_template, str) else list(chat_template.values())


def _has_marks(template: str) -> bool:
    """Say whether ``{% generation %}`` marks are there and their places can be trusted.

    Inside a macro or another block that is printed later, transformers counts from the wrong character.
    """
    depth = 0
    found = False
    for tag, rest in _TAG.findall(template):
        is_capture = tag in ("macro", "filter", "call") or (tag == "set" and "=" not in rest)
        if tag == "generation":
            if depth:
                return False
            found = True
        elif is_capture:
            depth += 1
        elif tag in ("endmacro", "endfilter", "endcall", "endset"):
            depth -= 1
    return found


def _without_marks(tag: re.Match[str]) -> str:
    return "" if tag.group(1) in ("generation", "endgeneration") else tag.group()
