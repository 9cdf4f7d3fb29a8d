"""Tiny random models of every family that padding-free training is proven for, in fp32, made from their configs.

Sizes are small but keep what makes a family special: fewer key/value heads than heads, a window shorter than the
samples, capped scores, sinks, experts, state spaces, learned positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 67
WINDOW = 4

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model class.

    Attributes:
        model_type: As in config.json.
        options: Config values beside the small sizes.
        special: What this family tests.
    """

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    special: str = ""


FAMILIES: dict[str, Family] = {
    "llama": Family(model_type="llama", special="grouped heads"),
    "mistral": Family(model_type="mistral", options={"sliding_window": WINDOW}, special="window in every layer"),
    "qwen2": Family(model_type="qwen2", special="biases"),
    "qwen3": Family(model_type="qwen3", options={"head_dim": 8}, special="normed queries and keys"),
    "gemma2": Family(
        model_type="gemma2",
        options={"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        special="capped scores, every other layer windowed",
    ),
    "gemma3_text": Family(
        model_type="gemma3_text",
        options={
            "head_dim": 8,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        special="windowed and full layers with rotary embeddings of their own",
    ),
    "phi3": Family(model_type="phi3", options={"sliding_window": WINDOW}, special="fused projections"),
    "granite": Family(
        model_type="granite",
        options={"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5},
        special="multipliers",
    ),
    "granitemoe": Family(model_type="granitemoe", options={**_EXPERTS, "attention_multiplier": 0.3}, special="experts"),
    "granitemoeshared": Family(
        model_type="granitemoeshared",
        options={**_EXPERTS, "shared_intermediate_size": 16, "attention_multiplier": 0.3},
        special="shared experts",
    ),
    "granitemoehybrid": Family(
        model_type="granitemoehybrid",
        options={
            **_EXPERTS,
            "num_hidden_layers": 3,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_expand": 2,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 4,
            "position_embedding_type": "rope",
        },
        special="state spaces",
    ),
    "mixtral": Family(model_type="mixtral", options={**_EXPERTS, "sliding_window": WINDOW}, special="experts, window"),
    "qwen3_moe": Family(
        model_type="qwen3_moe",
        options={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        special="experts, normed queries and keys",
    ),
    "gpt_oss": Family(
        model_type="gpt_oss", options={**_EXPERTS, "head_dim": 8, "sliding_window": WINDOW}, special="sinks"
    ),
    "olmo2": Family(model_type="olmo2", special="norms after the layers"),
    "smollm3": Family(model_type="smollm3", special="layers without rotary embeddings"),
    "gpt_bigcode": Family(
        model_type="gpt_bigcode",
        options={"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48},
        special="learned absolute positions, one key/value head",
    ),
}


def build_config(name: str, **options: Any) -> Any:
    """Return the config of a family; ``options`` win over its own."""
    family = FAMILIES[name]
    small = (
        _SMALL
        if family.model_type != "gpt_bigcode"
        else {k: v for k, v in _SMALL.items() if "_id" in k or k == "vocab_size"}
    )
    return AutoConfig.for_model(family.model_type, **{**small, **family.options, **options})


def build_model(name: str, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Return a family's tiny model in eval mode without dropout, each parameter drawn anew.

    Fresh models hold ones and zeros where a fault would not show (norms, biases, sinks), so every weight gets noise.
    Capped scores need the eager attention: torch's own leaves the cap out, and transformers 5.17 takes it by default.
    """
    torch.manual_seed(seed)
    config = build_config(name, **options)
    for key in ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "resid_dropout"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    eager = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **eager)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.config.use_cache = False
    return model.eval()
