"""Chat templates, marked or not: the text is the tokenizer's own, the answers are the assistant's words and no more."""

import pytest

from tests import tiny
from tuning.data.chat import Chat
from tuning.data.masking import EMPTY_ANSWER, NO_TEMPLATE, RowError
from tuning.errors import DataError

USER = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "yo"}
THREE_TURNS = [
    {"role": "system", "content": "s"},
    USER,
    YO,
    {"role": "user", "content": "yo"},
    {"role": "assistant", "content": "hi yo"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": " so \n"},
]

# shapes of well-known templates, written from what they print
CHATML = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# no generation prompt; the blank before an answer is the model's; the system text goes into the next user turn
INST = """\
{{- bos_token -}}{%- set ns = namespace(sys='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.sys = m.content + '\n\n' -%}
{%- elif m.role == 'user' -%}{{- '[INST] ' + ns.sys + m.content + ' [/INST]' -}}{%- set ns.sys = '' -%}
{%- else -%}{%- generation -%}{{- ' ' + m.content + eos_token -}}{%- endgeneration -%}{%- endif -%}
{%- endfor -%}
"""
# content is trimmed, turns end by a token and a newline
TURNS = """\
{{- bos_token -}}
{%- for m in messages -%}
{{- '<start>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content | trim + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}{{- m.content | trim + '<|end|>' -}}{%- endif -%}{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start>assistant\n' -}}{%- endif -%}
"""
# the last turn is printed otherwise than the same turn with others after it: an empty thought before it
THINKING = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|' + m.role + '|>' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last -%}
{%- generation -%}{{- '<think></think>' + m.content + '<|end|>' -}}{%- endgeneration -%}
{%- elif m.role == 'assistant' -%}
{%- generation -%}{{- m.content + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}{{- m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
TEMPLATES = {"tiny": tiny.CHAT_TEMPLATE, "chatml": CHATML, "inst": INST, "turns": TURNS, "thinking": THINKING}


def unmarked(template):
    for tag in ("{%- generation -%}", "{%- endgeneration -%}"):
        template = template.replace(tag, "")
    return template


def build(template, *, response_template=None, instruction_template=None, train_on_all=False):
    tokenizer = tiny.build_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat = Chat(
        tokenizer,
        response_template=response_template,
        instruction_template=instruction_template,
        train_on_all=train_on_all,
    )
    return chat, tokenizer


def answers(template, messages, tools=None, num_given=0, **flags):
    rendered = build(template, **flags)[0].render(messages, tools=tools, num_given=num_given)
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_marked", [True, False])
def test_the_text_is_that_of_the_tokenizer(name, is_marked):
    template = TEMPLATES[name] if is_marked else unmarked(TEMPLATES[name])
    chat, tokenizer = build(template)
    rendered = chat.render(THREE_TURNS, tools=None)
    assert rendered.text == tokenizer.apply_chat_template(THREE_TURNS, tokenize=False)
    assert rendered.is_complete


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [THREE_TURNS, THREE_TURNS[1:3], THREE_TURNS[1:5]])
def test_without_marks_the_answers_are_those_the_marks_would_give(name, messages):
    marked = answers(TEMPLATES[name], messages)
    assert len(marked) == sum(message["role"] == "assistant" for message in messages)
    assert answers(unmarked(TEMPLATES[name]), messages) == marked


def test_answers_that_repeat_the_prompt_or_each_other():
    messages = [USER, {"role": "assistant", "content": "hi"}, USER, {"role": "assistant", "content": "hi"}]
    for template in TEMPLATES.values():
        assert answers(unmarked(template), messages) == answers(template, messages)


def test_conversations_that_begin_with_the_assistant():
    messages = [YO, USER, YO]
    for name in ("tiny", "chatml", "turns"):
        assert answers(unmarked(TEMPLATES[name]), messages) == answers(TEMPLATES[name], messages)


def test_a_template_that_refuses_parts_of_a_conversation():
    # without its last answer the conversation ends with a user turn, which this one refuses
    template = (
        "{%- if messages[-1].role != 'assistant' -%}{{- raise_exception('no answer') -}}{%- endif -%}"
        + unmarked(tiny.CHAT_TEMPLATE)
    )
    assert answers(template, THREE_TURNS[1:5]) == ["yo</s>", "hi yo</s>"]


def test_a_template_without_an_end_of_turn():
    template = "{%- for m in messages -%}{{- m.role + ': ' + m.content + '\n' -}}{%- endfor -%}"
    assert answers(template, [USER, YO]) == ["yo\n"]
    assert answers(template, [USER, YO, USER, YO]) == ["yo\n", "yo\n"]
    # an end that only the last turn has is no part of the others
    template = (
        "{%- for m in messages -%}{{- m.role + ': ' + m.content + (eos_token if loop.last else ' ') -}}{%- endfor -%}"
    )
    assert answers(template, [USER, YO, USER, YO]) == ["yo", "yo</s>"]
    # blanks after the last turn alone are no part of any
    turn = "{{- m.role + ': ' + m.content + eos_token + ('\n' if loop.last else '') -}}"
    template = "{%- for m in messages -%}" + turn + "{%- endfor -%}"
    assert answers(template, [USER, YO, USER, YO]) == ["yo</s>", "yo</s>"]


def test_answers_that_cannot_be_told_from_the_rest_are_refused():
    # the content is printed twice
    template = "{%- for m in messages -%}{{- m.role + m.content + m.content -}}{%- endfor -%}"
    with pytest.raises(RowError) as caught:
        answers(template, [USER, YO])
    assert str(caught.value) == (
        "the chat template has no {% generation %} marks, and what it prints for message 1 cannot be told from the "
        "rest; add the marks to the template, or give --response_template"
    )
    assert answers(template, [USER, YO], response_template="assistant") == ["yoyo"]


def test_marks_whose_place_cannot_be_trusted_are_not():
    # transformers counts the characters before a macro, not those before the mark in it
    macro = (
        "{%- macro turn(m) -%}{{- '<|assistant|>' -}}{%- generation -%}{{- m.content + eos_token -}}"
        "{%- endgeneration -%}{%- endmacro -%}"
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- turn(m) -}}{%- else -%}"
        "{{- '<|user|>' + m.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    assert answers(macro, [USER, YO, USER, YO]) == ["yo</s>", "yo</s>"]
    block = macro.replace("{%- macro turn(m) -%}", "{%- set x -%}").replace("{%- endmacro -%}", "{%- endset -%}")
    assert "generation" in block
    build(block)


def test_assistant_turns_of_a_given_prompt_are_not_trained_on():
    for template in TEMPLATES.values():
        for variant in (template, unmarked(template)):
            assert answers(variant, THREE_TURNS, num_given=3) == answers(variant, THREE_TURNS)[1:]
            assert answers(variant, THREE_TURNS[:5], num_given=5) == []


def test_a_prompt_printed_otherwise_when_a_completion_follows():
    # one mark an assistant turn still tells them apart
    assert answers(THINKING, [USER, YO, YO], num_given=2) == ["<think></think>yo<|end|>"]
    # several marks a turn do not
    template = THINKING.replace("{%- generation -%}", "{%- generation -%}{%- endgeneration -%}{%- generation -%}")
    messages = [USER, YO, USER, YO]
    with pytest.raises(RowError) as caught:
        answers(template, messages, num_given=2)
    assert str(caught.value) == (
        "the chat template prints the prompt otherwise when the completion follows, so the completion cannot be told "
        "from it; put both into one column of messages"
    )


def test_all_of_it():
    rendered = build(tiny.CHAT_TEMPLATE, train_on_all=True)[0].render([USER, YO], tools=None)
    assert rendered.spans == ((0, len(rendered.text)),)


def test_templates_of_the_flags_instead_of_marks():
    flags = {"response_template": "<|assistant|>", "instruction_template": "<|user|>"}
    assert answers(tiny.CHAT_TEMPLATE, THREE_TURNS[1:5], **flags) == ["yo</s>", "hi yo</s>"]
    assert answers(tiny.CHAT_TEMPLATE, THREE_TURNS[1:5], response_template="<|assistant|>") == ["hi yo</s>"]
    chat, _ = build(tiny.CHAT_TEMPLATE, response_template="### Answer")
    assert chat.render([USER, YO], tools=None).dropped == NO_TEMPLATE


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 9, "unit": None}}}
NULL = {"role": "assistant", "content": None, "tool_calls": [CALL]}
NO_CONTENT = {"role": "assistant", "tool_calls": [CALL]}
CALL_TEXT = '<|tool|>{"name": "f", "arguments": {"x": 9, "unit": null}}</s>'


