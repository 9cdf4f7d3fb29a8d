"""One batch of rows to samples: BOS and EOS, once each; masked parts; counts; messages that name the row."""

import pytest

from tests import tiny
from tuning.config.configs import DataArguments
from tuning.data import tables
from tuning.data.encoding import Encoder
from tuning.data.origin import Origin
from tuning.data.report import Dropped
from tuning.errors import DataError

X = -100


def encode(rows, tokenizer=None, *, start=0, max_seq_length=256, **flags):
    table = tables.build([rows], name_row=str)
    encoder = Encoder(
        table.column_names,
        DataArguments(**flags),
        tokenizer or tiny.build_tokenizer(),
        max_seq_length=max_seq_length,
        vocab_size=tiny.NUM_TOKENS,
    )
    origin = Origin(files=(("f.jsonl", 1_000),), fingerprint="")
    return encoder.encode(table.select(encoder.columns), start=start, origin=origin)


def samples(rows, tokenizer=None, **flags):
    flat, _ = encode(rows, tokenizer, **flags)
    result, begin = [], 0
    for length in flat.lengths.tolist():
        result.append((flat.ids[begin : begin + length].tolist(), flat.labels[begin : begin + length].tolist()))
        begin += length
    return result


A, B, C = tiny.ids("abc")


@pytest.mark.parametrize("adds_eos", [True, False])
@pytest.mark.parametrize(
    ("text", "adds_bos", "ids"),
    [
        ("ab", False, [A, B, 2]),
        ("ab", True, [1, A, B, 2]),
        ("<s>ab", True, [1, A, B, 2]),
        ("<s>ab", False, [1, A, B, 2]),
        ("ab</s>", True, [1, A, B, 2]),
        ("<s>ab</s>", True, [1, A, B, 2]),
        ("a</s>b", False, [A, 2, B, 2]),
    ],
)
def test_one_bos_and_one_eos(text, adds_bos, adds_eos, ids):
    # https://github.com/OpenRLHF/OpenRLHF/issues/393
    tokenizer = tiny.build_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos)
    assert samples([{"text": text}], tokenizer) == [(ids, [X, *ids[1:]])]


def test_a_chat_template_prints_its_own():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = tiny.build_tokenizer(adds_bos=True, adds_eos=True)
    assert samples([{"messages": messages}], tokenizer) == [
        ([1, 4, A, 6, 5, B, 2], [X, X, X, X, X, B, 2]),
    ]
    # and none is added where it prints none
    tokenizer.chat_template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert samples([{"messages": messages}], tokenizer) == [([A, B], [X, B])]


def test_the_answer_ends_by_the_eos():
    assert samples([{"prompt": "ab", "completion": "c"}]) == [([A, B, C, 2], [X, X, C, 2])]
    assert samples([{"prompt": "ab", "completion": "c</s>"}]) == [([A, B, C, 2], [X, X, C, 2])]
    # an answer that something follows does not
    flags = {"response_template": "a", "instruction_template": "b"}
    assert samples([{"text": "acb"}], **flags) == [([A, C, B, 2], [X, C, X, X])]


def test_tokens_are_those_of_the_whole_text():
    # prompt and answer are tokenized together: ".\n" is one token of the text, and none of its parts alone
    ids = tiny.build_tokenizer()("a.\nb", add_special_tokens=False).input_ids
    assert len(ids) == 3
    assert samples([{"input": "a.", "output": "b"}]) == [([*ids, 2], [X, X, B, 2])]


def test_counts_say_what_became_of_each_row():
    rows = [
        {"input": "a", "output": "b"},
        {"input": "a", "output": ""},
        {"input": "abcabc", "output": "b"},
        {"input": "a", "output": "bcabcabc"},
        {"input": "a", "output": " "},
    ]
    flat, counts = encode(rows, start=10, max_seq_length=6)
    assert flat.rows.tolist() == [10, 13]
    assert (counts.read, counts.kept, counts.truncated) == (5, 2, 1)
    assert counts.dropped == {
        "empty answer": Dropped(count=2, rows=(11, 14)),
        "no trainable token in the first 6": Dropped(count=1, rows=(12,)),
    }
    assert (counts.tokens, counts.supervised) == (4 + 6, 2 + 4)


def test_all_of_a_batch_dropped():
    flat, counts = encode([{"text": ""}, {"text": " "}])
    assert len(flat.ids) == 0
    assert counts.dropped == {"empty text": Dropped(count=2, rows=(0, 1))}


def test_tokens_go_the_same_way():
    flat, counts = encode([{"input_ids": [A, B, C]}, {"input_ids": [A]}], max_seq_length=2)
    assert flat.ids.tolist() == [A, B]
    assert flat.labels.tolist() == [X, B]
    assert counts.dropped == {"no trainable token": Dropped(count=1, rows=(1,))}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input": "a", "output": None},
            "there is nothing (absent or null) in output, which other rows have; it has input; all rows must be of one "
            "kind",
        ),
        (
            {"prompt": "x"},
            "there is nothing (absent or null) in input, output, which other rows have; it has nothing that counts; "
            "all rows must be of one kind",
        ),
        ({"input": "a", "output": ["b"]}, "the column 'output' holds a list where a text is expected; mend the row"),
    ],
)  # fmt: skip
def test_a_row_of_another_kind_is_named(row, message):
    with pytest.raises(DataError) as caught:
        encode([{"input": "a", "output": "b"}, row], start=40)
    assert str(caught.value) == f"row 41 of f.jsonl: {message}"


def test_a_tokenizer_without_offsets_trains_on_whole_texts_only(monkeypatch):
    tokenizer = tiny.build_tokenizer()

    class Slow:
        """A tokenizer written in Python: lists of ids and nothing else."""

        eos_token_id = tokenizer.eos_token_id
        chat_template = None

        def __call__(self, text, **kwargs):
            encoded = tokenizer(text, add_special_tokens=kwargs.get("add_special_tokens", True))
            encoded._encodings = None
            return encoded

    assert samples([{"text": "ab"}], Slow()) == [([A, B, 2], [X, B, 2])]
    with pytest.raises(DataError) as caught:
        encode([{"input": "a", "output": "b"}], Slow())
    assert str(caught.value) == (
        "Only a part of each row is to be trained on, but the tokenizer does not say which characters its tokens are; "
        "use a fast tokenizer (tokenizer.json), or give --train_on_input true"
    )
