from __future__ import annotations

import logging
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.equivalence.families import FAMILIES, build_model
from tests.tiny import build_bigram
from tuning.acceleration.patching import applied_patches
from tuning.acceleration.plugin import Facts
from tuning.acceleration.plugins import fast_kernels as module
from tuning.acceleration.plugins.fast_kernels import FastKernelsPlugin, SupervisedIndex
from tuning.config.acceleration_configs import FastKernelsConfig
from tuning.errors import PluginError

ALL = ("cross_entropy", "linear_cross_entropy", "rms_norm", "rope", "swiglu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def facts(model, *, active=(), world_size=1, peft_config=None, device_type="cuda", **train_args):
    return Facts(
        model_config=model.config,
        model_name_or_path="model",
        model_kwargs={},
        train_args=types.SimpleNamespace(**train_args),
        peft_config=peft_config,
        active=frozenset(active),
        world_size=world_size,
        rank=0,
        seed=0,
        device_type=device_type,
        compute_capability=None,
    )


def plugin(*kernels, auto=False):
    return FastKernelsPlugin(FastKernelsConfig(kernels=tuple(sorted(kernels)), auto=auto))


def batch(seed=0, vocab=67):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (2, 7), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE)}


def plain_terms(model, inputs, smoothing=0.0):
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1).float()
    labels = inputs["labels"][:, 1:].flatten()
    nll = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    kept = logits[labels != -100]
    entropy = torch.distributions.Categorical(logits=kept).entropy().sum()
    return nll, (labels != -100).sum(), entropy, (kept.argmax(-1) == labels[labels != -100]).sum()


def gradients(model, loss):
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def assert_same_training(model, taken, run_facts, inputs, smoothing=0.0):
    """Compare loss terms and every gradient with and without the plugin; return what was applied."""
    nll, count, entropy, correct = plain_terms(model, inputs, smoothing)
    expected = gradients(model, nll)
    with applied_patches(model, taken.patches(model, run_facts)) as applied:
        loss = taken.loss(run_facts)
        collate = taken.collator(lambda samples: {k: v.cpu() for k, v in inputs.items()}, run_facts)
        data = inputs if collate is None else {k: v.to(DEVICE) for k, v in collate([]).items()}
        terms = loss(model, data)
        grads = gradients(model, terms.nll_sum)
    assert float(terms.nll_sum.detach()) == pytest.approx(float(nll.detach()), rel=1e-5)
    assert int(terms.num_tokens) == int(count)
    assert float(terms.entropy_sum) == pytest.approx(float(entropy.detach()), rel=1e-4)
    assert int(terms.num_correct) == int(correct)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        error = (grad - expected[name]).norm() / expected[name].norm().clamp_min(1e-6)
        assert float(error) < 1e-4, name
    return applied


# modules of each kernel in the tiny models; families without a number have none
COUNTS = {
    "llama": (5, 2, 2),
    "mistral": (5, 2, 2),
    "qwen2": (5, 2, 2),
    "qwen3": (9, 2, 2),
    "gemma2": (9, 2, 2),
    "gemma3_text": (13, 2, 2),
    "phi3": (5, 2, 2),
    "granite": (5, 2, 2),
    "granitemoe": (5, 2, 0),
    "granitemoeshared": (5, 2, 2),
    "granitemoehybrid": (7, 1, 3),
    "mixtral": (5, 2, 0),
    "qwen3_moe": (9, 2, 0),
    "gpt_oss": (5, 2, 0),
    "olmo2": (9, 2, 2),
    "smollm3": (5, 2, 2),
    "gpt_bigcode": (0, 0, 0),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient_of_a_family_stay(name):
    model = build_model(name).to(DEVICE).train()
    applied = assert_same_training(model, plugin(auto=True), facts(model), batch())
    counts = tuple(applied.count(f"fast_kernels.{kernel}") for kernel in ("rms_norm", "rope", "swiglu"))
    assert counts == COUNTS[name]
    assert applied.count("fast_kernels.linear_cross_entropy") == 1
    assert applied.count("fast_kernels.cross_entropy") == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("kernel", ALL)
def test_each_kernel_alone(name, kernel):
    model = build_model(name).to(DEVICE).train()
    taken = plugin(kernel)
    if "cross_entropy" in kernel:
        applied = assert_same_training(model, taken, facts(model, label_smoothing_factor=0.1), batch(), smoothing=0.1)
    else:
        nll = plain_terms(model, batch())[0]
        expected = gradients(model, nll)
        with applied_patches(model, taken.patches(model, facts(model))) as applied:
            assert taken.loss(facts(model)) is None
            grads = gradients(model, plain_terms(model, batch())[0])
        for key, grad in grads.items():
            assert float((grad - expected[key]).norm() / expected[key].norm()) < 1e-4, key
    assert set(applied.targets) == {f"fast_kernels.{kernel}"}


def test_the_model_is_put_back_bit_for_bit():
    model = build_model("qwen3").to(DEVICE)
    ids = batch()["input_ids"]
    before = model(input_ids=ids).logits
    for _ in range(2):
        with applied_patches(model, plugin(auto=True).patches(model, facts(model))):
            during = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, before)
        assert torch.allclose(during, before, atol=1e-4)
    assert all("forward" not in part.__dict__ for part in model.modules())


