"""A switched model trains flattened, answers everything else as before, and is itself again afterwards."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.equivalence.families import VOCAB_SIZE, build_model
from tuning.attention import varlen
from tuning.attention.switch import BOUNDARY_KEYS, find_configs, has_exchangeable_attention, switched
from tuning.data.collators import FlattenedCollator
from tuning.errors import DataError, UnsupportedError

LENGTHS = [4, 3, 6]


def _batch(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    batch = FlattenedCollator()([{"input_ids": ids, "labels": ids} for ids in rows])
    del batch["labels"]
    return batch


def _logits_alone(model, batch):
    """Each sample through the unswitched model by itself."""
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    return torch.cat([model(input_ids=ids).logits[0] for ids in batch["input_ids"].split(lengths, 1)])


@pytest.fixture
def model():
    return build_model("llama")


def test_flattened_samples_are_as_alone(model):
    batch = _batch()
    alone = _logits_alone(model, batch)
    with switched(model):
        torch.testing.assert_close(model(**batch).logits[0], alone, rtol=1e-5, atol=1e-5)


def test_a_changed_token_moves_its_own_sample_only(model):
    """The public report is https://github.com/huggingface/trl/issues/2834: without isolation the last sample moves."""
    batch = _batch()
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, 3] = 50
    with switched(model):
        moved = (model(**batch).logits - model(**other).logits)[0].abs().amax(-1)
    assert moved[4:].max() == 0
    assert moved[3] > 0


def test_a_mask_of_ones_does_not_switch_isolation_off(model):
    """The public report is https://github.com/huggingface/transformers/pull/46634."""
    batch = _batch()
    alone = _logits_alone(model, batch)
    ones = torch.ones_like(batch["input_ids"])
    plain = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    leaking = model(**plain, attention_mask=ones).logits[0]
    assert (leaking - alone)[4:].abs().max() > 0.1, "the untouched model leaks, or this test proves nothing"
    seen = []
    with switched(model):
        model.register_forward_pre_hook(lambda *args: seen.append(args[2]), with_kwargs=True)
        torch.testing.assert_close(model(**batch, attention_mask=ones).logits[0], alone, rtol=1e-5, atol=1e-5)
    assert seen[0]["attention_mask"] is None


def test_no_mask_is_made_and_positions_are_not_searched(model, monkeypatch):
    import transformers.masking_utils as masking

    def never(*args, **kwargs):
        raise AssertionError("a mask was made")

    with switched(model):
        monkeypatch.setattr(masking, "find_packed_sequence_indices", never)
        monkeypatch.setitem(masking.AttentionMaskInterface._global_mapping, "packtune_varlen", never)
        model(**_batch())
        with pytest.raises(AssertionError, match="a mask was made"):
            model(input_ids=_batch()["input_ids"], position_ids=_batch()["position_ids"])


def test_no_tensor_of_the_squared_batch(model):
    """2,000 tokens: a T x T mask of one byte is 4 MB; the largest tensor here is the logits, 0.5 MB."""
    batch = _batch([40] * 49 + [39, 1])
    model = build_model("llama", max_position_embeddings=64)
    with switched(model), torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        model(**batch)
    largest = max(abs(event.self_cpu_memory_usage) / max(event.count, 1) for event in profile.key_averages())
    assert largest < 1.5e6


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic cache", "static cache"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_generate_writes_the_same(name, options):
    model = build_model(name)
    prompts = torch.tensor([[0, 0, 5, 9, 11, 12], [7, 8, 30, 31, 32, 33]])
    mask = (prompts != 0).long()
    options = {"max_new_tokens": 9, "do_sample": False, "use_cache": True, "disable_compile": True, **options}
    before = model.generate(prompts, attention_mask=mask, **options)
    with switched(model):
        model(**_batch())
        during = model.generate(prompts, attention_mask=mask, **options)
        model(**_batch())
    assert torch.equal(before, during)
    assert not torch.equal(before[0, 6:], before[1, 6:])


