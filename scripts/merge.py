"""Merge a LoRA adapter into its base and write an ordinary checkpoint, with logits compared before and after.

The base is the one that the adapter names, or ``--base``. A GPTQ base is unpacked; for an adapter that was trained with
``--bitsandbytes`` name the type, so that it is merged into the very weights it was trained on. Tokens that the run
added, and embedding and head that it trained, come along. What was written is loaded again, and its logits must be
those of base and adapter side by side, or nothing is kept.

    python scripts/merge.py --adapter OUT --output MERGED
    python scripts/merge.py --adapter OUT --output MERGED --bitsandbytes nf4 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tuning.errors import ModelError
from tuning.kernels.gptq import gptq_weight
from tuning.kernels.lora import linear_of
from tuning.models.gptq import GPTQKernels
from tuning.models.gptq_checkpoint import load_gptq, make_dense_
from tuning.models.loader import resize_embeddings_

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# the norm of the difference over the norm of the logits: a merged weight is rounded once more than the two beside
# each other, in every layer
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class MergeError(Exception):
    """A merge that cannot be done; the text is for the user."""


def load_base(name: str, dtype: torch.dtype, quant_type: str | None, device: torch.device) -> Any:
    """Load the base with dense weights: those that the adapter was trained on."""
    config = AutoConfig.from_pretrained(name)
    options = getattr(config, "quantization_config", None)
    if options is not None and quant_type is not None:
        raise MergeError(f"{name} is quantised already, so --bitsandbytes {quant_type} cannot be; drop it")
    if options is not None:
        kernels = GPTQKernels(unpack=gptq_weight, product=linear_of)
        model = load_gptq(name, config, {"dtype": dtype}, kernels=kernels, device=device)
        make_dense_(model, dtype)
        return model
    if quant_type is None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, quantization_config=quantised, device_map={"": device}
    )
    return model.dequantize(dtype=dtype)


def count_rows(adapter: Path) -> int:
    """Return the rows of the embedding or head that the adapter holds; 0 if it holds neither."""
    path = adapter / "adapter_model.safetensors"
    if not path.is_file():
        return 0
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if "lora_" not in key and key.endswith(".weight")]  # noqa: SIM118
        shapes = [file.get_slice(key).get_shape() for key in names]
    return max((shape[0] for shape in shapes if len(shape) == 2), default=0)


@torch.no_grad()
def probe(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return logits in fp32 on the CPU."""
    return model.eval()(input_ids=ids.to(model.device)).logits.float().cpu()


def probe_ids(tokenizer: Any) -> torch.Tensor:
    """Return two rows that go through the vocabulary, its last tokens included."""
    last = len(tokenizer) - 1
    spread = torch.linspace(0, last, 30).long()
    return torch.stack([torch.cat([spread, torch.tensor([last - 1, last])]), torch.arange(last - 31, last + 1) % last])


def merge(options: argparse.Namespace) -> str:
    """Merge, write, load again and compare; return a sentence for the user."""
    settings = peft.PeftConfig.from_pretrained(str(options.adapter))
    name = options.base or settings.base_model_name_or_path
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = _DTYPES[options.dtype]
    tokenizer = AutoTokenizer.from_pretrained(str(options.adapter))
    base = load_base(name, dtype, options.bitsandbytes, device)
    rows = max(len(tokenizer), count_rows(options.adapter))
    resize_embeddings_(base, rows)
    model = peft.PeftModel.from_pretrained(base, str(options.adapter))
    ids = probe_ids(tokenizer)
    before = probe(model, ids)
    merged = model.merge_and_unload(safe_merge=True)
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    is_tied = head is not None and torch.equal(head.weight, embedding.weight)
    if merged.config.get_text_config().tie_word_embeddings and not is_tied:
        # one of the two was trained alone; a tied checkpoint would lose it
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = False
    merged.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    again = AutoModelForCausalLM.from_pretrained(options.output, dtype=dtype).to(device)
    after = probe(again, ids)
    error = float((after - before).norm() / before.norm())
    if not error <= _ALLOWED[dtype]:
        shutil.rmtree(options.output)
        raise MergeError(
            f"the merged model's logits differ from those of base and adapter by {error:.1e} of their size, more than "
            f"{_ALLOWED[dtype]:.0e}; nothing was written. Is {name} the base that the adapter was trained on?"
        )
    return f"{options.adapter} is merged into {name} in {options.output}; logits differ by {error:.1e} of their size"


def main(arguments: list[str] | None = None) -> int:
    """Merge one adapter; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, type=Path, help="folder of the adapter and its tokenizer")
    parser.add_argument("--output", required=True, type=Path, help="folder to write; must not exist")
    parser.add_argument("--base", help="folder or hub name; default: the one that the adapter names")
    parser.add_argument("--bitsandbytes", choices=["nf4", "fp4"], help="type that the base was quantised to at load")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="float32", help="of the merged weights")
    options = parser.parse_args(arguments)
    if options.output.exists():
        print(f"--output {options.output} exists; name another folder", file=sys.stderr)
        return 1
    if not (options.adapter / "adapter_config.json").is_file():
        print(f"--adapter {options.adapter} holds no adapter; name the folder a LoRA run wrote", file=sys.stderr)
        return 1
    try:
        print(merge(options))
    except (MergeError, ModelError, OSError) as error:
        print(f"{options.adapter} cannot be merged: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
