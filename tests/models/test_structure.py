import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.activations import ACT2FN

from tests.equivalence.families import FAMILIES, build_model
from tuning.models.structure import GatedMLP, RMSNorm, find_gated_mlps, find_rms_norms, find_rotaries

# norms, gated MLPs, rotary attentions of the tiny models, and (offset, cast before weight) of their norms
LLAMA, GEMMA, LATE = (0.0, True), (1.0, False), (0.0, False)
EXPECTED = {
    "llama": (5, 2, 2, LLAMA),
    "mistral": (5, 2, 2, LLAMA),
    "qwen2": (5, 2, 2, LLAMA),
    "qwen3": (9, 2, 2, LLAMA),
    "gemma2": (9, 2, 2, GEMMA),
    "gemma3_text": (13, 2, 2, GEMMA),
    "phi3": (5, 2, 2, LLAMA),
    "granite": (5, 2, 2, LLAMA),
    "granitemoe": (5, 0, 2, LLAMA),
    "granitemoeshared": (5, 2, 2, LLAMA),
    # the state-space layers' norms take a gate as well and stay as they are
    "granitemoehybrid": (7, 3, 1, LLAMA),
    "mixtral": (5, 0, 2, LLAMA),
    "qwen3_moe": (9, 0, 2, LLAMA),
    "gpt_oss": (5, 0, 2, LATE),
    "olmo2": (9, 2, 2, LATE),
    "smollm3": (5, 2, 2, LLAMA),
    "gpt_bigcode": (0, 0, 0, None),
}


def test_every_family_is_expected():
    assert set(EXPECTED) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_a_family_are_found(name):
    model = build_model(name)
    norms, mlps, rotaries = find_rms_norms(model)[0], find_gated_mlps(model)[0], find_rotaries(model)[0]
    *counts, convention = EXPECTED[name]
    assert [len(norms), len(mlps), len(rotaries)] == counts
    assert {(norm.offset, norm.cast_before_weight) for norm in norms} == ({convention} if convention else set())
    assert {rotary.half_tables for rotary in rotaries} <= {name == "gpt_oss"}
    assert {mlp.activation for mlp in mlps} <= {"gelu_tanh" if name.startswith("gemma") else "silu"}


def test_epsilon_and_names_are_the_models():
    model = build_model("llama", rms_norm_eps=3e-5)
    norms, _ = find_rms_norms(model)
    assert {norm.eps for norm in norms} == {3e-5}
    assert norms[0].target == "model.layers.0.input_layernorm"
    assert find_gated_mlps(model)[0][0] == GatedMLP(
        target="model.layers.0.mlp", activation="silu", gate="gate_proj", up="up_proj", down="down_proj"
    )
    assert find_rotaries(model)[0][0].function == "apply_rotary_pos_emb"


@pytest.mark.parametrize("eps", [0.0, 0, 0.05])
def test_an_epsilon_at_the_edges(eps):
    norm = Norm()
    norm.eps = eps
    assert [site.eps for site in find_rms_norms(nn.Sequential(norm))[0]] == [eps]


def test_fused_projections_are_told_apart():
    (first, *_), _ = find_gated_mlps(build_model("phi3"))
    assert (first.gate, first.up, first.down) == ("gate_up_proj", None, "down_proj")


