from __future__ import annotations

import copy
import dataclasses
import importlib.util
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.quantize_gptq import quantize_checkpoint
from tests.acceleration.plugins.test_fused_lora import assert_same, training
from tests.tiny import build_model, save
from tuning.acceleration.patching import applied_patches
from tuning.acceleration.plugin import Facts
from tuning.acceleration.plugins.fused_lora import FusedLoraPlugin
from tuning.acceleration.plugins.quantized_peft import AutoGPTQPlugin, BNBQLoraPlugin
from tuning.config.acceleration_configs import AutoGPTQLoraConfig, BNBQLoraConfig, FusedLoraConfig
from tuning.errors import ModelError, PluginError
from tuning.models.gptq import GPTQFormat, GPTQLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
has_bnb = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed"
)
LORA = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.3, target_modules="all-linear", task_type="CAUSAL_LM")
IDS = torch.tensor([[1, 20, 30, 40, 2, 50, 60], [1, 70, 80, 90, 100, 110, 2]])


def facts(name, *, peft_config=LORA, active=(), kwargs=None, **train_args):
    return Facts(
        model_config=AutoConfig.from_pretrained(name),
        model_name_or_path=name,
        model_kwargs={"dtype": torch.float32, "attn_implementation": "eager", **(kwargs or {})},
        train_args=types.SimpleNamespace(device=torch.device(DEVICE), **train_args),
        peft_config=peft_config,
        active=frozenset(active),
        world_size=1,
        rank=0,
        seed=0,
        device_type=DEVICE,
        compute_capability=None,
    )


@pytest.fixture(autouse=True)
def _without_the_interpreter(monkeypatch):
    # tests/kernels/test_gptq.py shows that both unpack the same; Triton's interpreter takes seconds a layer
    monkeypatch.setattr("tuning.kernels.gptq.can_launch", lambda x: x.is_cuda)


def bnb(**options):
    return BNBQLoraPlugin(BNBQLoraConfig(**options))


def gptq():
    return AutoGPTQPlugin(AutoGPTQLoraConfig())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save(tmp_path_factory.mktemp("plain"), model=build_model(hidden_size=64))


def packed(folder, form=None):
    quantize_checkpoint(build_model(hidden_size=64), form or GPTQFormat(group_size=32), folder, {})
    return str(folder)


