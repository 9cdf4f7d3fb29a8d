"""The self-test passes isolated models, names the layer that leaks, and leaves no trace."""

import copy

import pytest
import torch
from torch import nn

from tests.equivalence.families import VOCAB_SIZE, build_model
from tuning.attention import isolation
from tuning.attention.isolation import check_isolation, cut_batch
from tuning.attention.switch import switched
from tuning.data.collators import FlattenedCollator, PaddedCollator
from tuning.errors import PluginError


def _batch(lengths=(9, 3, 1, 40, 5), seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return FlattenedCollator()([{"input_ids": ids, "labels": ids} for ids in rows])


@pytest.fixture
def model():
    return build_model("llama", num_hidden_layers=4)


class TestCut:
    def test_first_tokens_of_the_longest_samples(self):
        batch = _batch()
        cut = cut_batch(batch)
        assert cut["cu_seq_lens_q"].tolist() == cut["cu_seq_lens_k"].tolist() == [0, 24, 33, 38]
        assert (cut["max_length_q"], cut["max_length_k"]) == (24, 24)
        ids = batch["input_ids"]
        assert torch.equal(cut["input_ids"], torch.cat([ids[:, 13:37], ids[:, :9], ids[:, 53:58]], 1))
        assert cut["position_ids"].tolist() == [[*range(24), *range(9), *range(5)]]
        assert cut["seq_idx"].tolist() == [[0] * 24 + [1] * 9 + [2] * 5]
        assert cut["seq_idx"].dtype == cut["cu_seq_lens_q"].dtype == torch.int32
        assert "labels" not in cut

    def test_few_samples_come_twice(self):
        for lengths, bounds in (((5,), [0, 5, 10, 15]), ((5, 7), [0, 7, 12, 19]), ((1,), [0, 1, 2, 3])):
            assert cut_batch(_batch(lengths))["cu_seq_lens_q"].tolist() == bounds

    def test_empty_samples_are_left_out(self):
        batch = _batch((4, 6))
        batch["cu_seq_lens_q"] = torch.tensor([0, 4, 4, 10, 10, 10], dtype=torch.int32)
        assert cut_batch(batch)["cu_seq_lens_q"].tolist() == [0, 6, 10, 16]

    def test_what_other_collators_add_is_cut_alike(self):
        batch = {**_batch((5, 7)), "attention_mask": torch.arange(12)[None], "other": "kept"}
        cut = cut_batch(batch)
        assert cut["attention_mask"].tolist() == [[*range(5, 12), *range(5), *range(5, 12)]]
        assert cut["other"] == "kept"

    def test_a_padded_batch(self):
        rows = [{"input_ids": [1, 2], "labels": [1, 2]}]
        with pytest.raises(PluginError) as error:
            cut_batch(PaddedCollator(pad_token_id=0)(rows))
        assert str(error.value) == (
            "--padding_free was asked for, but the first batch carries no boundaries of samples (it has "
            "attention_mask, input_ids, labels): another collator took its place. Drop that collator or --padding_free."
        )


def test_passes(model):
    with switched(model):
        assert check_isolation(model, _batch()) < 5
        assert check_isolation(model, _batch((2,))) < 5
        assert check_isolation(model, _batch(), autocast=torch.bfloat16) < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "mixtral", "granitemoe"])
def test_passes_in_half_precision(name, dtype):
    model = build_model(name).to(dtype)
    with switched(model):
        check_isolation(model, _batch())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("leaking", [0, 2])
def test_names_the_first_layer_that_leaks(model, leaking, autocast):
    """One layer adds a fifth of the token before, across seams too."""
    layer = model.model.layers[leaking]
    forward = layer.forward

    def leak(*args, **kwargs):
        out = forward(*args, **kwargs)
        return out + 0.2 * out.roll(1, dims=1)

    layer.forward = leak
    with switched(model), pytest.raises(PluginError) as error:
        check_isolation(model, _batch(), autocast=autocast)
    text = str(error.value)
    assert text.startswith(
        "--padding_free was asked for, but this model lets samples of one batch see each other: after one sample was "
        "changed, the others moved by "
    )
    # the last layer leaks into the logits as well
    assert text.endswith(
        f" (relative) in model.layers.{leaking} (LlamaDecoderLayer), and in 0 more places. Train it without "
        "--padding_free; --isolation_check off would train on mixed samples."
    )


