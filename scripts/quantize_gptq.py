"""Quantise a plain checkpoint to a GPTQ one: 2, 4 or 8 bits, groups, act-order, symmetric or not.

Without calibration text every weight is rounded to nearest. With ``--calibration FILE`` (one text a line) the inputs
of every linear layer are gathered in one pass of the unquantised model, and the rounding error of a column is made up
for by the columns after it (Frantar et al. 2022, https://arxiv.org/abs/2210.17323). The head stays as it is.

    python scripts/quantize_gptq.py --model MODEL --output DIR --bits 4 --group_size 128
    python scripts/quantize_gptq.py --model MODEL --output DIR --calibration texts.txt --desc_act
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuning.models.gptq import GPTQFormat, quantize

_MAX_TOKENS = 2048


def find_linears(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of a model by name, without its head."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


@torch.no_grad()
def gather_grams(model: Any, tokenizer: Any, texts: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return ``X^T X`` of the inputs ``X`` of every linear layer over all texts."""
    grams: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in find_linears(model).items():

        def add(_module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            grams[name] = grams[name] + x.t() @ x if name in grams else x.t() @ x

        handles.append(module.register_forward_pre_hook(add))
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=_MAX_TOKENS)["input_ids"]
        if ids.numel():
            model(input_ids=ids.to(model.device))
    for handle in handles:
        handle.remove()
    return grams


def quantize_checkpoint(model: Any, form: GPTQFormat, output: Path, grams: dict[str, torch.Tensor]) -> int:
    """Write ``model`` quantised to ``output``; return how many layers were.

    Raises:
        ValueError: If a layer's width does not fill words.
    """
    state = dict(model.state_dict())
    if model.config.get_text_config().tie_word_embeddings:
        state.pop("lm_head.weight", None)
    linears = find_linears(model)
    for name, module in linears.items():
        reason = form.why_not(module.in_features, module.out_features)
        if reason:
            raise ValueError(f"{name} cannot be packed in {form.bits} bits: its {reason}")
        del state[f"{name}.weight"]
        packed = quantize(module.weight, form, grams.get(name))
        state.update({f"{name}.{part}": tensor for part, tensor in packed.items()})
    output.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in state.items()}, output / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    config = model.config.to_dict() | {"quantization_config": form.write()}
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    (output / "config.json").write_text(json.dumps(config, indent=2, default=str), encoding="utf-8")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(output)
    return len(linears)


def main() -> int:
    """Quantise one checkpoint; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name of a plain checkpoint")
    parser.add_argument("--output", required=True, type=Path, help="folder to write; must not exist")
    parser.add_argument("--bits", type=int, default=4, choices=[2, 4, 8])
    parser.add_argument("--group_size", type=int, default=128, help="input rows that share a scale; -1 is all")
    parser.add_argument("--desc_act", action="store_true", help="most active rows first; needs --calibration")
    parser.add_argument("--asymmetric", action="store_true", help="a zero of its own for every group")
    parser.add_argument("--format", default="gptq", choices=["gptq", "gptq_v2"], help="how zeros are stored")
    parser.add_argument("--calibration", type=Path, help="text file, one sample a line; default: round to nearest")
    options = parser.parse_args()
    if options.output.exists():
        print(f"--output {options.output} exists; name another folder", file=sys.stderr)
        return 1
    if options.desc_act and options.calibration is None:
        print("--desc_act orders rows by their activations, which need --calibration FILE; add it", file=sys.stderr)
        return 1
    form = GPTQFormat(
        bits=options.bits, group_size=options.group_size, desc_act=options.desc_act, sym=not options.asymmetric,
        zero_offset=1 if options.format == "gptq" else 0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = options.calibration.read_text(encoding="utf-8").splitlines() if options.calibration else []
    grams = gather_grams(model, tokenizer, texts) if texts else {}
    try:
        count = quantize_checkpoint(model, form, options.output, grams)
    except ValueError as error:
        shutil.rmtree(options.output, ignore_errors=True)
        print(f"{options.model}: {error}", file=sys.stderr)
        return 1
    tokenizer.save_pretrained(options.output)
    print(f"{count} layers of {options.model} are in {options.output}, {options.bits} bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
