"""Adapters merged into their bases; the faults were reported as https://github.com/huggingface/peft/issues/1457,
https://github.com/huggingface/peft/issues/1300 (added tokens).
"""

from __future__ import annotations

import importlib.util

import peft
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import merge, quantize_gptq
from tests.tiny import build_model, build_tokenizer, save
from tuning.config.peft_config import LoraConfig
from tuning.models import adapters
from tuning.models.gptq import GPTQFormat
from tuning.models.loader import resize_embeddings_

pytestmark = [
    # what we want; https://github.com/huggingface/peft/issues/1300
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]
has_bnb = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the package bitsandbytes is not installed"
)


def write_adapter(folder, base, name, *, num_added=0, modules_to_save=None):
    """Write an adapter with random matrices over ``base``, and return the logits of both."""
    tokenizer = build_tokenizer()
    added = tuple(f"<new{n}>" for n in range(num_added))
    tokenizer.add_special_tokens({"extra_special_tokens": list(added)})
    resize_embeddings_(base, len(tokenizer))
    options = adapters.build_peft_config(
        LoraConfig(r=4, modules_to_save=modules_to_save), tokenizer_name="none", has_new_tokens=bool(added)
    )
    model = adapters.wrap(base, options)
    model.peft_config["default"].base_model_name_or_path = name
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return logits(model, len(tokenizer))


@torch.no_grad()
def logits(model, num_tokens=266):
    ids = torch.tensor([[1, num_tokens - 1, num_tokens - 2, 20, 2]])
    return model.eval()(input_ids=ids).logits


def run(tmp_path, *words):
    return merge.main(["--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "merged"), *words])


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("num_added", "rows"), [(0, 272), (2, 272), (10, 276)])
def test_a_merged_model_gives_the_logits_of_base_and_adapter(tmp_path, capsys, is_tied, num_added, rows):
    base = save(tmp_path / "base", model=build_model(is_tied=is_tied))
    expected = write_adapter(
        tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base), base, num_added=num_added
    )
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'adapter'} is merged into {base} in {tmp_path / 'merged'};")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(tokenizer) == 266 + num_added
    assert merged.get_input_embeddings().weight.shape[0] == rows
    torch.testing.assert_close(logits(merged, 266 + num_added), expected, rtol=0, atol=2e-4)
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == is_tied
    # the base alone gives something else, so the comparison can fail
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert (logits(plain)[..., :266] - expected[..., :266]).abs().max() > 0.1


def test_an_ordinary_checkpoint_is_written(tmp_path):
    base = save(tmp_path / "base")
    write_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base), base)
    assert run(tmp_path, "--dtype", "bfloat16") == 0
    with safe_open(tmp_path / "merged" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
    assert names == set(build_model().state_dict())


def test_a_gptq_base_is_unpacked(tmp_path):
    plain = build_model()
    quantize_gptq.quantize_checkpoint(plain, GPTQFormat(group_size=16), tmp_path / "base", {})
    name = str(tmp_path / "base")
    dense = merge.load_base(name, torch.float32, None, torch.device("cpu"))
    expected = write_adapter(tmp_path / "adapter", dense, name)
    assert run(tmp_path) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=2e-4)
    assert not hasattr(merged.config, "quantization_config")
    # merged into the weights that were trained on, not into those they were made from
    other = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert (logits(other) - expected).abs().max() > 0.1


@has_bnb
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_a_base_of_four_bits_is_unpacked(tmp_path, quant_type):
    base = save(tmp_path / "base", model=build_model(hidden_size=64))
    dense = merge.load_base(base, torch.float32, quant_type, torch.device("cpu"))
    assert type(dense.model.layers[0].mlp.up_proj) is torch.nn.Linear
    expected = write_adapter(tmp_path / "adapter", dense, base)
    assert run(tmp_path, "--bitsandbytes", quant_type) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=2e-4)
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert (logits(plain) - expected).abs().max() > 0.1


def test_a_merge_that_changes_logits_keeps_nothing(tmp_path, capsys, monkeypatch):
    base = save(tmp_path / "base")
    write_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base), base)
    monkeypatch.setattr(peft.PeftModel, "merge_and_unload", lambda self, **kwargs: self.unload(), raising=False)
    assert run(tmp_path) == 1
    message = capsys.readouterr().err
    assert (
        f"{tmp_path / 'adapter'} cannot be merged: the merged model's logits differ from those of base and adapter by "
    ) in message
    assert message.endswith(
        f" of their size, more than 1e-04; nothing was written. Is {base} the base that the adapter was trained on?\n"
    )
    assert not (tmp_path / "merged").exists()


def test_refusals(tmp_path, capsys):
    (tmp_path / "adapter").mkdir()
    assert run(tmp_path) == 1
    assert capsys.readouterr().err == (
        f"--adapter {tmp_path / 'adapter'} holds no adapter; name the folder a LoRA run wrote\n"
    )
    (tmp_path / "merged").mkdir()
    assert run(tmp_path) == 1
    assert capsys.readouterr().err == f"--output {tmp_path / 'merged'} exists; name another folder\n"


def test_a_quantised_base_is_not_quantised_again(tmp_path, capsys):
    quantize_gptq.quantize_checkpoint(build_model(), GPTQFormat(group_size=16), tmp_path / "base", {})
    name = str(tmp_path / "base")
    write_adapter(tmp_path / "adapter", build_model(), name)
    assert run(tmp_path, "--bitsandbytes", "nf4") == 1
    assert capsys.readouterr().err.endswith(
        f"{tmp_path / 'adapter'} cannot be merged: {name} is quantised already, so --bitsandbytes nf4 cannot be; drop "
        "it\n"
    )
