from __future__ import annotations

import copy
import logging
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.equivalence.families import FAMILIES, build_model
from tuning.acceleration.patching import applied_patches
from tuning.acceleration.plugin import Facts
from tuning.acceleration.plugins.fast_kernels import FastKernelsPlugin
from tuning.acceleration.plugins.fused_lora import FusedLoraPlugin
from tuning.config.acceleration_configs import FastKernelsConfig, FusedLoraConfig
from tuning.errors import PluginError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# biases of qwen2, packed projections of phi3, state spaces and experts of the others
NAMES = ["llama", "qwen2", "qwen3", "gemma2", "phi3", "granitemoehybrid", "mixtral", "olmo2"]
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")


def facts(model, *, peft_config=None, active=("fused_lora",), **train_args):
    return Facts(
        model_config=model.config,
        model_name_or_path="model",
        model_kwargs={},
        train_args=types.SimpleNamespace(**train_args),
        peft_config=peft_config or model.peft_config["default"],
        active=frozenset(active),
        world_size=1,
        rank=0,
        seed=0,
        device_type="cuda",
        compute_capability=None,
    )


def plugin(base_layer="auto"):
    return FusedLoraPlugin(FusedLoraConfig(base_layer=base_layer))


def wrap(base, *, seed=0, **options):
    """Return ``base`` with adapters whose two matrices are random, so that every gradient is there."""
    values = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": "all-linear", **options}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **values)).to(DEVICE).train()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def batch(seed=0, vocab=67):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (2, 7), generator=generator).to(DEVICE)


def training(model, ids=None, *, seed=11):
    """Return loss and the gradient of every trained parameter and of the embedded input."""
    ids = batch() if ids is None else ids
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    torch.manual_seed(seed)
    logits = model(inputs_embeds=embedded).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, [embedded, *named.values()], allow_unused=True)
    return float(loss.detach()), dict(zip(["input", *named], grads, strict=True))


def assert_same(got, expected, *, loss=1e-5, grad=1e-4):
    assert got[0] == pytest.approx(expected[0], abs=loss)
    assert got[1].keys() == expected[1].keys()
    for name, ref in expected[1].items():
        if ref is None:
            assert got[1][name] is None or not got[1][name].any(), name
            continue
        error = (got[1][name] - ref).norm() / ref.norm().clamp_min(1e-6)
        assert float(error) < grad, f"{name}: {float(error):.1e}"


def counts(applied):
    return {name.partition(".")[2]: len(targets) for name, targets in applied.targets.items()}


def fused(model, taken=None):
    taken = taken or plugin()
    taken.check(facts(model))
    taken.check_model(model, facts(model))
    return applied_patches(model, taken.patches(model, facts(model)))


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient_of_a_family_stay(name):
    model = wrap(build_model(name))
    expected = training(model)
    with fused(model) as applied:
        got = training(model)
    assert_same(got, expected)
    assert counts(applied) == COUNTS[name]


# blocks in the tiny models of two layers; the others of a family's adapted layers are computed one by one
COUNTS = {
    "llama": {"mlp": 2, "qkv": 2, "linear": 2},
    "qwen2": {"mlp": 2, "qkv": 2, "linear": 2},
    "qwen3": {"mlp": 2, "qkv": 2, "linear": 2},
    "gemma2": {"mlp": 2, "qkv": 2, "linear": 2},
    "olmo2": {"mlp": 2, "qkv": 2, "linear": 2},
    "phi3": {"linear": 8},
    "mixtral": {"qkv": 2, "linear": 2},
    "granitemoehybrid": {"qkv": 1, "linear": 11},
}