def test_another_model_of_the_class_stays_as_it_is():
    model, other = build_model("llama").to(DEVICE), build_model("llama").to(DEVICE)
    with applied_patches(model, plugin(auto=True).patches(model, facts(model))):
        assert all("forward" not in part.__dict__ for part in other.modules())
        assert "logits" in other(**batch())


LORA = {
    "adapters": {"target_modules": "all-linear"},
    "adapted head": {"target_modules": ["q_proj", "down_proj", "lm_head"]},
    "trained copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
}


@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_lora(options):
    config = LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", **options)
    model = get_peft_model(build_model("llama"), config).to(DEVICE).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    applied = assert_same_training(model, plugin(*ALL), facts(model, peft_config=config), batch())
    # a trained copy of a norm comes beside the original
    assert applied.count("fast_kernels.rms_norm") == 5 + 2 * ("modules_to_save" in options and "norm" in str(options))
    assert applied.targets["fast_kernels.linear_cross_entropy"] == ("base_model.model",)


def test_tied_embeddings():
    model = build_model("llama", tie_word_embeddings=True).to(DEVICE).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_training(model, plugin("linear_cross_entropy"), facts(model), batch())


@pytest.mark.parametrize("factor", [1 / 3, torch.tensor(1 / 3)])
def test_a_factor_that_is_known_beforehand_changes_no_gradient(factor):
    model = build_model("llama").to(DEVICE).train()
    taken = plugin("linear_cross_entropy")
    with applied_patches(model, taken.patches(model, facts(model))):
        loss = taken.loss(facts(model))
        assert loss.takes_loss_factor
        expected = gradients(model, loss(model, batch()).nll_sum / 3)
        terms = loss(model, {**batch(), "loss_factor": factor})
        for name, grad in gradients(model, terms.nll_sum / 3).items():
            assert torch.allclose(grad, expected[name], rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("kernel", ["cross_entropy", "linear_cross_entropy"])
def test_router_loss_of_experts(kernel):
    model = build_model("mixtral", output_router_logits=True).to(DEVICE).train()
    expected = model(input_ids=batch()["input_ids"]).aux_loss
    taken = plugin(kernel)
    with applied_patches(model, taken.patches(model, facts(model))):
        terms = taken.loss(facts(model))(model, batch())
    assert float(terms.aux_loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert terms.aux_loss.requires_grad


@pytest.mark.parametrize("kernel", ["cross_entropy", "linear_cross_entropy"])
def test_no_label_at_all_is_a_loss_of_zero(kernel):
    # https://github.com/linkedin/Liger-Kernel/issues/177
    model = build_model("llama").to(DEVICE).train()
    inputs = {**batch(), "labels": torch.full((2, 7), -100, device=DEVICE)}
    taken = plugin(kernel)
    with applied_patches(model, taken.patches(model, facts(model))):
        terms = taken.loss(facts(model))(model, inputs)
        terms.nll_sum.backward()
    assert float(terms.nll_sum.detach()) == int(terms.num_tokens) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("kernel", ["cross_entropy", "linear_cross_entropy"])
def test_hand_computed_losses_of_a_flattened_batch(kernel):
    # samples 5 6 7 | 20 21 | 40 41 42 43 laid end to end, the first label of each masked: every target costs 0.767273
    model = build_bigram().to(DEVICE).train()
    ids = torch.tensor([[5, 6, 7, 20, 21, 40, 41, 42, 43]], device=DEVICE)
    labels = torch.tensor([[-100, 6, 7, -100, 21, -100, 41, 42, 43]], device=DEVICE)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]], device=DEVICE)
    taken = plugin(kernel)
    with applied_patches(model, taken.patches(model, facts(model))):
        terms = taken.loss(facts(model))(model, {"input_ids": ids, "labels": labels, "position_ids": positions})
    assert float(terms.nll_sum.detach() / terms.num_tokens) == pytest.approx(0.767273, abs=1e-5)


