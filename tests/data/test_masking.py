"""Answers by character, tokens by offset: the traps of templates that a tokenizer merges with what is around them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests import tiny
from tuning.data.masking import EMPTY_ANSWER, Rendered, answer_spans, token_spans


def tokens_of(text, spans, tokenizer=None):
    """The text of the tokens in each span."""
    tokenizer = tokenizer or tiny.build_tokenizer()
    encoded = tokenizer([text], add_special_tokens=False)
    ids = encoded["input_ids"][0]
    return [tokenizer.decode(ids[first:last]) for first, last in token_spans(encoded.encodings[0], spans)]


def answers(text, response, instruction=None):
    spans = answer_spans(text, response_template=response, instruction_template=instruction)
    return [text[start:end] for start, end in spans]


def test_the_last_response_template_counts_without_an_instruction_template():
    assert answers("Q: 1 A: one Q: 2 A: two", "A:") == [" two"]
    assert answers("no template", "A:") == []
    assert answers("A:", "A:") == [""]


def test_every_answer_counts_with_an_instruction_template():
    assert answers("Q: 1 A: one Q: 2 A: two", "A:", "Q:") == [" one ", " two"]
    # the question after the last answer ends it, and is none itself
    assert answers("Q: 1 A: one Q: 2", "A:", "Q:") == [" one "]
    # a response template inside an answer begins no other answer
    assert answers("Q: 1 A: say A: twice Q: 2 A: two", "A:", "Q:") == [" say A: twice ", " two"]
    assert answers("Q: 1", "A:", "Q:") == []


def test_a_template_whose_start_is_merged_with_what_comes_before():
    # ".\n" is one token, so the ids of "\n\nAnswer:" alone are nowhere in the text
    tokenizer = tiny.build_tokenizer()
    text = "What is it.\n\nAnswer: yes"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    template = tokenizer("\n\nAnswer:", add_special_tokens=False).input_ids
    assert not any(ids[start : start + len(template)] == template for start in range(len(ids)))
    spans = answer_spans(text, response_template="\n\nAnswer:", instruction_template=None)
    assert tokens_of(text, spans) == [" yes"]


def test_a_token_that_holds_both_prompt_and_answer_is_trained_on():
    # the answer begins with the second newline of the token "\n\n"
    assert tokens_of("q\n\nyes", [(2, 6)]) == ["\n\nyes"]
    assert tokens_of("yes\n\nq", [(0, 4)]) == ["yes\n\n"]


def test_characters_of_several_tokens():
    assert tokens_of("q: ü🙂", [(3, 5)]) == ["ü🙂"]
    assert tokens_of("ü🙂: a", [(0, 1)]) == ["ü"]
    assert tokens_of("ü🙂: a", [(1, 2)]) == ["🙂"]


def test_spans_at_the_ends():
    assert tokens_of("abc", [(0, 3)]) == ["abc"]
    assert tokens_of("abc", [(3, 3)]) == []
    assert tokens_of("abc", [(0, 0)]) == []
    assert tokens_of("abc", [(0, 1), (2, 3)]) == ["a", "c"]
    assert tokens_of("", [(0, 0)]) == []


def build_word_tokenizer(trim_offsets):
    """Whole words with the blank before them; offsets leave the blank out if ``trim_offsets``."""
    words = ["Ġyes", "Ġno", "A", ":", "Q", "Ġ", "Ċ", "ĊĊ", "yes"]
    vocab = {word: index for index, word in enumerate(sorted(set(words) | set("ĠyesnoAQ:Ċ")))}
    merges = [("Ġ", "y"), ("Ġy", "e"), ("Ġye", "s"), ("Ġ", "n"), ("Ġn", "o"), ("Ċ", "Ċ"), ("y", "e"), ("ye", "s")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=":")


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_offsets_that_leave_blanks_out(trim_offsets):
    tokenizer = build_word_tokenizer(trim_offsets)
    assert tokens_of("Q:A: yes", [(4, 8)], tokenizer) == [" yes"]
    assert tokens_of("Q: noA: yes", [(2, 5)], tokenizer) == [" no"]
    assert tokens_of("Q: noA: yes", [(7, 11)], tokenizer) == [" yes"]
    # blanks that are tokens of their own
    assert tokens_of("Q:\n\nyes", [(4, 7)], tokenizer) == ["yes"]
    assert tokens_of("Q:\n\nyes", [(2, 7)], tokenizer) == ["\n\nyes"]
    assert tokens_of("yes\n\nQ", [(0, 3)], tokenizer) == ["yes"]
    assert tokens_of("yes\n\nQ", [(0, 5)], tokenizer) == ["yes\n\n"]
    assert tokens_of("yes\n\n", [(0, 5)], tokenizer) == ["yes\n\n"]


def test_rows_whose_answers_are_all_blank_are_dropped():
    assert Rendered.of_spans("q \n", [(1, 3)]).dropped == EMPTY_ANSWER
    assert Rendered.of_spans("q", [(1, 1)]).dropped == EMPTY_ANSWER
    assert Rendered.of_spans("q a", [(1, 1), (1, 3)]).dropped is None
    assert Rendered.of_spans("q", []).dropped is None


@settings(max_examples=300, deadline=None)
@given(st.text("a.\nü🙂 ", max_size=12), st.data())
def test_every_answer_character_is_in_a_token_of_its_span_and_no_token_is_without_one(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    encoding = tiny.build_tokenizer()([text], add_special_tokens=False).encodings[0]
    expected = [index for index, (first, last) in enumerate(encoding.offsets) if first < end and last > start]
    found = [token for first, last in token_spans(encoding, [(start, end)]) for token in range(first, last)]
    assert found == (expected if end > start else [])