def test_all_leaks_are_counted(model):
    for index in (1, 3):
        layer = model.model.layers[index]
        layer.forward = (lambda forward: lambda *a, **k: (out := forward(*a, **k)) + out.mean(1, keepdim=True))(
            layer.forward
        )
    with switched(model), pytest.raises(PluginError, match=r"in model\.layers\.1 \(LlamaDecoderLayer\), and in 2 more"):
        check_isolation(model, _batch())


def test_a_leak_after_the_layers(model):
    model.lm_head = nn.Sequential(model.lm_head, _MeanOverTokens())
    with switched(model), pytest.raises(PluginError, match=r"\(relative\) in the logits, after all layers, and in 0"):
        check_isolation(model, _batch())


class _MeanOverTokens(nn.Module):
    def forward(self, logits):
        return logits + logits.mean(1, keepdim=True)


def test_a_model_that_gives_nan_does_not_pass(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    with switched(model), pytest.raises(PluginError, match=r"moved by nan \(relative\) in model\.layers\.1"):
        check_isolation(model, _batch())


def test_positions_that_do_not_restart():
    """Every sample stays apart, but with learned positions none is where it would be alone."""
    model = build_model("gpt_bigcode")
    batch = _batch((9, 8, 7))
    batch["position_ids"] = torch.arange(24)[None]
    with switched(model), pytest.raises(PluginError) as error:
        check_isolation(model, batch)
    text = str(error.value)
    assert text.startswith(
        "--padding_free was asked for, but a sample inside a batch gives other logits than alone (relative difference "
    )
    assert text.endswith(
        ", allowed 0.001): its positions or its attention are not those of a sample of its own. Train this model "
        "without --padding_free."
    )


def test_a_model_that_cannot_run(model):
    model.model.layers[0].forward = lambda hidden, **_: hidden.view(3, -1)
    with switched(model), pytest.raises(PluginError) as error:
        check_isolation(model, _batch((5, 4, 2)))
    assert str(error.value).startswith(
        "--padding_free was asked for, but LlamaForCausalLM cannot run a flattened batch ("
    )
    assert str(error.value).endswith("). Train this model without --padding_free.")


def test_an_untouched_model_that_leaks():
    """GPT-OSS hands no positions to its mask: transformers' own path mixes flattened samples."""
    with pytest.raises(PluginError, match=r"model\.layers\.0 \(GptOssDecoderLayer\)"):
        check_isolation(build_model("gpt_oss"), _batch())


def test_no_trace(model):
    class Counting(nn.Module):
        """Writes into one buffer, replaces another, and draws random numbers, as routers and caches do."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("state", torch.ones(2))

        def forward(self, *args):
            self.calls += 1
            self.state = torch.rand(2)
            return self.inner(*args)

    for layer in model.model.layers:
        layer.mlp = Counting(layer.mlp)
    model.train()
    model.model.layers[1].eval()
    model.model.embed_tokens.weight.grad = torch.ones_like(model.model.embed_tokens.weight)
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    buffers = [id(buffer) for buffer in model.buffers()]
    random = torch.get_rng_state()
    batch = _batch()
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with switched(model):
        resting = model.config._attn_implementation
        check_isolation(model, batch)
        assert model.config._attn_implementation == resting
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert [id(buffer) for buffer in model.buffers()] == buffers
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(model.model.embed_tokens.weight.grad, torch.ones_like(model.model.embed_tokens.weight))
    assert all(p.grad is None for name, p in model.named_parameters() if "embed_tokens" not in name)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(
        torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else True for name, value in batch.items()
    )


def test_no_trace_after_a_failure(model):
    model.lm_head = nn.Sequential(model.lm_head, _MeanOverTokens())
    model.eval()
    random = torch.get_rng_state()
    with switched(model), pytest.raises(PluginError):
        check_isolation(model, _batch())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_dropout_is_no_leak():
    """Dropout draws the same numbers in both runs, and is off where a sample is compared with itself alone."""
    model = build_model("granite", attention_dropout=0.3)
    model.config.attention_dropout = 0.3
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.3))
    with switched(model):
        check_isolation(model, _batch())


def test_every_layer_type_is_looked_at():
    model = build_model("granitemoehybrid")
    names = list(isolation._find_layers(model))
    assert names == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert list(isolation._find_layers(nn.ModuleDict({"h": nn.ModuleList([nn.Linear(1, 1)] * 3)}))) == [
        "h.0",
        "h.1",
        "h.2",
    ]