def test_padded_batches_as_before(model):
    ids = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12]])
    mask = (ids != 0).long()
    before = model(input_ids=ids, attention_mask=mask).logits
    with switched(model):
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)


def test_packed_positions_without_boundaries_as_before(model):
    """As before means: transformers finds the samples itself, by its mask."""
    batch = _batch()
    plain = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    before = model(**plain).logits
    with switched(model):
        assert torch.equal(model(**plain).logits, before)


def test_evaluation_keeps_no_cache(model):
    model.config.use_cache = True
    with switched(model):
        assert model(**_batch()).past_key_values is None


def test_nothing_is_left_behind(model):
    attentions, masks = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)
    config, before = copy.deepcopy(model.config), model(**_batch()).logits
    with switched(model), pytest.raises(ZeroDivisionError), switched(build_model("gemma2")):
        raise ZeroDivisionError
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == config._attn_implementation
    assert dict(ALL_ATTENTION_FUNCTIONS) == attentions
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == masks
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert torch.equal(model(**_batch()).logits, before)


def test_twice_and_two_models_at_once(model):
    batch = _batch()
    other = build_model("gemma2")
    alone, other_alone = _logits_alone(model, batch), _logits_alone(other, batch)
    for _ in range(2):
        with switched(model), switched(other):
            torch.testing.assert_close(model(**batch).logits[0], alone, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(other(**batch).logits[0], other_alone, rtol=1e-5, atol=1e-5)


def test_a_saved_config_knows_nothing_of_it(model, tmp_path):
    model.save_pretrained(tmp_path / "before")
    with switched(model):
        model(**_batch())
        model.save_pretrained(tmp_path / "during")
    assert "packtune" not in (tmp_path / "during" / "config.json").read_text()
    before, during = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "during"))
    assert before == during


@pytest.mark.parametrize("level", ["model", "inner class alone"])
def test_a_forward_that_raises_is_put_back(model, level):
    """peft calls ``forward`` of the outer class directly; then the inner class is the first that is hooked."""
    batch = _batch()
    call = model if level == "model" else model.forward
    with switched(model):
        resting = model.config._attn_implementation
        with pytest.raises(IndexError):
            call(**{**batch, "input_ids": batch["input_ids"] + VOCAB_SIZE})
        with pytest.raises(DataError):
            call(**batch, attention_mask=torch.zeros(1, 13))
        assert model.config._attn_implementation == resting
        torch.testing.assert_close(call(**batch).logits[0], _logits_alone(model, batch), rtol=1e-5, atol=1e-5)


def _raises(model, text, **changes):
    with switched(model), pytest.raises(DataError) as error:
        model(**{**_batch(), **changes})
    assert str(error.value) == text


def test_refuses_a_mask_that_hides(model):
    mask = torch.ones(1, 13)
    mask[0, -1] = 0
    text = (
        "LlamaForCausalLM was given the boundaries of samples and an attention_mask that hides tokens; a flattened "
        "batch has nothing to hide. Use the collator of --padding_free, or train without the flag."
    )
    _raises(model, text, attention_mask=mask)
    _raises(model, text, attention_mask=torch.ones(1, 1, 13, 13))


def test_refuses_lost_positions(model):
    _raises(
        model,
        "LlamaForCausalLM was given the boundaries of samples without position_ids; a collator that flattens must make "
        "both.",
        position_ids=None,
    )


def test_refuses_a_cache(model):
    from transformers import DynamicCache

    _raises(
        model,
        "LlamaForCausalLM was given the boundaries of samples and a cache (past_key_values); give one.",
        past_key_values=DynamicCache(),
    )


def test_refuses_parts_that_attend_differently(model):
    both = nn.ModuleList([model, build_model("gemma2")])
    with pytest.raises(UnsupportedError) as error, switched(both):
        pass
    assert str(error.value) == (
        "--padding_free was asked for, but the parts of ModuleList attend in different ways (eager, sdpa). Load it "
        "with one attn_implementation, or train it without --padding_free."
    )
    with pytest.raises(UnsupportedError, match="no part has an attention of transformers"), switched(nn.Linear(1, 1)):
        pass


