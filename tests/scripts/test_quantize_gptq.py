from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import quantize_gptq
from tests.tiny import build_model, build_tokenizer, save


@pytest.fixture
def run(monkeypatch, tmp_path):
    model = save(tmp_path / "model")

    def call(*words, model=model):
        monkeypatch.setattr(
            sys, "argv", ["quantize_gptq.py", "--model", model, "--output", str(tmp_path / "q"), *words]
        )
        return quantize_gptq.main()

    return call


def test_a_checkpoint_is_written_with_its_tokenizer(run, tmp_path, capsys):
    assert run("--group_size", "16", "--asymmetric", "--format", "gptq_v2") == 0
    assert capsys.readouterr().out == (f"14 layers of {tmp_path / 'model'} are in {tmp_path / 'q'}, 4 bits\n")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False,
        "checkpoint_format": "gptq_v2", "lm_head": False,
    }  # fmt: skip
    assert config["dtype"] == "float32"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "q")) == 266


def test_calibration_gathers_the_inputs_of_every_layer(tmp_path):
    model = build_model()
    seen = []
    layer = model.model.layers[0].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].reshape(-1, 64)))
    texts = ["some text", "", "more of it"]
    grams = quantize_gptq.gather_grams(model, build_tokenizer(), texts)
    handle.remove()
    x = torch.cat(seen)
    assert len(grams) == 14
    assert torch.allclose(grams["model.layers.0.mlp.down_proj"], x.t() @ x, rtol=1e-4, atol=1e-4)
    assert not model.model.layers[0].mlp.down_proj._forward_pre_hooks


def test_act_order_with_calibration(run, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("some text\nmore of it\n", encoding="utf-8")
    assert run("--group_size", "16", "--desc_act", "--calibration", str(texts)) == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["desc_act"] is True


def test_refusals_write_nothing(run, tmp_path, capsys):
    assert run("--desc_act") == 1
    assert capsys.readouterr().err == (
        "--desc_act orders rows by their activations, which need --calibration FILE; add it\n"
    )
    odd = save(tmp_path / "odd", model=build_model(hidden_size=40))
    assert run("--bits", "2", model=odd) == 1
    # after the progress bar of loading
    assert capsys.readouterr().err.endswith(
        f"{odd}: model.layers.0.self_attn.q_proj cannot be packed in 2 bits: its width 40 is no multiple of 16\n"
    )
    assert not (tmp_path / "q").exists()
    (tmp_path / "q").mkdir()
    assert run() == 1
    assert capsys.readouterr().err == f"--output {tmp_path / 'q'} exists; name another folder\n"


def test_the_plain_model_is_left_as_it_is(run, tmp_path):
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert run("--group_size", "16") == 0
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
