"""Kinds of rows: which one is chosen, what text a row becomes, and what is refused."""

import math

import pytest

from tests import tiny
from tuning.config.configs import DataArguments
from tuning.data.masking import EMPTY_ANSWER, EMPTY_TEXT, NO_TEMPLATE, RowError
from tuning.data.rows import choose
from tuning.errors import DataError

USER = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "yo"}


def kind_of(columns, **flags):
    return choose(columns, DataArguments(**flags), tiny.build_tokenizer())


def render(row, **flags):
    return kind_of(list(row), **flags).render(row)


def answers(row, **flags):
    rendered = render(row, **flags)
    return rendered.text, [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize(
    ("columns", "flags", "title"),
    [
        (["input_ids", "text"], {}, "tokens; trained on: labels and masks where they are given"),
        (["input_ids"], {"train_on_input": True}, "tokens; trained on: all"),
        (["text", "messages"], {}, "conversations in messages; trained on: assistant turns"),
        (["text", "messages"], {"train_on_input": True}, "conversations in messages; trained on: all"),
        (["messages", "tools"], {}, "conversations in messages; trained on: assistant turns; the chat template has no "
         "place for the column tools"),
        (["prompt", "completion", "text"], {}, "prompt and completion; trained on: completion"),
        (["instruction", "input", "output", "text"], {}, "instruction, input and output; trained on: output"),
        (["instruction", "output"], {}, "instruction and output; trained on: output"),
        (["input", "output"], {}, "input and output; trained on: output"),
        (["text", "input"], {}, "texts in text; trained on: all"),
        (["text", "messages"], {"dataset_text_field": "text"}, "texts in text; trained on: all"),
        (["messages", "dialog"], {"dataset_conversation_field": "dialog"},
         "conversations in dialog; trained on: assistant turns"),
        (["output"], {"dataset_text_field": "output", "response_template": "A:"},
         "texts in output; trained on: what follows 'A:'"),
        (["q", "a"], {"data_formatter_template": "{{q}} {{ a }} {{q}}"}, "formatted from q, a; trained on: all"),
        (["q", "text"], {"data_formatter_template": "{{q}}", "dataset_text_field": "text"},
         "formatted from q; trained on: all"),
    ],
)  # fmt: skip
def test_the_first_kind_that_fits(columns, flags, title):
    assert kind_of(columns, **flags).title == title


@pytest.mark.parametrize(
    ("row", "flags", "text", "trained"),
    [
        ({"text": "ab"}, {}, "ab", ["ab"]),
        ({"input": "i", "output": "o"}, {}, "i\no", ["o"]),
        ({"input": "", "output": "o"}, {}, "o", ["o"]),
        ({"instruction": "I", "input": "i", "output": "o"}, {}, "I\ni\no", ["o"]),
        ({"instruction": "I", "input": "", "output": "o"}, {}, "I\no", ["o"]),
        ({"instruction": "I", "input": None, "output": "o"}, {}, "I\no", ["o"]),
        ({"instruction": "I", "output": " o "}, {}, "I\n o ", [" o "]),
        ({"prompt": "p", "completion": "c"}, {}, "pc", ["c"]),
        ({"prompt": "p", "completion": "c"}, {"train_on_input": True}, "pc", ["pc"]),
        ({"prompt": "p A:", "completion": "c"}, {"response_template": "A:"}, "p A:c", ["c"]),
        ({"input": "i", "output": "o"}, {"train_on_input": True}, "i\no", ["i\no"]),
        ({"input": 7, "output": 1.5}, {}, "7\n1.5", ["1.5"]),
        ({"q": "x", "a": 3}, {"data_formatter_template": r"Q: {{q}}\nA: {{ a }}"}, "Q: x\nA: 3", ["Q: x\nA: 3"]),
        ({"q": "x", "a": 3}, {"data_formatter_template": "Q: {{q}} A: {{ a }}", "response_template": "A:"},
         "Q: x A: 3", [" 3"]),
        ({"q": "{{a}}", "a": "n"}, {"data_formatter_template": "{{q}} {{a}}"}, "{{a}} n", ["{{a}} n"]),
        ({"a b": "x"}, {"data_formatter_template": "{{a b}}"}, "x", ["x"]),
        ({"t": "x\nA:y"}, {"dataset_text_field": "t", "response_template": r"\nA:"}, "x\nA:y", ["y"]),
        ({"t": "Q:x A:y Q:z A:w"},
         {"dataset_text_field": "t", "response_template": "A:", "instruction_template": "Q:"}, "Q:x A:y Q:z A:w",
         ["y ", "w"]),
        ({"t": "x A:y"}, {"dataset_text_field": "t", "response_template": "A:", "train_on_input": True}, "x A:y",
         ["x A:y"]),
    ],
)  # fmt: skip
def test_texts_and_their_answers(row, flags, text, trained):
    assert answers(row, **flags) == (text, trained)
    assert not render(row, **flags).is_complete


@pytest.mark.parametrize(
    ("row", "flags", "reason"),
    [
        ({"input": "i", "output": ""}, {}, EMPTY_ANSWER),
        ({"input": "i", "output": " \n"}, {}, EMPTY_ANSWER),
        ({"prompt": "p", "completion": ""}, {}, EMPTY_ANSWER),
        ({"prompt": [USER], "completion": [{"role": "assistant", "content": ""}]}, {}, EMPTY_ANSWER),
        ({"text": ""}, {}, EMPTY_TEXT),
        ({"text": " \n"}, {}, EMPTY_TEXT),
        ({"text": "q"}, {"response_template": "A:"}, NO_TEMPLATE),
        ({"text": "q A:"}, {"response_template": "A:"}, EMPTY_ANSWER),
        # the whole row is wanted, so an empty answer takes nothing away
        ({"input": "i", "output": ""}, {"train_on_input": True}, None),
    ],
)
def test_rows_without_an_answer_are_dropped_with_the_reason(row, flags, reason):
    # https://github.com/tatsu-lab/stanford_alpaca/issues/265
    assert render(row, **flags).dropped == reason


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": [USER], "completion": [YO]}, "<s><|user|>hi<|end|><|assistant|>yo</s>"),
        ({"prompt": "hi", "completion": [YO]}, "<s><|user|>hi<|end|><|assistant|>yo</s>"),
    ],
)
def test_conversations_as_prompt_and_completion(row, text):
    assert answers(row) == (text, ["yo</s>"])
    assert render(row).is_complete