def adapted(model):
    model = get_peft_model(model, copy.copy(LORA)).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def with_dense(model):
    """Return a plain model whose weights are those that a quantised one computes with."""
    twin = build_model(hidden_size=64).to(DEVICE)
    for name, module in model.named_modules():
        if isinstance(module, GPTQLinear):
            dense = module.unpacked(torch.float32)
        elif hasattr(getattr(module, "weight", None), "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            dense = dequantize_4bit(module.weight.data, module.weight.quant_state)
        else:
            continue
        twin.get_submodule(name).weight.data = dense.contiguous()
    return twin


def fused(model, base_layer, name, active):
    taken = FusedLoraPlugin(FusedLoraConfig(base_layer=base_layer))
    run_facts = facts(name, active=active)
    taken.check(run_facts)
    taken.check_model(model, run_facts)
    return applied_patches(model, taken.patches(model, run_facts))


# ---- bitsandbytes ----


@has_bnb
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_linear_layers_are_quantised_at_load_and_the_rest_is_not(plain, quant_type):
    taken = bnb(quant_type=quant_type)
    taken.check(facts(plain))
    model = taken.load_model(facts(plain))
    layer = model.model.layers[0].mlp.up_proj
    assert layer.weight.quant_state.quant_type == quant_type
    assert layer.weight.quant_state.nested
    assert sum(hasattr(part.weight, "quant_state") for part in model.modules() if hasattr(part, "weight")) == 14
    assert type(model.lm_head) is torch.nn.Linear
    assert not any(parameter.requires_grad for parameter in model.parameters())
    ids = IDS.to(DEVICE)
    with torch.no_grad():
        expected = with_dense(model)(input_ids=ids).logits
        # bitsandbytes multiplies in blocks of its own
        torch.testing.assert_close(model.train()(input_ids=ids).logits, expected, rtol=0, atol=2e-3)
        original = AutoModelForCausalLM.from_pretrained(plain).to(DEVICE)(input_ids=ids).logits
    assert (original - expected).abs().max() > 0.1


@has_bnb
def test_fused_over_four_bits(plain):
    model = adapted(bnb().load_model(facts(plain)))
    expected = training(adapted(with_dense(strip(model))), IDS)
    with fused(model, "bitsandbytes", plain, {"bnb_qlora"}) as applied:
        got = training(model, IDS)
    assert_same(got, expected)
    assert {name: len(targets) for name, targets in applied.targets.items()} == {
        "fused_lora.mlp": 2, "fused_lora.qkv": 2, "fused_lora.linear": 2,
    }  # fmt: skip
    # unfused, bitsandbytes and peft round and clone on the way, to the same end
    assert_same(training(model, IDS), expected, loss=1e-3, grad=1e-2)


def strip(model):
    """Return the quantised layers of a wrapped model under the names of the plain one."""
    holder = torch.nn.Module()
    holder.named_modules = lambda: [
        (name.removeprefix("base_model.model.").replace(".base_layer", ""), module)
        for name, module in model.named_modules()
        if name.endswith(".base_layer")
    ]
    return holder


@has_bnb
def test_training_after_an_evaluation_is_the_same(plain):
    # where the CPU has AVX-512 for bfloat16, bitsandbytes packs weights anew in an evaluation and trains on noise
    model = adapted(bnb().load_model(facts(plain)))
    before = training(model, IDS)
    with torch.no_grad():
        model.eval()(input_ids=IDS.to(DEVICE))
    assert_same(training(model.train(), IDS), before, loss=0.0, grad=1e-6)


@has_bnb
def test_adapters_keep_fp32_in_a_run(plain):
    model = get_peft_model(bnb().load_model(facts(plain)), copy.copy(LORA))
    assert model.is_loaded_in_4bit
    with applied_patches(model, bnb().patches(model, facts(plain))):
        assert not model.is_loaded_in_4bit
    assert model.is_loaded_in_4bit
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@has_bnb
def test_what_is_not_quantised_is_prepared_in_fp16_alone(plain):
    for dtype, prepared in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        run_facts = facts(plain, kwargs={"dtype": dtype})
        assert bnb().load_model(run_facts).model.norm.weight.dtype == prepared
        left = bnb(no_peft_model=True).load_model(run_facts)
        assert left.model.norm.weight.dtype == dtype
        assert left.model.norm.weight.requires_grad


@has_bnb
def test_auto_takes_the_dtype_of_the_checkpoint(plain):
    model = bnb().load_model(facts(plain, kwargs={"dtype": "auto"}))
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.compute_dtype == torch.float32


# ---- GPTQ ----

FORMS = [
    GPTQFormat(group_size=32),
    GPTQFormat(group_size=-1, sym=False, zero_offset=0),
    GPTQFormat(bits=8, group_size=16, sym=False),
    GPTQFormat(bits=2, group_size=32),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fused_and_unfused_over_gptq(tmp_path, form):
    name = packed(tmp_path, form)
    taken = gptq()
    taken.check(facts(name))
    model = adapted(taken.load_model(facts(name)))
    expected = training(adapted(with_dense(strip(model))), IDS)
    assert_same(training(model, IDS), expected)
    with fused(model, "auto_gptq", name, {"auto_gptq"}) as applied:
        assert_same(training(model, IDS), expected)
    assert applied.count("fused_lora.mlp") == applied.count("fused_lora.qkv") == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gptq_in_half_precision(tmp_path, dtype):
    name = packed(tmp_path)
    expected = training(adapted(gptq().load_model(facts(name))), IDS)
    model = adapted(gptq().load_model(facts(name, kwargs={"dtype": dtype})))
    with torch.autocast(DEVICE, dtype=dtype):
        assert training(model, IDS)[0] == pytest.approx(expected[0], rel=2e-2)
    with fused(model, "auto_gptq", name, {"auto_gptq"}), torch.autocast(DEVICE, dtype=dtype):
        assert training(model, IDS)[0] == pytest.approx(expected[0], rel=2e-2)


def test_a_wrong_zero_would_be_seen(tmp_path):
    name = packed(tmp_path)
    model = adapted(gptq().load_model(facts(name)))
    expected = training(adapted(with_dense(strip(model))), IDS)
    for module in model.modules():
        if isinstance(module, GPTQLinear):
            module.form = dataclasses.replace(module.form, zero_offset=0)
    with pytest.raises(AssertionError):
        assert_same(training(model, IDS), expected)


# ---- refusals, before anything is loaded ----


def refusal(plugin, run_facts):
    with pytest.raises((PluginError, ModelError)) as error:
        plugin.check(run_facts)
    return str(error.value)


@pytest.mark.parametrize(("flag", "plugin"), [("--bitsandbytes", bnb()), ("--auto_gptq", gptq())])
def test_runs_that_train_no_adapters_or_are_sharded(plain, flag, plugin):
    assert refusal(plugin, facts(plain, peft_config=None)) == (
        f"{flag} loads a quantised base, which cannot be trained itself, and this run trains no LoRA adapters; add "
        f"--peft_method lora or drop {flag}"
    )
    assert refusal(plugin, facts(plain, fsdp=True, fsdp_config={"version": 1})) == (
        f"{flag} keeps packed weights, which are sharded by whole layers or not at all, but version 1 of --fsdp "
        "flattens the adapters of each module by themselves; use --fsdp with version 2 and TRANSFORMER_BASED_WRAP, or "
        f"drop {flag}"
    )


def test_bitsandbytes_over_what_is_quantised(plain, tmp_path):
    assert refusal(bnb(), facts(plain, kwargs={"gguf_file": "x.gguf"})) == (
        "--bitsandbytes quantises an ordinary checkpoint, but the model is a GGUF file; give a folder with "
        "safetensors, or drop --bitsandbytes"
    )
    name = packed(tmp_path)
    assert refusal(bnb(), facts(name)) == (
        f"--bitsandbytes quantises at load, but {name} is quantised already, by gptq; use --auto_gptq triton_v2"
    )
    run_facts = facts(name)
    run_facts.model_config.quantization_config["quant_method"] = "awq"
    assert refusal(bnb(), run_facts) == (
        f"--bitsandbytes quantises at load, but {name} is quantised already, by awq; give the checkpoint it was made "
        "from"
    )


def test_gptq_refuses_what_reads_the_base_weight(tmp_path):
    name = packed(tmp_path)
    assert refusal(gptq(), facts(name, peft_config=LoraConfig(use_dora=True))) == (
        "--use_dora reads the base weight, which --auto_gptq keeps packed; drop one of them"
    )
    assert refusal(gptq(), facts(name, peft_config=LoraConfig(init_lora_weights="pissa"))) == (
        "init_lora_weights pissa starts adapters from the base weight, which --auto_gptq keeps packed; use true or "
        "gaussian"
    )
    gptq().check(facts(name, peft_config=LoraConfig(init_lora_weights="gaussian")))


def test_gptq_over_a_plain_checkpoint_and_with_other_options(plain, tmp_path):
    assert refusal(gptq(), facts(plain)).startswith(
        f"--auto_gptq was asked for, but {plain} is no GPTQ checkpoint: its config.json has no quantization_config; "
    )
    assert refusal(gptq(), facts(packed(tmp_path), kwargs={"device_map": "auto"})) == (
        "--auto_gptq loads the checkpoint itself and takes no device_map; drop it from model_init_kwargs, or drop "
        "--auto_gptq"
    )
    other = AutoGPTQPlugin(AutoGPTQLoraConfig(from_quantized=False))
    assert refusal(other, facts(plain)) == (
        "--auto_gptq from_quantized=false would quantise the model itself, which is not supported; name a GPTQ "
        "checkpoint with --model_name_or_path"
    )
