"""Faults that people who fine-tune have reported, each with its right values, in both layouts of a batch."""

import codecs
import json

import pytest
import torch

from tests import tiny
from tuning.config.configs import DataArguments
from tuning.data import sources, tokenization
from tuning.data.collators import IGNORE_INDEX
from tuning.errors import DataError

X = IGNORE_INDEX
A, B, C, D = tiny.ids("abcd")


def supervised(batch):
    return int((batch["labels"][:, 1:] != X).sum())


def loss_of(model, batch):
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=X).item()


@pytest.mark.parametrize("pad_token", ["<pad>", "</s>", None])
def test_pad_that_is_eos_loses_no_eos(prepare, collate, pad_token):
    # https://github.com/huggingface/trl/issues/976
    tokenizer = tiny.build_tokenizer(pad_token=pad_token)
    data = prepare([{"text": "ab"}, {"text": "abcd"}], tokenizer, dataset_text_field="text")
    assert data.train["input_ids"][:] == [[A, B, 2], [A, B, C, D, 2]]
    batch = collate(list(data.train))
    assert (batch["labels"] == 2).sum() == 2
    assert supervised(batch) == 6 == data.report.counts["train"].supervised


LONG_PROMPT = [
    {"output": "q1\nA:yes"},
    {"output": "this question alone is longer than the limit\nA:no"},
    {"output": "q3\nA:ok"},
]


@pytest.mark.parametrize("template", ["\nA:", r"\nA:"])
def test_a_prompt_that_fills_the_length_is_dropped_and_counted(prepare, collate, template):
    # https://github.com/huggingface/trl/issues/3927
    flags = {"dataset_text_field": "output", "response_template": template, "max_seq_length": 24}
    data = prepare(LONG_PROMPT, **flags)
    assert data.lengths.tolist() == [9, 8]
    batch = collate(list(data.train))
    assert supervised(batch) == 7
    assert "train: 1 row dropped, no trainable token in the first 24: row 1 of " in str(data.report)
    model = tiny.build_model()
    without = prepare([LONG_PROMPT[0], LONG_PROMPT[2]], **flags)
    assert abs(loss_of(model, batch) - loss_of(model, collate(list(without.train)))) < 1e-6


def test_nothing_left_to_train_on_is_an_error(prepare, write):
    path = write(LONG_PROMPT[1:2])
    with pytest.raises(DataError) as caught:
        prepare(path, dataset_text_field="output", response_template="\nA:", max_seq_length=24)
    assert str(caught.value) == (
        f"No row of {path} can be trained on: 1 read, all dropped (1 for no trainable token in the first 24); look at "
        f"row 0 of {path}, at --response_template and --max_seq_length"
    )
    path = write([{"text": "a"}, {"text": ""}])
    with pytest.raises(DataError) as caught:
        prepare(path, response_template="### Answer")
    assert "2 read, all dropped (1 for response template not in the text, 1 for empty text)" in str(caught.value)


@pytest.mark.parametrize("policy", ["truncate", "drop", "error"])
def test_length_policies(prepare, policy):
    rows = [{"text": "abcd"}, {"text": "ab"}]
    if policy == "error":
        with pytest.raises(DataError, match=r"row 0 of .* has 5 tokens, more than --max_seq_length 3"):
            prepare(rows, max_seq_length=3, max_seq_length_policy=policy)
        return
    data = prepare(rows, max_seq_length=3, max_seq_length_policy=policy)
    kept = {"truncate": [[A, B, C], [A, B, 2]], "drop": [[A, B, 2]]}[policy]
    assert data.train["input_ids"][:] == kept
    assert data.report.counts["train"].truncated == (policy == "truncate")


CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "hey"},
            {"role": "assistant", "content": "sup"},
        ]
    },
]


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, tiny.UNMARKED_TEMPLATE])
def test_one_bos_where_the_template_prints_it(prepare, collate, template):
    # https://github.com/OpenRLHF/OpenRLHF/issues/393
    tokenizer = tiny.build_tokenizer(adds_bos=True, chat_template=template)
    data = prepare(CHATS, tokenizer)
    rows = data.train["input_ids"][:]
    assert rows[0] == [1, 4, 79, 80, 6, 5, 96, 86, 2]
    assert all(row.count(1) == 1 and row[0] == 1 for row in rows)
    assert rows == [tokenizer.apply_chat_template(row["messages"], tokenize=True).input_ids for row in CHATS]
    assert data.train["labels"][0] == [X, X, X, X, X, X, 96, 86, 2]
    assert supervised(collate(list(data.train))) == 3 + 4
    texts = prepare([{"text": "hi"}], tokenizer)
    assert texts.train["input_ids"][0] == [1, 79, 80, 2]


INSTRUCTIONS = [
    {"instruction": "Name a colour", "input": "", "output": "red"},
    {"instruction": "Open the door", "input": "", "output": ""},
    {"instruction": "Add", "input": "2 and 3", "output": "5"},
]