OPTIONS = {
    "dropout": {"lora_dropout": 0.3},
    "rank-stabilised": {"use_rslora": True},
    "adapters' biases train": {"bias": "lora_only"},
    "all biases train": {"bias": "all"},
    "some projections": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "one projection": {"target_modules": ["k_proj"]},
    "ranks differ": {"rank_pattern": {"q_proj": 5, "down_proj": 1}, "alpha_pattern": {"q_proj": 1}},
    "some layers": {"target_modules": ["q_proj", "v_proj", "up_proj"], "layers_to_transform": [1]},
    "saved in full": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_options_of_the_adapters(name, options):
    model = wrap(build_model(name), **options)
    expected = training(model)
    with fused(model):
        got = training(model)
    assert_same(got, expected)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_gradient_checkpointing(kind):
    model = wrap(build_model("llama"), lora_dropout=0.3)
    expected = training(model)
    model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    with fused(model):
        ids = batch()
        torch.manual_seed(11)
        model.enable_input_require_grads()
        logits = model(input_ids=ids, use_cache=False).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        groups = [m.__dict__["_fused_lora_group"] for m in model.modules() if "_fused_lora_group" in m.__dict__]
        assert groups
        assert all(group.source is None and not group.ready for group in groups)
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, grad in grads.items():
        ref = expected[1][name]
        assert float((grad - ref).norm() / ref.norm()) < 1e-4, name


@pytest.mark.parametrize("kernels", [("swiglu",), ("rms_norm", "rope", "swiglu")])
def test_with_fast_kernels_nothing_is_lost(kernels, monkeypatch):
    from tuning.kernels import swiglu

    model = wrap(build_model("llama"), lora_dropout=0.3)
    expected = training(model)
    calls = []
    original = swiglu._forward
    monkeypatch.setattr(swiglu, "_forward", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    fast = FastKernelsPlugin(FastKernelsConfig(kernels=kernels))
    taken = plugin()
    run_facts = facts(model, active=("fast_kernels", "fused_lora"))
    patches = [*fast.patches(model, run_facts), *taken.patches(model, run_facts)]
    with applied_patches(model, patches) as applied:
        got = training(model)
    assert_same(got, expected)
    assert applied.count("fused_lora.mlp") == applied.count("fast_kernels.swiglu") == 2
    assert len(calls) == 4  # two layers, each once forward and once again in the backward
    assert all("forward" not in part.__dict__ for part in model.modules())


def test_with_fast_kernels_the_log_says_who_has_the_activation(caplog):
    model = wrap(build_model("llama"))
    with caplog.at_level(logging.INFO, logger="tuning"):
        plugin().patches(model, facts(model, active=("fast_kernels", "fused_lora")))
    assert caplog.messages == [
        "fused_lora.mlp computes the activation by the kernel of --fast_kernels swiglu inside its blocks"
    ]


def test_the_model_is_put_back_bit_for_bit():
    model = wrap(build_model("llama"), lora_dropout=0.3)
    before = training(model)
    for _ in range(2):
        with fused(model):
            pass
        after = training(model)
        assert after[0] == before[0]
        assert all(torch.equal(after[1][name], grad) for name, grad in before[1].items())
    marks = {name for part in model.modules() for name in part.__dict__ if "fused" in name or name == "forward"}
    assert not marks


def test_a_deep_copy_of_a_patched_model_is_its_own():
    model = wrap(build_model("llama"))
    with fused(model):
        twin = copy.deepcopy(model)
        before = training(twin)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert_same(training(twin), before, loss=0.0, grad=1e-7)


def test_adapters_that_are_switched_off_or_merged():
    model = wrap(build_model("llama")).eval()
    ids = batch()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with model.disable_adapter():
            base = model(input_ids=ids).logits
        with fused(model):
            assert torch.allclose(model(input_ids=ids).logits, plain, atol=1e-4)
            with model.disable_adapter():
                assert torch.equal(model(input_ids=ids).logits, base)
            model.merge_adapter()
            assert torch.allclose(model(input_ids=ids).logits, plain, atol=1e-3)
            model.unmerge_adapter()
    assert not torch.allclose(base, plain, atol=1e-2)


def test_no_dropout_in_evaluation():
    model = wrap(build_model("llama"), lora_dropout=0.9).eval()
    with torch.no_grad():
        expected = model(input_ids=batch()).logits
        with fused(model):
            assert torch.allclose(model(input_ids=batch()).logits, expected, atol=1e-4)


def test_a_layer_called_with_another_input_than_the_first():
    model = wrap(build_model("llama"))
    attention = model.base_model.model.model.layers[0].self_attn
    x, y = torch.randn(2, 3, 32, device=DEVICE), torch.randn(2, 3, 32, device=DEVICE)
    expected = [attention.q_proj(x), attention.k_proj(y), attention.v_proj(x)]
    with fused(model):
        for out, ref in zip((attention.q_proj(x), attention.k_proj(y), attention.v_proj(x)), expected, strict=True):
            assert torch.allclose(out, ref, atol=1e-5)


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_bfloat16_base(adapters):
    model = wrap(build_model("llama").to(torch.bfloat16))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(adapters)
    autocast = torch.autocast(DEVICE, dtype=torch.bfloat16)
    with autocast:
        expected = training(model)
    with fused(model), autocast:
        got = training(model)
    assert_same(got, expected, loss=2e-2, grad=4e-2)
    assert got[1]["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"].dtype == adapters


def test_a_compiled_layer():
    torch.compiler.reset()
    model = wrap(build_model("llama"))
    expected = training(model)
    with fused(model):
        for layer in model.base_model.model.model.layers:
            layer.compile(backend="aot_eager")
        got = training(model)
    torch.compiler.reset()
    assert_same(got, expected)


# ---- refusals ----


def refusal(call):
    with pytest.raises(PluginError) as error:
        call()
    return str(error.value)


def test_a_run_without_lora_is_refused():
    model = build_model("llama")
    for config in (types.SimpleNamespace(peft_type=None), types.SimpleNamespace()):
        assert refusal(lambda config=config: plugin().check(facts(model, peft_config=config))) == (
            "--fused_lora auto fuses LoRA adapters, but this run trains none; add --peft_method lora or drop "
            "--fused_lora"
        )


def test_another_base_than_the_one_loaded_is_refused():
    model = wrap(build_model("llama"))
    assert refusal(lambda: plugin("bitsandbytes").check(facts(model))) == (
        "--fused_lora bitsandbytes needs a quantised base, but --bnb_qlora does not load one; add --bnb_qlora, or use "
        "--fused_lora auto"
    )
    plugin("bitsandbytes").check(facts(model, active=("fused_lora", "bnb_qlora")))


@pytest.mark.parametrize(("option", "what"), [("use_dora", "DoRA"), ("lora_bias", "LoRA with a bias in the adapter")])
def test_variants_are_refused(option, what):
    model = wrap(build_model("llama"), **{option: True})
    assert refusal(lambda: plugin().check(facts(model))) == (
        f"--fused_lora auto computes plain LoRA, but {option} asks for {what}; drop one of the two"
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"deepspeed": "x.json"}, "--deepspeed gathers the parameters of each module by itself"),
        (
            {"fsdp": True, "fsdp_config": {"version": 1}},
            "version 1 of --fsdp flattens the adapters of each module by themselves",
        ),
        (
            {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}},
            "SIZE_BASED_WRAP of --fsdp gathers the parameters of each module by itself",
        ),
    ],
)
def test_sharding_below_a_layer_is_refused(options, reason):
    model = wrap(build_model("llama"))
    assert refusal(lambda: plugin().check(facts(model, **options))) == (
        f"--fused_lora auto computes whole blocks of a layer at once, but {reason}; use --fsdp with version 2 and "
        "TRANSFORMER_BASED_WRAP, which gathers a layer as a whole, or drop --fused_lora"
    )
    plugin().check(facts(model, fsdp=True, fsdp_config={"version": 2}))


