from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.quantize_gptq import quantize_checkpoint
from tests.tiny import build_model
from tuning.errors import ModelError
from tuning.kernels import reference
from tuning.kernels.lora import linear_of
from tuning.models.gptq import GPTQFormat, GPTQKernels, GPTQLinear
from tuning.models.gptq_checkpoint import load_gptq, make_dense_, read_format

KERNELS = GPTQKernels(unpack=reference.gptq_weight, product=linear_of)
IDS = torch.tensor([[1, 20, 30, 40, 2]])


def write(folder, form=None, **options):
    """Write a quantised tiny model; return the folder's name."""
    quantize_checkpoint(build_model(**options), form or GPTQFormat(group_size=16), folder, {})
    return str(folder)


def load(name, **kwargs):
    config = AutoConfig.from_pretrained(name)
    kwargs = {"dtype": torch.float32, "attn_implementation": "eager", **kwargs}
    return load_gptq(name, config, kwargs, kernels=KERNELS, device=torch.device("cpu"))


def change(folder, edit):
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(name):
    with pytest.raises(ModelError) as error:
        load(name)
    return str(error.value)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        GPTQFormat(bits=8, group_size=16),
        GPTQFormat(bits=8, group_size=-1, sym=False, zero_offset=0),
    ],
)
def test_eight_bits_are_close_to_the_plain_model(tmp_path, is_tied, form):
    model = load(write(tmp_path, form, is_tied=is_tied))
    assert sum(isinstance(part, GPTQLinear) for part in model.modules()) == 14
    assert isinstance(model.lm_head, torch.nn.Linear)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    expected = logits(build_model(is_tied=is_tied))
    assert float((logits(model) - expected).norm() / expected.norm()) < 0.1


def test_the_dense_model_computes_the_same_and_saves_plainly(tmp_path):
    model = load(write(tmp_path / "q"))
    packed = logits(model)
    assert make_dense_(model, torch.float32) == 14
    assert torch.allclose(logits(model), packed, atol=1e-4)
    model.save_pretrained(tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", attn_implementation="eager")
    assert torch.allclose(logits(again), packed, atol=1e-4)


def test_nothing_packed_trains_and_the_rest_has_the_dtype(tmp_path):
    model = load(write(tmp_path), dtype=torch.bfloat16)
    names = dict(model.named_parameters())
    assert not any(p.requires_grad for name, p in names.items() if "proj" in name)
    assert {p.dtype for name, p in names.items() if not name.endswith(("qweight", "qzeros", "g_idx", "scales"))} == {
        torch.bfloat16
    }
    assert {p.dtype for name, p in names.items() if name.endswith("scales")} == {torch.float16}  # as they are stored
    assert model.config.name_or_path == str(tmp_path)
    assert not hasattr(model.config, "quantization_config")
    auto = load(str(tmp_path), dtype="auto")
    assert auto.lm_head.weight.dtype == torch.float32  # as the checkpoint says


def test_groups_may_be_left_out_where_they_are_in_order(tmp_path):
    name = write(tmp_path)
    expected = logits(load(name))
    change(tmp_path, lambda state: [state.pop(key) for key in list(state) if key.endswith("g_idx")])
    assert torch.equal(logits(load(name)), expected)


def test_a_bias_of_zeros_that_the_model_does_not_have(tmp_path, caplog):
    name = write(tmp_path)
    key = "model.layers.0.mlp.up_proj.bias"
    change(tmp_path, lambda state: state.update({key: torch.zeros(64)}))
    load(name)
    assert caplog.messages == []
    change(tmp_path, lambda state: state.update({key: torch.ones(64)}))
    load(name)
    assert caplog.messages == [f"{name} has 1 weights that LlamaForCausalLM does not use: {key}"]


def test_a_plain_checkpoint_is_told_apart(tmp_path):
    build_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        read_format(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    assert str(error.value) == (
        f"--auto_gptq was asked for, but {tmp_path} is no GPTQ checkpoint: its config.json has no "
        "quantization_config; quantise it with scripts/quantize_gptq.py, or use --bitsandbytes nf4, which quantises "
        "at load"
    )


def test_another_kind_of_quantisation_is_told_apart(tmp_path):
    name = write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "marlin"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refusal(name) == (
        f"--auto_gptq was asked for, but {name} is packed as marlin; gptq and gptq_v2 can be unpacked; give another "
        "GPTQ checkpoint, or drop --auto_gptq"
    )


def test_files_that_do_not_belong_together(tmp_path):
    name = write(tmp_path)
    key = "model.layers.1.mlp.up_proj"
    change(tmp_path, lambda state: state.pop(f"{key}.scales"))
    assert refusal(name) == (
        f"The checkpoint {name} lacks {key}.scales; give a complete checkpoint whose files belong together"
    )
    change(tmp_path, lambda state: state.update({f"{key}.scales": torch.ones(3, 64)}))
    assert refusal(name) == (
        f"The checkpoint {name} has weights of other sizes than its config.json says: {key}.scales is [3, 64] and must "
        "be [2, 64]; give a complete checkpoint whose files belong together"
    )
    change(tmp_path, lambda state: state.update({"model.x.qweight": torch.ones(3, 64)}))
    assert refusal(name) == (
        f"{name} has a packed weight model.x, but LlamaForCausalLM has no linear layer of that name; give a checkpoint "
        "whose files belong together"
    )
    change(tmp_path, lambda state: [state.pop(k) for k in list(state) if k.endswith("qweight")])
    assert refusal(name) == (
        f"{name} says that it is a GPTQ checkpoint, but no weight in it is packed; give another one"
    )
    (tmp_path / "model.safetensors").unlink()
    assert refusal(name) == (
        f"--model_name_or_path {name} has no .safetensors file, which --auto_gptq reads; convert the checkpoint, or "
        "give another one"
    )