def test_a_class_that_drops_boundaries_is_refused(model):
    """Some classes do not hand keyword arguments to their layers: never run them as one sample."""
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda hidden, **kwargs: forward(
        hidden, **{name: value for name, value in kwargs.items() if name not in BOUNDARY_KEYS}
    )
    with switched(model), pytest.raises(UnsupportedError, match="LlamaAttention is not told where samples begin"):
        model(**_batch())


def test_a_cap_is_never_left_out():
    """A padded batch in a switched model: torch's own attention has no cap, so it does not get the batch."""
    ids = torch.tensor([[5, 6, 7, 0, 0], [8, 9, 10, 11, 12]])
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    model = build_model("gemma2")
    expected = model(**batch).logits
    model.config._attn_implementation_internal = "sdpa"
    with switched(model):
        torch.testing.assert_close(model(**batch).logits, expected)
    assert model.config._attn_implementation == "sdpa"


def test_configs_once(model):
    assert [id(config) for config in find_configs(model)] == [id(model.config)]


def test_exchangeable_attention():
    from transformers import BambaForCausalLM, BloomForCausalLM

    assert has_exchangeable_attention(LlamaForCausalLM)
    assert has_exchangeable_attention(BambaForCausalLM)  # does not say so, its file does
    assert not has_exchangeable_attention(BloomForCausalLM)


def test_upper_bound(model, monkeypatch):
    seen = []
    honest = varlen._Chooser.__call__
    monkeypatch.setattr(varlen._Chooser, "__call__", lambda *args: seen.append(args[5]) or honest(*args))
    with switched(model, bound=lambda length: length + 10):
        model(**_batch())
    assert set(seen) == {max(LENGTHS) + 10}


def test_bf16_autocast(model):
    batch = _batch()
    alone = _logits_alone(model, batch)
    with switched(model), torch.autocast("cpu", torch.bfloat16):
        out = model(**batch).logits[0]
    # of the size of bf16's rounding; a leak moves these logits by more than 1
    assert (out - alone).abs().max() < 0.1
    assert alone.abs().max() > 1


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
def test_lora(model, checkpointing):
    from peft import LoraConfig, get_peft_model

    def gradients(adapted, **batch):
        adapted.zero_grad()
        adapted(**batch).logits.pow(2).sum().backward()
        return {name: p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}

    batch = _batch()
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False, r=2))
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    alone = {}
    for ids in batch["input_ids"].split(lengths, 1):
        for name, gradient in gradients(adapted, input_ids=ids).items():
            alone[name] = alone.get(name, 0) + gradient
    if checkpointing is not None:
        adapted.train()
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        adapted.enable_input_require_grads()
    with switched(adapted):
        together = gradients(adapted, **batch)
    assert together.keys() == alone.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["whole model", "layer by layer"])
def test_torch_compile(model, part):
    batches = [_batch(lengths, seed) for seed, lengths in enumerate([[4, 3, 6], [5, 8], [2, 2, 2]])]
    alone = [_logits_alone(model, batch) for batch in batches]
    torch._dynamo.reset()
    with switched(model, bound=lambda length: 16):
        if part == "whole model":
            compiled = torch.compile(model, backend="aot_eager")
        else:
            for layer in model.model.layers:
                layer.forward = torch.compile(layer.forward, backend="aot_eager")
            compiled = model
        for batch, expected in zip(batches, alone, strict=True):
            logits = compiled(**batch).logits[0]
            logits.sum().backward()
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_hooks_sit_on_every_class_of_transformers(model):
    with switched(model):
        hooked = [module for module in model.modules() if module._forward_pre_hooks]
        assert hooked == [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        assert len(hooked) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text", "qwen3"])
def test_no_wait_for_the_device(name):
    """After the first batch, forward and backward read nothing back: torch raises at any wait."""
    model = build_model(name, head_dim=64).to("cuda", torch.bfloat16)
    batch = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in _batch().items()}
    other = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    with switched(model):
        model(**batch).logits.sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(**other).logits.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
