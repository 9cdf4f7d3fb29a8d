from __future__ import annotations

import types

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import build_model
from tuning.errors import PluginError
from tuning.models.lora_layers import find_lora_layers, frozen_parts, why_not_sharded

O_PROJ = "base_model.model.model.layers.0.self_attn.o_proj"


def wrap(**options):
    values = {"r": 2, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM", **options}
    return get_peft_model(build_model(), LoraConfig(**values))


def test_every_plain_adapter_is_found_with_its_parts():
    model = wrap()
    found, unfit = find_lora_layers(model)
    assert unfit == {}
    assert len(found) == 4
    parts, module = found[O_PROJ], model.get_submodule(O_PROJ)
    assert parts.owner is module
    assert parts.base is module.base_layer
    assert (parts.down, parts.up) == (module.lora_A["default"], module.lora_B["default"])
    assert torch.equal(parts.weight(torch.float64), module.base_layer.weight.double())


def test_what_a_layer_computes_now():
    model = wrap()
    parts = find_lora_layers(model)[0][O_PROJ]
    assert parts.is_plain_now()
    with model.disable_adapter():
        assert not parts.is_plain_now()
    model.merge_adapter()
    assert not parts.is_plain_now()
    model.unmerge_adapter()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    model.set_adapter("other")
    assert not parts.is_plain_now()


def test_reasons_against_a_layer():
    model = wrap(use_dora=True)
    assert set(find_lora_layers(model)[1].values()) == {"has a variant of LoRA"}
    model = wrap(target_modules=["embed_tokens", "lm_head", "q_proj"])
    found, unfit = find_lora_layers(model)
    assert len(found) == 2
    assert set(unfit.values()) == {"is the embedding or the head"}
    model = wrap()
    layer = model.get_submodule(O_PROJ)
    layer.forward = layer.forward
    assert find_lora_layers(model)[1] == {O_PROJ: "has another forward already"}
    del layer.forward
    layer.base_layer.weight.requires_grad = True
    assert find_lora_layers(model)[1] == {O_PROJ: "is over a weight that trains"}
    layer.base_layer = torch.nn.Bilinear(2, 2, 2)
    assert find_lora_layers(model)[1] == {O_PROJ: "is over a Bilinear, which is no linear layer that it knows"}


def test_several_active_adapters_are_refused():
    model = wrap()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(PluginError, match=r"has 2 active \(default, other\); activate one, or drop --fused_lora$"):
        find_lora_layers(model)


def test_a_layer_without_an_adapter():
    layer = torch.nn.Linear(3, 4)
    assert frozen_parts(layer) is None  # it trains
    layer.requires_grad_(False)
    parts = frozen_parts(layer)
    assert parts.owner is None
    assert parts.is_plain_now()
    assert torch.equal(parts.weight(torch.float32), layer.weight)
    assert frozen_parts(torch.nn.Embedding(3, 4)) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"fsdp": True}, ""),
        ({"fsdp": True, "fsdp_config": {"version": "2", "auto_wrap_policy": "NO_WRAP"}}, ""),
        ({"deepspeed": "a.json"}, "--deepspeed gathers the parameters of each module by itself"),
    ],
)
def test_how_parameters_are_gathered(options, reason):
    assert why_not_sharded(types.SimpleNamespace(**options)) == reason