def test_hand_computed_smoothing():
    # 2 targets that cost 4.767273 and 8 that cost 0.767273; smoothing of 0.1 over 64 words
    # https://github.com/linkedin/Liger-Kernel/issues/243
    model = build_bigram().to(DEVICE).train()
    taken, run_facts = plugin("linear_cross_entropy"), facts(model, label_smoothing_factor=0.1)
    total = count = 0.0
    with applied_patches(model, taken.patches(model, run_facts)):
        for row in ([10, 30, 12], [20, 21, 22, 23, 24, 25, 26, 27, 28]):
            ids = torch.tensor([row], device=DEVICE)
            terms = taken.loss(run_facts)(model, {"input_ids": ids, "labels": ids})
            total, count = total + float(terms.nll_sum.detach()), count + int(terms.num_tokens)
    assert total / count == pytest.approx(1.881023, abs=1e-5)


def test_gradient_checkpointing():
    model = build_model("llama").to(DEVICE).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_training(model, plugin(*ALL), facts(model), batch())


def test_a_compiled_layer_calls_the_kernels():
    torch.compiler.reset()
    model = build_model("llama").to(DEVICE)
    ids = batch()["input_ids"]
    expected = model(input_ids=ids).logits
    with applied_patches(model, plugin("rms_norm", "rope", "swiglu").patches(model, facts(model))):
        calls = []

        def backend(graph, inputs):
            calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph

        layer = model.model.layers[0]
        layer.compile(backend=backend)
        assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-4)
        for operator in ("rms_norm", "rope", "glu"):
            assert any(f"packtune.{operator}" in call for call in calls), operator
    torch.compiler.reset()


def test_a_deep_copy_of_a_patched_model_is_its_own():
    import copy

    model = build_model("llama").to(DEVICE)
    with applied_patches(model, plugin("rms_norm", "swiglu").patches(model, facts(model))):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.model.norm.weight.zero_()
        assert model(input_ids=batch()["input_ids"]).logits.abs().sum() > 0
        assert twin(input_ids=batch()["input_ids"]).logits.abs().sum() == 0


def test_the_supervised_positions_are_named_on_the_cpu():
    labels = torch.tensor([[-100, 4, -100, 6], [-100, -100, 9, 10]])
    collated = SupervisedIndex(lambda samples: {"labels": labels, "input_ids": labels})([])
    assert collated["supervised_index"].tolist() == [0, 2, 5, 6]
    assert collated["supervised_index"].dtype == torch.int64


def test_when_the_supervised_positions_are_not_named():
    model = build_model("llama").to(DEVICE)
    prompt = types.SimpleNamespace(is_prompt_learning=True)

    def seat(taken, **kwargs):
        run_facts = facts(model, **kwargs)
        taken.check_model(model, run_facts)
        return taken.collator(dict, run_facts)

    assert seat(plugin("linear_cross_entropy")) is not None
    assert seat(plugin("cross_entropy")) is None
    assert seat(plugin("rope")) is None
    assert seat(plugin("linear_cross_entropy"), peft_config=prompt) is None
    # a loader that hands pieces of a batch to ranks would cut the positions too
    assert seat(plugin("linear_cross_entropy"), world_size=2) is None
    assert seat(plugin("linear_cross_entropy"), world_size=2, active={"padding_free"}) is not None