@pytest.mark.parametrize("call", [NULL, NO_CONTENT])
def test_null_content_adds_nothing(call):
    # https://github.com/PrimeIntellect-ai/renderers/pull/131
    messages = [USER, call, {"role": "tool", "content": "no"}, YO]
    for template in (tiny.RAW_TEMPLATE, unmarked(tiny.RAW_TEMPLATE)):
        assert answers(template, messages) == [CALL_TEXT, "yo</s>"]
    # a template that adds texts fails on a null, so the null becomes an empty text
    assert answers(tiny.CHAT_TEMPLATE, messages) == ["</s>", "yo</s>"]
    # the messages given are left alone
    assert call in (NULL, NO_CONTENT)
    assert messages[1] is call


def test_a_template_that_looks_for_the_null_gets_it():
    template = tiny.CHAT_TEMPLATE.replace(
        "message['content'] + eos_token", "('CALL' if message['content'] is none else message['content']) + eos_token"
    )
    assert answers(template, [USER, NULL]) == ["CALL</s>"]


def test_the_word_none_in_a_text_is_a_word():
    messages = [{"role": "user", "content": "None or None?"}, NULL, {"role": "assistant", "content": "None"}]
    assert answers(tiny.RAW_TEMPLATE, messages) == [CALL_TEXT, "None</s>"]


