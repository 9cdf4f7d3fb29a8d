"""The plugin: what it refuses and in which words, what it patches, and a run from samples to gradients."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType
from torch import nn
from transformers import AutoConfig, LlamaConfig, T5Config

from tests.equivalence.families import VOCAB_SIZE, build_config, build_model
from tests.tiny import build_bigram
from tuning.acceleration.framework import AccelerationFramework
from tuning.acceleration.plugin import Facts
from tuning.acceleration.plugins import BUILTIN
from tuning.acceleration.plugins.padding_free import PaddingFreePlugin, next_power_of_two
from tuning.config.acceleration_configs import PaddingFree
from tuning.data.collators import FlattenedCollator, PaddedCollator
from tuning.errors import PluginError, UnsupportedError

BIGRAM_GOOD = 0.767273  # the loss of a token whose logit is 4 and 63 others 0
ROWS = [[5, 6, 7], [20, 21], [40, 41, 42, 43]]


def _facts(config, **overrides):
    values = {
        "model_config": config, "model_name_or_path": "tiny", "model_kwargs": {}, "train_args": _train_args(),
        "peft_config": None, "active": frozenset({"padding_free"}), "world_size": 1, "rank": 0, "seed": 0,
        "device_type": "cpu", "compute_capability": None,
    }  # fmt: skip
    return Facts(**{**values, **overrides})


def _train_args(**changes):
    values = {"packing": False, "bf16": False, "fp16": False, "isolation_check": "on", "torch_compile": False}
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture
def plugin():
    return PaddingFreePlugin(PaddingFree())


def _samples(rows=ROWS):
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def _refused(call, *args):
    with pytest.raises(UnsupportedError) as error:
        call(*args)
    return str(error.value)


class TestCheck:
    def test_passes(self, plugin):
        for name in ("llama", "gemma2", "gpt_oss", "granitemoehybrid", "gpt_bigcode"):
            plugin.check(_facts(build_config(name)))
        plugin.check(_facts(LlamaConfig(), peft_config=LoraConfig()))

    @pytest.mark.parametrize(
        ("peft_config", "kind"),
        [
            (PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4), "prompt_tuning"),
            (PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4), "prefix_tuning"),
        ],
    )
    def test_virtual_tokens(self, plugin, peft_config, kind):
        assert _refused(plugin.check, _facts(LlamaConfig(), peft_config=peft_config)) == (
            f"--padding_free was asked for together with {kind}, but its virtual tokens stand before each row, and a "
            "flattened batch has one row for all samples. Use --peft_method lora, or train without --padding_free."
        )

    def test_packing(self, plugin):
        assert _refused(plugin.check, _facts(LlamaConfig(), train_args=_train_args(packing=True))) == (
            "--padding_free was asked for together with --packing, but both lay samples end to end, and packing loses "
            "where they start. Drop --packing."
        )

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (T5Config(), "t5 is an encoder-decoder, whose two sides have boundaries of their own"),
            (
                LlamaConfig(is_causal=False),
                "llama attends in both directions, and the kernels of --padding_free are causal",
            ),
            (
                AutoConfig.for_model("llama4_text", num_hidden_layers=4),
                "llama4_text has layers of type chunked_attention, whose rules the boundaries of samples cannot "
                "express",
            ),
            (AutoConfig.for_model("bloom"), "BloomForCausalLM has an attention of its own, which cannot be exchanged"),
        ],
        ids=["encoder-decoder", "both directions", "chunks", "own attention"],
    )
    def test_model_types(self, plugin, config, reason):
        assert _refused(plugin.check, _facts(config)) == (
            f"--padding_free was asked for, but {reason}. Train this model without --padding_free."
        )

    def test_a_device_without_a_kernel(self, plugin, monkeypatch):
        monkeypatch.setattr("tuning.attention.providers.installed_version", lambda _: None)
        config = LlamaConfig(attention_dropout=0.1, hidden_size=64, num_attention_heads=4)
        facts = _facts(config, device_type="cuda", compute_capability=(9, 0), train_args=_train_args(bf16=True))
        assert _refused(plugin.check, facts) == (
            "--padding_free needs an attention kernel that keeps samples apart, for bfloat16 on cuda (compute "
            "capability 9.0), head width 16, dropout, and this machine has none (FlashAttention 3: no dropout; "
            "flash-attn-4: no dropout; torch varlen: no dropout; flash-attn 2: not installed; flex_attention: no "
            "dropout). Use another --torch_dtype, or train without --padding_free."
        )

    @pytest.mark.parametrize(
        ("train_args", "model_kwargs", "name"),
        [
            (_train_args(bf16=True), {}, "bfloat16"),
            (_train_args(fp16=True), {}, "float16"),
            (_train_args(), {"dtype": torch.bfloat16}, "bfloat16"),
            (_train_args(), {"dtype": "auto"}, "float32"),
            (None, {}, "float32"),
        ],
    )
    def test_the_dtype_of_the_computation_counts(self, plugin, train_args, model_kwargs, name):
        facts = _facts(LlamaConfig(), device_type="npu", train_args=train_args, model_kwargs=model_kwargs)
        assert f"for {name} on npu" in _refused(plugin.check, facts)


class TestCheckModel:
    def test_passes(self, plugin):
        for name in ("llama", "granitemoehybrid"):
            model = build_model(name)
            plugin.check_model(model, _facts(model.config))

    def _refused(self, plugin, model):
        text = _refused(plugin.check_model, model, _facts(LlamaConfig()))
        start, end = "--padding_free was asked for, but ", ". Train this model without --padding_free."
        assert text.startswith(start)
        assert text.endswith(end)
        return text.removeprefix(start).removesuffix(end)

    def test_own_attention(self, plugin):
        from transformers import BloomConfig, BloomForCausalLM

        model = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=9))
        assert self._refused(plugin, model) == (
            "BloomForCausalLM has an attention of its own, which cannot be exchanged"
        )

    def test_no_room_for_boundaries(self, plugin):
        model = build_model("llama")
        model.forward = lambda input_ids=None, labels=None: None
        assert self._refused(plugin, model) == (
            "LlamaForCausalLM takes no keyword arguments beside its own, so it cannot be told where samples start"
        )

    def test_batch_norm(self, plugin):
        model = build_model("llama")
        model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.BatchNorm1d(32))
        assert self._refused(plugin, model) == (
            "BatchNorm1d normalizes over all tokens of a batch, so samples see each other"
        )

    def test_a_mixer_that_cannot_be_told(self, plugin):
        class Mixer(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv1d(32, 32, 3)

            def forward(self, hidden_states):
                return hidden_states

        model = build_model("llama")
        model.model.layers[0].mlp = Mixer()
        assert self._refused(plugin, model) == (
            "model.layers.0.mlp (Mixer) mixes tokens and cannot be told where samples start"
        )


class TestPatches:
    def test_attention_alone(self, plugin):
        model = build_model("llama")
        patches = plugin.patches(model, _facts(model.config))
        assert [(patch.name, patch.target) for patch in patches] == [("padding_free.attention", "")]

    def test_mixers_too(self, plugin):
        model = build_model("granitemoehybrid")
        patches = plugin.patches(model, _facts(model.config))
        assert [(patch.name, patch.target) for patch in patches] == [
            ("padding_free.attention", ""),
            ("padding_free.mixer", "model.layers.0.mamba"),
            ("padding_free.mixer", "model.layers.2.mamba"),
        ]

    def test_slow_mixers_on_a_gpu_are_told(self, plugin, caplog):
        model = build_model("granitemoehybrid")
        plugin.patches(model, _facts(model.config, device_type="cuda"))
        assert [record.message for record in caplog.records] == [
            "2 layers of GraniteMoeHybridForCausalLM run sample by sample, which is slow on a GPU: install mamba_ssm "
            "and causal_conv1d"
        ]

    @pytest.mark.parametrize(
        ("overrides", "expected"),
        [
            ({}, 5),
            ({"active": frozenset({"padding_free", "compile_layers"})}, 8),
            ({"train_args": _train_args(torch_compile=True)}, 8),
        ],
    )
    def test_a_compiler_sees_few_longest_lengths(self, plugin, overrides, expected):
        model, seen = build_model("llama"), []
        model.model.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["max_length_q"]), with_kwargs=True
        )
        batch = FlattenedCollator()(_samples([[3, 4, 5, 6, 7], [8]]))
        with plugin.patches(model, _facts(model.config, **overrides))[0].apply(model):
            model(**batch)
        assert seen == [expected]

    def test_powers_of_two(self):
        assert [next_power_of_two(n) for n in (1, 2, 3, 4, 5, 8, 9, 2047, 2048)] == [1, 2, 4, 4, 8, 8, 16, 2048, 2048]


class TestRun:
    """The whole way: framework, patched model, collator, loss."""

    def _framework(self, model, **overrides):
        framework = AccelerationFramework({"padding_free": PaddingFree()}, plugins=BUILTIN)
        facts = _facts(model.config, **overrides)
        framework.check(facts)
        framework.check_model(model, facts)
        return framework, facts

    def test_loss_and_gradients(self):
        model = build_model("llama")
        padded = PaddedCollator(pad_token_id=0)
        model(**padded(_samples())).loss.backward()
        expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        expected_loss = model(**padded(_samples())).loss
        model.zero_grad()
        framework, facts = self._framework(model)
        with framework.patched(model, facts) as applied:
            collate = framework.seats([3, 2, 4], padded, facts).collator
            assert isinstance(collate, FlattenedCollator)
            framework.self_test(model, collate(_samples()))
            loss = model(**collate(_samples())).loss
            loss.backward()
        assert applied.count("padding_free.attention") == 1
        assert (loss - expected_loss).abs() < 1e-5
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)

    def test_seams_are_not_trained_on(self):
        """The public report is https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449.

        With both seams counted the mean of 8 tokens would be 1.767273.
        """
        model = build_bigram()
        framework, facts = self._framework(model)
        with framework.patched(model, facts):
            batch = framework.seats([], PaddedCollator(pad_token_id=0), facts).collator(_samples())
            loss = model(**batch).loss
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
        assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 9]
        assert (batch["labels"] != -100).sum() == 6
        assert abs(loss.item() - BIGRAM_GOOD) < 1e-4

    def test_two_runs_in_one_process(self):
        model = build_model("llama")
        before = model(**PaddedCollator(pad_token_id=0)(_samples())).logits
        losses = []
        for _ in range(2):
            framework, facts = self._framework(model)
            with framework.patched(model, facts):
                losses.append(model(**FlattenedCollator()(_samples())).loss)
        assert torch.equal(*losses)
        assert torch.equal(model(**PaddedCollator(pad_token_id=0)(_samples())).logits, before)


class TestSelfTest:
    def _run(self, plugin, model, **overrides):
        facts = _facts(model.config, **overrides)
        with plugin.patches(model, facts)[0].apply(model):
            plugin.self_test(model, FlattenedCollator()(_samples()))

    def _leaking(self):
        model = build_model("llama")
        layer = model.model.layers[1]
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: (out := forward(*args, **kwargs)) + out.mean(1, keepdim=True)
        return model

    def test_says_that_it_holds(self, plugin, caplog):
        with caplog.at_level(logging.INFO, logger="tuning"):
            self._run(plugin, build_model("llama"))
        assert caplog.records[-1].message.startswith("isolation: samples of one batch cannot see each other (")

    def test_stops_a_leak(self, plugin):
        with pytest.raises(PluginError, match=r"model\.layers\.1 \(LlamaDecoderLayer\)"):
            self._run(plugin, self._leaking())

    def test_off_is_said(self, plugin, caplog):
        self._run(plugin, self._leaking(), train_args=_train_args(isolation_check="off"))
        assert [record.message for record in caplog.records] == [
            "--isolation_check off: nothing proves that samples of one batch stay apart"
        ]

    @pytest.mark.parametrize(("option", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
    def test_runs_in_the_dtype_of_the_run(self, plugin, option, dtype):
        model, seen = build_model("llama"), []
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: seen.append(args[2].dtype))
        self._run(plugin, model, train_args=_train_args(**{option: True}))
        assert set(seen) == {dtype}


def test_facts_stay_as_they_are(plugin):
    facts = _facts(LlamaConfig())
    before = dataclasses.asdict(dataclasses.replace(facts, model_config=None))
    plugin.check(facts)
    assert dataclasses.asdict(dataclasses.replace(facts, model_config=None)) == before
    assert max(map(max, ROWS)) < VOCAB_SIZE
