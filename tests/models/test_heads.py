import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.equivalence.families import FAMILIES, build_model
from tuning.models.heads import Head, base_and_low_rank, find_causal_model, find_head, head_parts


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_of_a_family(name):
    head, reason = find_head(build_model(name))
    scale = 0.5 if name == "granite" else 1.0
    softcap = 30.0 if name == "gemma2" else 0.0
    assert head == Head(model="", layer="lm_head", scale=scale, softcap=softcap), reason


@pytest.mark.parametrize(
    ("name", "options", "scale", "softcap"),
    [
        ("granite", {"logits_scaling": 8.0}, 1 / 8, 0.0),
        ("granite", {"logits_scaling": 3.0}, 1 / 3, 0.0),
        ("gemma2", {"final_logit_softcapping": 7.5}, 1.0, 7.5),
        ("gemma2", {"final_logit_softcapping": None}, 1.0, 0.0),
        ("gemma3_text", {"final_logit_softcapping": 50.0}, 1.0, 50.0),
    ],
)
def test_factor_and_softcap_are_asked_of_the_model(name, options, scale, softcap):
    head, _ = find_head(build_model(name, **options))
    assert head is not None
    assert head.scale == pytest.approx(scale, rel=1e-11)
    assert head.softcap == pytest.approx(softcap, rel=1e-11)


def test_adapters_around_the_model_and_the_head():
    model = get_peft_model(
        build_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    )
    assert find_causal_model(model) == "base_model.model"
    assert find_head(model)[0] == Head(model="base_model.model", layer="lm_head", scale=1.0, softcap=0.0)


def test_looking_leaves_the_model_alone():
    model = build_model("gemma2")
    before, state = model.lm_head, torch.random.get_rng_state()
    ids = torch.tensor([[3, 4, 5]])
    logits = model(input_ids=ids).logits
    find_head(model)
    assert model.lm_head is before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_a_model_without_a_head_and_one_that_does_more():
    assert find_head(nn.Linear(2, 2)) == (None, "has no output head")
    model = build_model("llama")
    kind = type(model)

    class Odd(kind):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.relu()
            return out

    model.__class__ = Odd
    assert find_head(model) == (
        None,
        "calls its layers in a way of its own, or changes its logits by more than a factor and a softcap",
    )


def lora(**options):
    return get_peft_model(
        build_model("llama"),
        LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", **options),
    )


def test_parts_of_plain_adapted_and_copied_heads():
    model = build_model("llama")
    assert head_parts(model.lm_head) == ([model.lm_head], "")
    model = lora()
    assert head_parts(model.base_model.model.lm_head) == ([model.base_model.model.lm_head], "")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    head = get_peft_model(build_model("llama"), config).base_model.model.lm_head
    assert head_parts(head) == ([head.original_module, head.modules_to_save["default"]], "")


def test_heads_that_are_refused():
    assert head_parts(nn.Bilinear(2, 2, 2)) == ([], "the head is a Bilinear, not a plain linear layer")
    reason = "the head's adapter is a variant of LoRA"
    assert head_parts(lora(use_dora=True).base_model.model.lm_head) == ([], reason)
    reason = "the head's adapter has a bias"
    assert head_parts(lora(lora_bias=True).base_model.model.lm_head) == ([], reason)
    model = lora()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "second"])
    reason = "the head has 2 active adapters, not one"
    assert head_parts(model.base_model.model.lm_head) == ([], reason)
    head = nn.Linear(2, 2)
    head.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    assert head_parts(head) == ([], "the head's weight is quantised")


def test_low_rank_is_what_the_adapter_adds():
    head = lora().base_model.model.lm_head
    nn.init.normal_(head.lora_B["default"].weight)
    hidden = torch.randn(2, 3, 32)
    base, low_rank = base_and_low_rank(head, hidden)
    logits = base(hidden).reshape(6, -1) + low_rank[0] @ low_rank[1].t()
    assert torch.allclose(logits, head(hidden).reshape(6, -1), atol=1e-5)
    head.merge()
    assert base_and_low_rank(head, hidden) == (head.base_layer, None)
