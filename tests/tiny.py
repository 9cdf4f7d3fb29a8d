"""A tokenizer, a random Llama and a bigram model small enough to check by hand. No file, no network.

The tokenizer works on bytes, so the ids of an ASCII text can be written down: ``id(c) = TOKEN_IDS[c]``. Two merges
(``".\\n"`` before ``"\\n\\n"``) make it swallow the start of a ``"\\n\\nAnswer"`` that follows a full stop, as real
tokenizers do. In the bigram model the logits depend on the current token only: ``logit`` for "next id is this id plus
one" and 0 elsewhere, so a loss is a sum of two known numbers (:func:`bigram_losses`).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>")
PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END, TOOL = range(8)
NUM_TOKENS = 266  # ids of the tokenizer: 8 special, 256 bytes, 2 merges
VOCAB_SIZE = 272  # rows of the model
BIGRAM_VOCAB_SIZE = 64

# prints the BOS itself, marks the assistant's words and ends them by EOS
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>' -}}{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

# the same text without marks of the assistant's words
UNMARKED_TEMPLATE = CHAT_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")

# prints content and tools as they come, so that a null shows as the word None
RAW_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}{{- '<|tool|>' -}}{{- tools | tojson -}}{{- '<|end|>' -}}{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>' -}}{%- generation -%}{{- message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}{{- '<|tool|>' -}}{{- call['function'] | tojson -}}{%- endfor -%}
{{- eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- '<|' + message['role'] + '|>' -}}{{- message['content'] -}}{{- '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

STRICT_SENTENCE = "roles must alternate user/assistant, starting with user"

# refuses a system turn and two turns of one role in a row
STRICT_TEMPLATE = (
    """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('"""
    + STRICT_SENTENCE
    + """') -}}{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] -}}
{{- eos_token if message['role'] == 'assistant' else '<|end|>' -}}
{%- endfor -%}
"""
)

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKEN_IDS = {char: len(SPECIAL_TOKENS) + index for index, char in enumerate(_BYTES)}


def ids(text: str) -> list[int]:
    """Return the ids of printable ASCII ``text`` without blanks, newlines or special tokens."""
    return [TOKEN_IDS[char] for char in text]


def build_tokenizer(
    *,
    pad_token: str | None = "<pad>",
    chat_template: str | None = CHAT_TEMPLATE,
    adds_bos: bool = False,
    adds_eos: bool = False,
    padding_side: str = "right",
) -> PreTrainedTokenizerFast:
    """Build the byte-level tokenizer of 266 ids.

    Args:
        pad_token: Padding token; ``"</s>"`` makes it the EOS.
        chat_template: Jinja chat template, or None.
        adds_bos: Plain tokenization puts the BOS first, as Llama's does.
        adds_eos: Plain tokenization puts the EOS last, as T5's does.
        padding_side: ``"right"`` or ``"left"``.
    """
    newline = "\u010a"  # how a byte-level vocabulary spells the newline byte
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *_BYTES))}
    vocab |= {"." + newline: len(vocab), newline * 2: len(vocab) + 1}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(".", newline), (newline, newline)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if adds_bos or adds_eos:
        single = f"{'<s> ' if adds_bos else ''}$A{' </s>' if adds_eos else ''}"
        backend.post_processor = TemplateProcessing(
            single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token=pad_token,
        padding_side=padding_side,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def build_model(
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int = 2,
    hidden_size: int = 32,
    is_tied: bool = False,
    attn_implementation: str = "eager",
) -> LlamaForCausalLM:
    """Build a random fp32 Llama with 4 heads, 2 key-value heads and 256 positions.

    The weights are large (standard deviation 0.3), so that attention across a border moves logits by whole units.

    Args:
        seed: Seed of the weights.
        vocab_size: Rows of the embedding.
        num_layers: Decoder layers.
        hidden_size: Model width, a multiple of 8.
        is_tied: Head and embedding share their weight.
        attn_implementation: Name of an attention function of transformers.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=is_tied,
        initializer_range=0.3,
        attn_implementation=attn_implementation,
    )
    return _build_llama(config, seed=seed)


def build_bigram(
    *, logit: float = 4.0, vocab_size: int = BIGRAM_VOCAB_SIZE, attn_implementation: str = "eager"
) -> LlamaForCausalLM:
    """Build a Llama whose logits are ``logit`` for "this id plus one" and 0 elsewhere, whatever came before.

    Args:
        logit: The one logit that is not 0.
        vocab_size: Ids, also the model width; a multiple of 8.
        attn_implementation: Name of an attention function of transformers.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=False,
        rms_norm_eps=0.0,
        attn_implementation=attn_implementation,
    )
    model = _build_llama(config, seed=0)
    layer = model.model.layers[0]
    with torch.no_grad():
        # attention and MLP add nothing to the residual stream
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        # a one-hot row of width V has RMS V**-0.5: the weight undoes the norm's scale
        model.model.norm.weight.fill_(vocab_size**-0.5)
        model.lm_head.weight.zero_()
        model.lm_head.weight[torch.arange(1, vocab_size), torch.arange(vocab_size - 1)] = logit
    return model


def bigram_losses(*, logit: float = 4.0, vocab_size: int = BIGRAM_VOCAB_SIZE) -> tuple[float, float]:
    """Return the loss of a target that is "this id plus one", and of any other: 0.767273 and 4.767273 by default."""
    log_sum = math.log(math.exp(logit) + vocab_size - 1)
    return log_sum - logit, log_sum


def save(
    folder: Path, *, model: LlamaForCausalLM | None = None, tokenizer: PreTrainedTokenizerFast | None = None
) -> str:
    """Write a model folder, by default of what the two builders above make, and return its path."""
    (model or build_model()).save_pretrained(folder)
    (tokenizer or build_tokenizer()).save_pretrained(folder)
    return str(folder)


def _build_llama(config: LlamaConfig, *, seed: int) -> LlamaForCausalLM:
    """Build a Llama in eval mode without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()
