"""The attention function: boundaries reach the kernel, calls without them go to the former attention."""

import logging
import types

import pytest
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.attention.dense import attend_dense, boundaries, random_qkv
from tuning.attention import varlen
from tuning.attention.providers import Choice
from tuning.attention.variant import PLAIN, Variant
from tuning.attention.varlen import VarlenAttention, is_flat, registered, varlen_attention
from tuning.errors import UnsupportedError

LENGTHS = [4, 1, 6]


class Layer(nn.Module):
    """Stands in for a model's attention layer."""

    is_causal = True
    num_key_value_groups = 2

    def __init__(self, **config):
        super().__init__()
        self.config = types.SimpleNamespace(**config)
        self.layer_idx = 1


def _heads_first(*tensors):
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in tensors)


def _flat_kwargs(**more):
    return {"cu_seq_lens_q": boundaries(LENGTHS), "max_length_q": max(LENGTHS), **more}


@pytest.mark.parametrize(
    "variant",
    [PLAIN, Variant(window=3), Variant(scale=0.7, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))],
    ids=["plain", "window", "rest"],
)
def test_pure_function(variant):
    q, k, v = random_qkv(LENGTHS)
    out = varlen_attention(q, k, v, boundaries(LENGTHS), max(LENGTHS), variant=variant)
    torch.testing.assert_close(out, attend_dense(q, k, v, LENGTHS, variant), rtol=1e-5, atol=1e-5)


def test_more_tokens_than_boundaries_can_count():
    """2**31 tokens on the meta device: nothing is allocated."""
    q = torch.empty(2**31, 1, 8, device="meta")
    with pytest.raises(UnsupportedError) as error:
        varlen_attention(q, q, q, torch.tensor([0], dtype=torch.int32), 1)
    assert str(error.value) == (
        "A flattened batch of 2147483648 tokens was asked for, but its boundaries are 32-bit integers and end at "
        "2147483647; use a smaller --per_device_train_batch_size or --max_seq_length."
    )


@pytest.mark.parametrize("method", ["attend", "attend_flat"])
def test_what_the_layer_passes_reaches_the_kernel(method):
    q, k, v = random_qkv(LENGTHS)
    variant = Variant(window=3, scale=0.7, softcap=1.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    out, weights = getattr(VarlenAttention("sdpa"), method)(
        Layer(), *_heads_first(q, k, v), None, scaling=0.7,
        **_flat_kwargs(sliding_window=3, softcap=1.5, s_aux=variant.sinks),
    )  # fmt: skip
    assert weights is None
    assert out.shape == (1, 11, 4, 8)
    torch.testing.assert_close(out[0], attend_dense(q, k, v, LENGTHS, variant), rtol=1e-5, atol=1e-5)


def test_a_mask_beside_boundaries_changes_nothing():
    q, k, v = random_qkv(LENGTHS)
    ones = torch.ones(1, 1, 11, 11, dtype=torch.bool)
    out, _ = VarlenAttention("sdpa").attend(Layer(), *_heads_first(q, k, v), ones, **_flat_kwargs())
    torch.testing.assert_close(out[0], attend_dense(q, k, v, LENGTHS, PLAIN), rtol=1e-5, atol=1e-5)


def test_without_boundaries_the_former_attention_answers():
    q, k, v = _heads_first(*random_qkv(LENGTHS))
    mask = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    mask[..., :3] = False
    mask |= torch.eye(11, dtype=torch.bool)
    out, _ = VarlenAttention("sdpa").attend(Layer(), q, k, v, mask, scaling=0.3)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(), q, k, v, mask, scaling=0.3)
    assert torch.equal(out, expected)


def test_the_eager_attention_is_that_of_the_layers_file():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, eager_attention_forward

    assert varlen._find_attention("eager", GptOssAttention.__new__(GptOssAttention)) is eager_attention_forward
    with pytest.raises(UnsupportedError) as error:
        varlen._find_attention("eager", Layer())
    assert str(error.value) == (
        "--padding_free cannot find the eager attention of Layer, which a batch without boundaries needs. Train this "
        "model without --padding_free."
    )


def test_a_flat_forward_demands_boundaries():
    q, k, v = _heads_first(*random_qkv(LENGTHS))
    with pytest.raises(UnsupportedError) as error:
        VarlenAttention("sdpa").attend_flat(Layer(), q, k, v, None)
    assert str(error.value) == (
        "--padding_free was asked for, but Layer is not told where samples begin: a layer above it drops these keyword "
        "arguments. Train this model without --padding_free."
    )


@pytest.mark.parametrize(
    ("config", "more", "cut", "reason"),
    [
        ({}, {}, 5, "a cache or cross-attention (5 queries, 11 keys)"),
        ({}, {"is_causal": False}, 11, "attention that looks ahead"),
        ({}, {"position_bias": torch.zeros(1)}, 11, "a learned position bias"),
        ({"sliding_window": 3}, {}, 11, "a sliding window that it tells its mask alone"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]}, {}, 11,
            "a sliding window that it tells its mask alone",
        ),
    ],
)  # fmt: skip
def test_refuses_what_boundaries_cannot_say(config, more, cut, reason):
    q, k, v = _heads_first(*random_qkv(LENGTHS))
    with pytest.raises(UnsupportedError) as error:
        VarlenAttention("sdpa").attend(Layer(**config), q[:, :, :cut], k, v, None, **_flat_kwargs(**more))
    assert str(error.value) == (
        f"--padding_free was asked for, but Layer has {reason}, which the boundaries of samples cannot express. Train "
        "this model without --padding_free."
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 3, "use_sliding_window": False},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    ],
)
def test_layers_without_a_window(config):
    q, k, v = random_qkv(LENGTHS)
    out, _ = VarlenAttention("sdpa").attend(Layer(**config), *_heads_first(q, k, v), None, **_flat_kwargs())
    torch.testing.assert_close(out[0], attend_dense(q, k, v, LENGTHS, PLAIN), rtol=1e-5, atol=1e-5)