def test_tools_are_given_to_the_template():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"default": None}}}}}
    chat, tokenizer = build(tiny.RAW_TEMPLATE)
    text = chat.render([USER, YO], tools=[tool]).text
    assert text == tokenizer.apply_chat_template([USER, YO], tools=[tool], tokenize=False)
    assert '{"x": {"default": null}}' in text


def test_a_tokenizer_with_a_template_for_tools():
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = {"default": tiny.CHAT_TEMPLATE, "tool_use": tiny.RAW_TEMPLATE}
    chat = Chat(tokenizer, response_template=None, instruction_template=None, train_on_all=False)
    assert "<|tool|>" not in chat.render([USER, YO], tools=None).text
    assert "<|tool|>" in chat.render([USER, YO], tools=[{"name": "f"}]).text


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": " \n"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "assistant", "content": "", "name": "bob"},
        {"role": "assistant", "content": []},
    ],
)
def test_conversations_whose_answers_are_all_empty_are_dropped(answer):
    # the marks would train on the end of turn alone
    chat, _ = build(tiny.RAW_TEMPLATE)
    assert chat.render([USER, answer], tools=None).dropped == EMPTY_ANSWER
    assert chat.render([USER, answer, USER, YO], tools=None).dropped is None
    assert chat.render([USER, {**answer, "reasoning_content": "so"}], tools=None).dropped is None


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "the conversation is no list of messages; a message is an object with role and content"),
        ({"role": "user"}, "the conversation is no list of messages; a message is an object with role and content"),
        ([], "the conversation has no message; remove the row"),
        (
            [USER, {"from": "gpt", "value": "yo"}],
            "message 1 has no role; a message is an object with role and content, it has from, value",
        ),
        (["hi"], "message 0 has no role; a message is an object with role and content, it is no object"),
        (
            [{"role": None, "content": "x"}],
            "message 0 has no role; a message is an object with role and content, it has role, content",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": "a.png"}]}],
            "message 0 has a part of type 'image', but only text is trained on; remove the row",
        ),
    ],
)
def test_what_is_no_conversation(messages, message):
    with pytest.raises(RowError) as caught:
        build(tiny.CHAT_TEMPLATE)[0].render(messages, tools=None)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("template", "messages", "sentence"),
    [
        (tiny.STRICT_TEMPLATE, [{"role": "system", "content": "s"}, USER, YO], tiny.STRICT_SENTENCE),
        (tiny.STRICT_TEMPLATE, [USER, USER, YO], tiny.STRICT_SENTENCE),
        ("{{ messages[5]['content'] + 'x' }}", [USER, YO], "list object has no element 5"),
        ("{{ messages[0].content + 1 }}", [USER, YO], 'can only concatenate str (not "int") to str'),
        ("{{ messages[0].content.nope() }}", [USER, YO], "'str object' has no attribute 'nope'"),
        ("{{ messages[0].content | nope2(1) }}", [USER, YO], None),
    ],
)
def test_what_the_template_refuses_is_told_in_its_own_words(template, messages, sentence):
    # https://github.com/unslothai/unsloth/issues/334
    if sentence is None:
        with pytest.raises(DataError, match="No filter named 'nope2'"):
            build(template)[0].render(messages, tools=None)
        return
    with pytest.raises(RowError) as caught:
        build(template)[0].render(messages, tools=None)
    assert str(caught.value) == f"the chat template refuses the conversation: {sentence}"


def test_no_template_or_a_broken_one():
    with pytest.raises(DataError) as caught:
        build(None)
    assert str(caught.value) == (
        "The rows are conversations, but the tokenizer has no chat template; give one by --chat_template"
    )
    with pytest.raises(DataError) as caught:
        build("{{ x }}\n{% for m in messages %}")
    assert str(caught.value).startswith("The chat template is not valid Jinja, line 2: Unexpected end of template.")
    # marks and loop controls are valid
    build("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}")
