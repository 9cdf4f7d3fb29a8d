"""How activations are recomputed when the user does not say."""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from tests import tiny
from tuning.config.peft_config import LoraConfig
from tuning.models import adapters
from tuning.trainers import arguments
from tuning.trainers.checkpointing import choose_checkpointing_, has_dropout


def args(tmp_path, **more):
    values = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "gradient_checkpointing": "true"}
    return arguments.build({**values, **more})


def lora(dropout):
    config = adapters.build_peft_config(LoraConfig(r=2, lora_dropout=dropout), tokenizer_name="", has_new_tokens=False)
    return adapters.wrap(tiny.build_model(), config)


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=2,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (tiny.build_model, {"use_reentrant": True, "preserve_rng_state": False}),
        (lambda: lora(0.0), {"use_reentrant": True, "preserve_rng_state": False}),
        (lambda: lora(0.1), {"use_reentrant": True}),
        # the gradient of router logits does not come back through a reentrant layer
        (mixtral, {"use_reentrant": False, "preserve_rng_state": False}),
    ],
)
def test_the_cheapest_right_way_is_chosen(build, expected, tmp_path):
    chosen = args(tmp_path)
    choose_checkpointing_(chosen, build())
    assert chosen.gradient_checkpointing_kwargs == expected


def test_a_frozen_embedding_is_not_reentrant(tmp_path):
    model, chosen = tiny.build_model(), args(tmp_path)
    model.get_input_embeddings().weight.requires_grad_(False)
    choose_checkpointing_(chosen, model)
    assert chosen.gradient_checkpointing_kwargs["use_reentrant"] is False


def test_what_the_user_said_stays(tmp_path):
    chosen = args(tmp_path, gradient_checkpointing_kwargs={"use_reentrant": False})
    choose_checkpointing_(chosen, tiny.build_model())
    assert chosen.gradient_checkpointing_kwargs == {"use_reentrant": False}
    off = args(tmp_path, gradient_checkpointing="false")
    choose_checkpointing_(off, tiny.build_model())
    assert not off.gradient_checkpointing_kwargs


def test_dropout_is_found_wherever_it_is():
    model = tiny.build_model()
    assert not has_dropout(model)
    model.model.layers[1].self_attn.attention_dropout = 0.1
    assert has_dropout(model)
    assert has_dropout(torch.nn.Sequential(torch.nn.Dropout(0.2)))
    assert not has_dropout(torch.nn.Sequential(torch.nn.Dropout(0.0)))