def test_a_window_no_sample_reaches_over_asks_for_no_window(caplog):
    q, k, v = _heads_first(*random_qkv(LENGTHS))
    attention = VarlenAttention("sdpa")
    with caplog.at_level(logging.INFO, logger="tuning"):
        attention.attend(Layer(), q, k, v, None, **_flat_kwargs(sliding_window=6))
        attention.attend(Layer(), q, k, v, None, **_flat_kwargs(sliding_window=6))
        attention.attend(Layer(), q, k, v, None, **_flat_kwargs(sliding_window=5))
    assert [record.message for record in caplog.records] == [
        "attention of float32 on cpu, head width 8: torch's CPU flash kernel, sample by sample",
        "attention of float32 on cpu, head width 8, window: torch's CPU flash kernel, sample by sample",
    ]


def test_one_kernel_of_a_provider_serves_all_its_requests(monkeypatch, caplog):
    """A kernel may keep what it compiled or listed; the reasons in the log are each request's own."""
    made = []

    def choose(request):
        made.append(lambda q, k, v, *_: v.repeat_interleave(2, 1))
        return Choice(name="one", kernel=made[-1], passed_over=(("other", f"window {request.window}"),))

    monkeypatch.setattr(varlen, "choose", choose)
    chooser, tensors = varlen._Chooser(), random_qkv(LENGTHS)
    with caplog.at_level(logging.INFO, logger="tuning"):
        for variant in (PLAIN, Variant(window=2), PLAIN):
            chooser(*tensors, boundaries(LENGTHS), 6, variant)
    assert {choice.kernel for choice in chooser._choices.values()} == {made[0]}
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["window False)", "window True)"]


def test_autocast_casts_all_three():
    q, k, v = random_qkv(LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = VarlenAttention("sdpa").attend(
            Layer(), *_heads_first(q, k, v.to(torch.bfloat16)), None, **_flat_kwargs()
        )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0].float(), attend_dense(q, k, v, LENGTHS, PLAIN), rtol=3e-2, atol=3e-2)


def test_wide_queries_beside_narrow_values():
    q, k, v = random_qkv(LENGTHS)
    out, _ = VarlenAttention("sdpa").attend(Layer(), *_heads_first(q, k, v.to(torch.bfloat16)), None, **_flat_kwargs())
    assert out.dtype == torch.bfloat16


def test_registration_leaves_nothing_and_nests():
    attentions, masks = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)
    first, second = VarlenAttention("sdpa"), VarlenAttention("eager")
    with registered(first) as one:
        assert (one.resting, one.flat) == ("packtune_varlen", "packtune_varlen_flat")
        with registered(second) as two:
            assert len({one.resting, one.flat, two.resting, two.flat}) == 4
            assert ALL_ATTENTION_FUNCTIONS[two.resting] == second.attend
            assert ALL_MASK_ATTENTION_FUNCTIONS[two.resting] is masks["eager"]
        assert ALL_ATTENTION_FUNCTIONS[one.resting] == first.attend
        assert ALL_ATTENTION_FUNCTIONS[one.flat] == first.attend_flat
        assert ALL_MASK_ATTENTION_FUNCTIONS[one.resting] is sdpa_mask
        # without a mask function transformers makes no mask and looks for no samples in position_ids
        assert one.flat not in ALL_MASK_ATTENTION_FUNCTIONS
    with pytest.raises(ZeroDivisionError), registered(first):
        raise ZeroDivisionError
    assert dict(ALL_ATTENTION_FUNCTIONS) == attentions
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == masks


def test_names_are_not_taken_for_flash_attention():
    from transformers import LlamaConfig
    from transformers.utils.generic import is_flash_attention_requested

    config = LlamaConfig()
    with registered(VarlenAttention("sdpa")) as names:
        for name, flat in ((names.resting, False), (names.flat, True)):
            config._attn_implementation_internal = name
            assert not is_flash_attention_requested(config)
            assert is_flat(config) is flat


def test_compiles_without_a_break_and_without_starting_again(monkeypatch):
    """With a kernel that can be traced, as torch's varlen can; longest lengths come as one upper bound."""

    def kernel(q, k, v, cu_seqlens, max_seqlen, variant):
        positions = torch.arange(q.shape[0])
        sample = torch.searchsorted(cu_seqlens, positions, right=True)
        allowed = (sample[:, None] == sample) & (positions[:, None] >= positions)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True).transpose(0, 1)

    monkeypatch.setattr(varlen, "choose", lambda _: Choice(name="traceable", kernel=kernel, passed_over=()))
    attention, layer, compilations = VarlenAttention("sdpa"), Layer(), []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    def forward(q, k, v, cu_seqlens, max_length):
        return attention.attend_flat(layer, q, k, v, None, cu_seq_lens_q=cu_seqlens, max_length_q=max_length)[0]

    torch._dynamo.reset()
    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=True)
    forward(*_heads_first(*random_qkv([3, 4])), boundaries([3, 4]), 4)  # the first call, in the self-test, chooses
    for lengths in ([4, 1, 6], [5, 9, 2], [3, 3, 3, 3]):
        q, k, v = random_qkv(lengths)
        out = compiled(*_heads_first(q, k, v), boundaries(lengths), 16)
        torch.testing.assert_close(out[0], attend_dense(q, k, v, lengths, PLAIN), rtol=1e-5, atol=1e-5)
    assert len(compilations) <= 2  # the second: another number of samples