def test_linear_cross_entropy_takes_the_place_of_cross_entropy():
    model = build_model("llama").to(DEVICE)
    taken = plugin("cross_entropy", "linear_cross_entropy")
    assert [patch.name for patch in taken.patches(model, facts(model))] == ["fast_kernels.linear_cross_entropy"]


def test_auto_falls_back_to_the_loss_that_fits():
    model = build_model("llama").to(DEVICE)
    model.lm_head = _Doubled(model.lm_head)
    taken = plugin(auto=True)
    names = {patch.name for patch in taken.patches(model, facts(model))}
    assert "fast_kernels.cross_entropy" in names
    assert "fast_kernels.linear_cross_entropy" not in names
    assert_same_training(model, plugin(auto=True), facts(model), batch())


class _Doubled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return 2 * self.inner(hidden)


def test_auto_says_what_and_why(caplog):
    model = build_model("granitemoehybrid").to(DEVICE)
    with caplog.at_level(logging.INFO, logger="tuning"):
        plugin(auto=True).patches(model, facts(model))
    assert caplog.messages[-1] == (
        "fast kernels for GraniteMoeHybridForCausalLM:\n"
        "  rms_norm: 7 modules; model.layers.0.mamba.norm (GraniteMoeHybridRMSNormGated) computes or rounds otherwise, "
        "or takes more than one input\n"
        "  rope: 1 modules\n"
        "  swiglu: 3 modules\n"
        "  linear_cross_entropy: 1 modules"
    )


@pytest.mark.parametrize("compiling", [{"active": {"compile_layers"}}, {"torch_compile": True}])
def test_auto_leaves_layers_to_the_compiler(compiling):
    model = build_model("llama").to(DEVICE)
    taken = plugin(auto=True)
    assert {patch.name for patch in taken.patches(model, facts(model, **compiling))} == {
        "fast_kernels.linear_cross_entropy"
    }
    # by name they are taken all the same
    assert len(plugin("rope").patches(model, facts(model, **compiling))) == 2


def test_a_kernel_asked_for_by_name_that_fits_nothing_is_refused():
    model = build_model("gpt_bigcode").to(DEVICE)
    for call in ("check_model", "patches"):
        with pytest.raises(PluginError) as error:
            getattr(plugin("rms_norm", "rope", "swiglu"), call)(model, facts(model))
        assert str(error.value) == (
            "--fast_kernels rms_norm was asked for, but no module is an RMSNorm; leave it out, or pass --fast_kernels "
            "auto to take what fits\n"
            "--fast_kernels rope was asked for, but no module calls a rotary function of queries and keys; leave it "
            "out, or pass --fast_kernels auto to take what fits\n"
            "--fast_kernels swiglu was asked for, but no module is a gated MLP; leave it out, or pass --fast_kernels "
            "auto to take what fits"
        )


def test_a_head_that_is_no_linear_layer_is_refused():
    model = build_model("llama").to(DEVICE)
    model.lm_head = _Doubled(model.lm_head)
    with pytest.raises(PluginError) as error:
        plugin("linear_cross_entropy").check_model(model, facts(model))
    assert str(error.value) == (
        "--fast_kernels linear_cross_entropy was asked for, but the head is a _Doubled, not a plain linear layer; "
        "leave it out, or pass --fast_kernels auto to take what fits"
    )


@pytest.mark.parametrize(
    ("train_args", "reason"),
    [
        ({"loss_type": "dft"}, "it computes the plain cross-entropy and --loss_type is dft"),
        ({"use_liger_kernel": True}, "--use_liger_kernel replaces the loss as well"),
    ],
)
def test_losses_that_cannot_be_fused_are_refused(train_args, reason):
    model = build_model("llama").to(DEVICE)
    for kernel in ("cross_entropy", "linear_cross_entropy"):
        with pytest.raises(PluginError) as error:
            plugin(kernel).check(facts(model, **train_args))
        assert str(error.value) == (
            f"--fast_kernels {kernel} was asked for, but {reason}; leave it out, or pass --fast_kernels auto to take "
            "what fits"
        )
    taken = plugin(auto=True)
    taken.check(facts(model, **train_args))
    taken.patches(model, facts(model, **train_args))
    assert taken.loss(facts(model, **train_args)) is None