def test_adapters_and_half_precision_change_nothing():
    model = get_peft_model(build_model("qwen3"), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.to(torch.bfloat16)
    assert [len(find(model)[0]) for find in (find_rms_norms, find_gated_mlps, find_rotaries)] == [9, 2, 2]
    names = {norm.target for norm in find_rms_norms(model)[0]}
    assert "base_model.model.model.layers.0.input_layernorm" in names


def test_looking_leaves_weights_random_numbers_and_modes_alone():
    model = build_model("gemma2").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    for find in (find_rms_norms, find_gated_mlps, find_rotaries):
        find(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all("forward" not in module.__dict__ for module in model.modules())


class Norm(nn.Module):
    """An RMSNorm with a twist."""

    def __init__(self, twist: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6
        self.twist = twist

    def forward(self, x):
        wide = x.float()
        mean = wide.mean(-1, keepdim=True) if self.twist == "centred" else 0.0
        x_hat = (wide - mean) * torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + self.eps)
        if self.twist == "eps outside":
            x_hat = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + 0.05)
        if self.twist == "fp32 result":
            return self.weight * x_hat
        return self.weight * x_hat.to(x.dtype)


def test_a_norm_of_ones_own_is_found_by_what_it_does():
    assert find_rms_norms(nn.Sequential(Norm()))[0] == [
        RMSNorm(target="0", eps=1e-6, offset=0.0, cast_before_weight=True)
    ]


@pytest.mark.parametrize("twist", ["centred", "eps outside", "fp32 result"])
def test_a_norm_that_computes_otherwise_is_not(twist):
    found, unfit = find_rms_norms(nn.Sequential(Norm(twist)))
    assert found == []
    assert [(one.target, one.reason) for one in unfit] == [
        ("0", "computes or rounds otherwise, or takes more than one input")
    ]


def test_torchs_own_norms():
    model = nn.Sequential(nn.RMSNorm(16, eps=1e-6), nn.LayerNorm(16), nn.BatchNorm1d(16))
    # it rounds once, as OLMo 2 does; LayerNorm and BatchNorm have a bias
    found, _ = find_rms_norms(model)
    assert {one.target for one in found} <= {"0"}


def test_a_replaced_forward_is_left_to_its_owner():
    model = build_model("llama")
    for name in ("model.layers.0.input_layernorm", "model.layers.0.mlp", "model.layers.0.self_attn"):
        model.get_submodule(name).forward = lambda x: x
    for find, count in ((find_rms_norms, 4), (find_gated_mlps, 1), (find_rotaries, 1)):
        found, unfit = find(model)
        assert len(found) == count
        assert [one.reason for one in unfit] == ["has another forward already"]


class MLP(nn.Module):
    """A gated MLP with a twist."""

    def __init__(self, twist: str = "", activation: str = "silu", width: int = 12, inner: int = 20) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(width, inner)
        self.last = nn.Linear(inner, width)
        self.act = ACT2FN[activation]
        self.dropout = nn.Dropout(0.5 if twist == "dropout" else 0.0)
        self.twist = twist

    def forward(self, x):
        gate, up = self.first(x), self.second(x)
        if self.twist == "swapped":
            gate, up = up, gate
        if self.twist == "clamped":
            gate = gate.clamp(max=0.5)
        if self.twist == "no gate":
            return self.last(self.act(gate + up))
        return self.last(self.dropout(self.act(gate) * up))


@pytest.mark.parametrize(
    ("activation", "expected"), [("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu")]
)
def test_layers_and_activation_are_found_by_what_they_do(activation, expected):
    (found,), _ = find_gated_mlps(nn.Sequential(MLP(activation=activation)))
    assert (found.activation, found.gate, found.up, found.down) == (expected, "first", "second", "last")
    (found,), _ = find_gated_mlps(nn.Sequential(MLP("swapped", activation)))
    assert (found.gate, found.up) == ("second", "first")
    # equal widths say nothing of the roles
    (found,), _ = find_gated_mlps(nn.Sequential(MLP(activation=activation, width=16, inner=16)))
    assert (found.gate, found.up, found.down) == ("first", "second", "last")


@pytest.mark.parametrize("twist", ["dropout", "clamped", "no gate"])
@pytest.mark.parametrize("training", [True, False])
def test_an_mlp_that_computes_otherwise_is_not(twist, training):
    found, unfit = find_gated_mlps(nn.Sequential(MLP(twist)).train(training))
    assert found == []
    assert [one.reason for one in unfit] == ["is no gated MLP of SiLU or GELU"]
    assert find_gated_mlps(nn.Sequential(MLP(activation="relu")))[0] == []


def rotate_pairs(q, k, cos, sin):
    """Turn neighbours, not halves."""

    def turn(x):
        out = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos.unsqueeze(1) + out * sin.unsqueeze(1)

    return turn(q), turn(k)


class Interleaved(nn.Module):
    """An attention that turns neighbouring dimensions."""

    def forward(self, q, k, cos, sin):
        return rotate_pairs(q, k, cos, sin)


def test_another_rotation_is_not_taken_for_ours():
    found, unfit = find_rotaries(nn.Sequential(Interleaved()))
    assert found == []
    assert [one.reason for one in unfit] == ["turns other pairs of dimensions than the two halves"]


@functools.wraps(Interleaved.forward)
def wrapped(self, *args):
    return Interleaved.forward(self, *args)


def test_a_wrapped_forward_is_looked_into(monkeypatch):
    monkeypatch.setattr(Interleaved, "forward", wrapped)
    assert len(find_rotaries(nn.Sequential(Interleaved()))[1]) == 1