def test_several_adapters_are_refused():
    model = wrap(build_model("llama"))
    model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "other"])
    assert refusal(lambda: plugin().check_model(model, facts(model))) == (
        "--fused_lora computes one adapter, but base_model.model.model.layers.0.self_attn.q_proj has 2 active "
        "(default, other); activate one, or drop --fused_lora"
    )


def test_a_model_of_which_nothing_fits_is_refused():
    model = wrap(build_model("llama"), target_modules=["q_proj"])
    for parameter in model.parameters():
        parameter.requires_grad = True
    assert refusal(lambda: plugin().check_model(model, facts(model))) == (
        "--fused_lora auto was asked for, but no adapted layer of PeftModelForCausalLM can be fused: "
        "base_model.model.model.layers.0.self_attn.q_proj is over a weight that trains; drop the flag"
    )


def test_what_is_left_out_is_told(caplog):
    model = wrap(build_model("llama"))
    layer = model.base_model.model.model.layers[1].self_attn.o_proj
    layer.base_layer.weight.requires_grad = True
    with caplog.at_level(logging.INFO, logger="tuning"):
        patches = plugin().patches(model, facts(model))
    assert caplog.messages == [
        "1 adapted layers are computed unfused, for example\n"
        "  base_model.model.model.layers.1.self_attn.o_proj: is over a weight that trains"
    ]
    assert len(patches) == 5


# ---- every check above can fail ----


@pytest.mark.parametrize("what", ["scale", "dropout", "order"])
def test_a_wrong_block_would_be_seen(monkeypatch, what):
    from tuning.kernels import lora

    original = lora.lora_linear

    def wrong(x, layers):
        change = {"scale": {"scale": 1.0}, "dropout": {"dropout": 0.0}, "order": {}}[what]
        layers = [
            lora.LoraLayer(**{name: getattr(layer, name) for name in layer.__slots__} | change) for layer in layers
        ]
        outs = original(x, layers)
        return (outs[0], *outs[:0:-1]) if what == "order" else outs

    monkeypatch.setattr(lora, "lora_linear", wrong)
    model = wrap(build_model("llama"), lora_dropout=0.3)
    expected = training(model)
    with fused(model):
        got = training(model)
    with pytest.raises(AssertionError):
        assert_same(got, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_fused_where_it_has_linear_layers(name):
    model = get_peft_model(build_model(name), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    if name == "gpt_bigcode":
        assert plugin().patches(model, facts(model))
        return
    targets = {patch.target for patch in plugin().patches(model, facts(model)) if patch.name == "fused_lora.qkv"}
    has_qkv = any(hasattr(module, "q_proj") for module in model.modules())
    assert bool(targets) == has_qkv