def test_without_a_gpu_a_name_is_refused_and_auto_is_none(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = build_model("llama")
    run_facts = facts(model, device_type="cpu")
    with pytest.raises(PluginError) as error:
        plugin("rope").check(run_facts)
    assert str(error.value) == (
        "--fast_kernels rope was asked for, but Triton needs a GPU and this run has none (TRITON_INTERPRET=1 runs it "
        "on the CPU, slowly, for tests); leave it out, or pass --fast_kernels auto to take what fits"
    )
    taken = plugin(auto=True)
    taken.check(run_facts)
    assert list(taken.patches(model, run_facts)) == []
    assert taken.loss(run_facts) is None
    assert taken.collator(dict, run_facts) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plugin("rope").check(run_facts)


def test_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"the package triton is not installed \(pip install triton\)"):
        plugin("rope").check(facts(build_model("llama")))


def test_only_auto_and_nothing_may_do_nothing():
    assert plugin(auto=True).may_do_nothing()
    assert plugin().may_do_nothing()
    assert not plugin("rope").may_do_nothing()
    model = build_model("llama")
    assert list(plugin().patches(model, facts(model))) == []


def _other_angles(q, k, cos, sin, **kwargs):
    from tuning.kernels import reference

    return reference.rope(q, k, cos, -sin)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("tuning.kernels.rope.rope", _other_angles),
        ("tuning.kernels.rms_norm.rms_norm", lambda x, weight, eps, **kwargs: x * weight),
        ("tuning.kernels.swiglu.swiglu", lambda gate, up: gate * up),
    ],
)
def test_a_wrong_kernel_would_be_seen(monkeypatch, name, mutant):
    model = build_model("llama").to(DEVICE).train()
    monkeypatch.setattr(name, mutant)
    with pytest.raises(AssertionError):
        assert_same_training(model, plugin(auto=True), facts(model), batch())


def train_curve(*, seed, kernels, steps, device=DEVICE):
    """Return the losses of a small model that learns a noisy next word from scratch, in bf16 with fp32 weights."""
    model = build_model("llama", seed=seed, hidden_size=64, intermediate_size=96, vocab_size=512).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    taken, run_facts = plugin(*ALL), facts(model)
    generator = torch.Generator().manual_seed(1)
    losses = []
    with applied_patches(model, taken.patches(model, run_facts) if kernels else ()):
        loss_of = taken.loss(run_facts) if kernels else None
        for _ in range(steps):
            first = torch.randint(0, 512, (8, 1), generator=generator)
            ids = (first + torch.arange(32) * 7) % 512
            noise = torch.rand(ids.shape, generator=generator) < 0.1
            ids = torch.where(noise, torch.randint(0, 512, ids.shape, generator=generator), ids).to(device)
            with torch.autocast(device, dtype=torch.bfloat16):
                if loss_of is None:
                    loss = model(input_ids=ids, labels=ids).loss
                else:
                    terms = loss_of(model, {"input_ids": ids, "labels": ids})
                    loss = terms.nll_sum / terms.num_tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return torch.tensor(losses)


def assert_within_noise(steps):
    plain, with_kernels = (train_curve(seed=0, kernels=kernels, steps=steps) for kernels in (False, True))
    other_seed = train_curve(seed=1, kernels=False, steps=steps)
    assert plain[-steps // 10 :].mean() < 0.9 * plain[: max(1, steps // 10)].mean(), "the model learns nothing"
    assert (with_kernels - plain).abs().mean() < (other_seed - plain).abs().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: 200 steps")
def test_two_hundred_steps_stay_within_the_noise_of_two_seeds():
    assert_within_noise(200)