def test_an_empty_answer_is_dropped_and_counted(prepare, collate, write):
    # https://github.com/tatsu-lab/stanford_alpaca/issues/265
    data = prepare(write(json.dumps(INSTRUCTIONS, indent=1), "rows.json"))
    assert supervised(collate(list(data.train))) == 4 + 2 == data.report.counts["train"].supervised
    assert "train: 1 row dropped, empty answer: row 1 of " in str(data.report)
    with pytest.raises(DataError, match=r"1 read, all dropped \(1 for empty answer\)"):
        prepare(INSTRUCTIONS[1:2])
    # asked for all of it, the row has something to teach
    assert len(prepare(INSTRUCTIONS, train_on_input=True).train) == 3


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_and_crlf_change_nothing(prepare, collate, write, name):
    # https://github.com/huggingface/datasets/issues/8241
    rows = [{"input": "one", "output": "1"}, {"input": "two", "output": "2"}, {"input": "drei ü", "output": "3"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    plain = prepare(write("\n".join(lines), "plain.jsonl"))
    marked = prepare(write(codecs.BOM_UTF8 + "\r\n".join(lines).encode(), name))
    assert marked.train[:] == plain.train[:]
    assert len(marked.train) == 3
    assert supervised(collate(list(marked.train))) == 6


TOOL_ROWS = [
    {
        "tools": [{"function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}],
        "messages": [
            {"role": "user", "content": "Rain in Lund?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Lund"}}}],
            },
            {"role": "tool", "content": "no"},
            {"role": "assistant", "content": "No rain."},
        ],
    },
    {
        "tools": [{"function": {"name": "root", "parameters": {"properties": {"x": {"default": None}}}}}],
        "messages": [
            {"role": "user", "content": "root of 9"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"function": {"name": "root", "arguments": {"x": 9, "unit": None, "pi": 3.14159265358979}}}
                ],
            },
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "3"},
        ],
    },
]


def test_tool_schemas_do_not_leak_and_null_content_is_no_word(prepare, collate, write, tmp_path):
    # https://github.com/modelscope/ms-swift/pull/10125 and https://github.com/PrimeIntellect-ai/renderers/pull/131
    path = write(TOOL_ROWS)
    raw = sources.read(DataArguments(training_data_path=path), seed=0)
    assert raw.train.to_list() == TOOL_ROWS
    raw.train.map(lambda row: row).to_parquet(tmp_path / "rows.parquet")

    tokenizer = tiny.build_tokenizer(chat_template=tiny.RAW_TEMPLATE)
    from_json, from_parquet = prepare(path, tokenizer), prepare(str(tmp_path / "rows.parquet"), tokenizer)
    assert from_json.train["labels"][:] == from_parquet.train["labels"][:]
    texts = [tokenizer.decode(ids) for ids in from_json.train["input_ids"]]
    assert '{"properties": {"city": {"type": "string"}}}' in texts[0]
    assert '{"properties": {"x": {"default": null}}}' in texts[1]
    trained = [tokenizer.decode([i for i in labels if i != X]) for labels in from_json.train["labels"]]
    assert trained == [
        '<|tool|>{"name": "weather", "arguments": {"city": "Lund"}}</s>No rain.</s>',
        '<|tool|>{"name": "root", "arguments": {"x": 9, "unit": null, "pi": 3.14159265358979}}</s>3</s>',
    ]
    assert supervised(collate(list(from_json.train))) == from_json.report.counts["train"].supervised


REFUSED = [
    CHATS[0],
    CHATS[1],
    {"messages": [{"role": "user", "content": "e"}, {"role": "user", "content": "f"}]},
]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_template_that_refuses_a_row_names_it(prepare, write, num_workers, streaming, monkeypatch):
    # https://github.com/unslothai/unsloth/issues/334
    monkeypatch.setattr(tokenization, "_BATCH_ROWS", 1)
    path = write(REFUSED)
    tokenizer = tiny.build_tokenizer(chat_template=tiny.STRICT_TEMPLATE)
    with pytest.raises(DataError) as caught:
        list(prepare(path, tokenizer, preprocessing_num_workers=num_workers, streaming=streaming).train)
    assert str(caught.value) == (f"row 1 of {path}: the chat template refuses the conversation: {tiny.STRICT_SENTENCE}")


def test_rows_that_are_tokens_and_their_seams(prepare, collate):
    # https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449
    rows = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}
        for ids in ([5, 6, 7], [20, 21], [40, 41, 42, 43])
    ]
    data = prepare(rows, vocab_size=tiny.BIGRAM_VOCAB_SIZE)
    batch = collate(list(data.train))
    assert supervised(batch) == 6
    assert abs(loss_of(tiny.build_bigram(), batch) - tiny.bigram_losses()[0]) < 1e-5
    with pytest.raises(DataError, match=r"row 2 of .* has 43 among its input_ids; allowed are integers from 0 to 42"):
        prepare(rows, vocab_size=43)


def test_a_column_that_only_later_rows_lack_is_not_taken_for_absent(prepare, monkeypatch):
    # rows of another batch have labels; without them this batch would be trained on as a whole
    monkeypatch.setattr(tokenization, "_BATCH_ROWS", 1)
    with pytest.raises(DataError, match=r"row 1 of .* has no labels \(absent or null\), but other rows have"):
        prepare([{"input_ids": [1, 2], "labels": [X, 2]}, {"input_ids": [1, 2]}])
    assert prepare([{"input_ids": [1, 2], "labels": None}]).train["labels"][0] == [X, 2]