def test_answers_in_a_prompt_are_not_trained_on():
    row = {"prompt": [USER, YO, USER], "completion": [{"role": "assistant", "content": "oy"}]}
    assert answers(row)[1] == ["oy</s>"]


def test_texts_need_no_chat_template():
    kind = choose(["prompt", "completion"], DataArguments(), tiny.build_tokenizer(chat_template=None))
    assert kind.render({"prompt": "p", "completion": "c"}).text == "pc"
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        kind.render({"prompt": [USER], "completion": [YO]})
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        choose(["messages"], DataArguments(), tiny.build_tokenizer(chat_template=None))


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_as_a_list_or_as_json_text(tools):
    kind = choose(["messages", "tools"], DataArguments(), tiny.build_tokenizer(chat_template=tiny.RAW_TEMPLATE))
    assert '<|tool|>[{"name": "f"}]<|end|>' in kind.render({"messages": [USER, YO], "tools": tools}).text
    for none in (None, [], ""):
        assert "<|tool|>" not in kind.render({"messages": [USER, YO], "tools": none}).text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": ["a"]}, "the column 'text' holds a list where a text is expected; mend the row"),
        ({"text": {"a": 1}}, "the column 'text' holds an object where a text is expected; mend the row"),
        ({"text": math.nan},
         "the column 'text' holds nan, which is no number, where a text is expected; mend the row"),
        ({"text": True}, "the column 'text' holds true or false where a text is expected; mend the row"),
        ({"prompt": [USER], "completion": "c"},
         "the column 'prompt' holds a list where a text is expected; mend the row"),
        ({"messages": [USER], "tools": "nope"},
         "the column 'tools' holds a text that is no JSON (Expecting value); mend the row"),
        ({"messages": [USER], "tools": [1]},
         "the column 'tools' holds a list where a list of objects is expected; mend the row"),
        ({"messages": [USER], "tools": 5},
         "the column 'tools' holds a number where a list of objects is expected; mend the row"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_kind(row, message):
    with pytest.raises(RowError) as caught:
        render(row)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("columns", "flags", "message"),
    [
        (["a", "b"], {}, "The rows have the columns a, b, which are of no known kind; needed are input_ids, or "
         "messages, or prompt and completion, or output with instruction or input, or text, or a column named by "
         "--dataset_text_field, --dataset_conversation_field or --data_formatter_template"),
        (["a"], {"dataset_text_field": "text"},
         "--dataset_text_field names the column 'text', which is not there; the rows have a"),
        (["a"], {"dataset_conversation_field": "c"},
         "--dataset_conversation_field names the column 'c', which is not there; the rows have a"),
        (["a"], {"data_formatter_template": "{{a}} {{b}}"},
         "--data_formatter_template names the column 'b', which is not there; the rows have a"),
        (["a"], {"data_formatter_template": "{a}"},
         "--data_formatter_template '{a}' names no column, so all rows would "
         "be the same; write a column as {{column}}"),
        (["text"], {"instruction_template": "Q:"}, "--instruction_template ends an answer, but nothing says where one "
         "begins; give --response_template too"),
        (["input_ids"], {"response_template": "A:"}, "--response_template looks for text, but the rows are tokens "
         "already (column input_ids); give labels or a completion_mask with them, or give rows of text"),
        (["text"], {"response_template": ""},
         "--response_template is empty, so it stands everywhere; give a text or drop the flag"),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_the_rows(columns, flags, message):
    with pytest.raises(DataError) as caught:
        kind_of(columns, **flags)
    assert str(caught.value) == message
