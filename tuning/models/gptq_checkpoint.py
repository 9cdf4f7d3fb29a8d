"""Load a GPTQ checkpoint: transformers' model class, its linear layers replaced by those the files hold packed.

transformers loads such checkpoints through the package gptqmodel, which needs newer torch than is supported here and
a build of its own; what is stored needs neither.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from tuning.errors import ModelError
from tuning.logs import logger
from tuning.models.gptq import GPTQFormat, GPTQKernels, GPTQLinear

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["load_gptq", "make_dense_", "read_format"]

_log = logger(__name__)
_INDEX = "model.safetensors.index.json"


def read_format(name: str, config: PretrainedConfig) -> GPTQFormat:
    """Return how the weights of a checkpoint are stored; reads no weights.

    Args:
        name: Of the checkpoint, for messages.
        config: Its ``config.json``.

    Raises:
        ModelError: If it is no GPTQ checkpoint, or one of a kind that cannot be unpacked.
    """
    options = getattr(config, "quantization_config", None)
    if options is None:
        raise ModelError(
            f"--auto_gptq was asked for, but {name} is no GPTQ checkpoint: its config.json has no quantization_config; "
            "quantise it with scripts/quantize_gptq.py, or use --bitsandbytes nf4, which quantises at load"
        )
    try:
        return GPTQFormat.read(options if isinstance(options, Mapping) else options.to_dict())
    except ValueError as error:
        raise ModelError(
            f"--auto_gptq was asked for, but {name} {error}; give another GPTQ checkpoint, or drop --auto_gptq"
        ) from error


def load_gptq(
    name: str, config: PretrainedConfig, model_kwargs: Mapping[str, Any], *, kernels: GPTQKernels, device: torch.device
) -> PreTrainedModel:
    """Load a GPTQ checkpoint.

    Args:
        name: Folder or hub name.
        config: Its ``config.json``.
        model_kwargs: ``dtype``, ``attn_implementation``, ``trust_remote_code``, ``revision``.
        kernels: What computes with packed weights.
        device: Where to put the model.

    Raises:
        ModelError: If it is no GPTQ checkpoint, or its files are not complete.
    """
    form = read_format(name, config)
    folder = _find_folder(name, model_kwargs.get("revision"))
    files = _files(folder)
    dtype = model_kwargs.get("dtype", "auto")
    if not isinstance(dtype, torch.dtype):
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
    plain = copy.deepcopy(config)
    del plain.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            plain,
            dtype=dtype,
            attn_implementation=model_kwargs.get("attn_implementation"),
            trust_remote_code=model_kwargs.get("trust_remote_code", False),
        )
    model.name_or_path = name
    _replace_linears_(model, form, files, kernels=kernels, dtype=dtype, name=name)
    _fill_(model, folder, files, dtype=dtype, device=device, name=name)
    # what is no weight (rotary frequencies) was made on the CPU
    model.to(device)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def make_dense_(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace, in place, every packed layer of ``model`` by an ordinary one with the unpacked weight; count them."""
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, GPTQLinear)]
    for name, module in packed:
        dense = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
        dense.weight = nn.Parameter(module.unpacked(dtype).contiguous(), requires_grad=False)
        if module.bias is not None:
            dense.bias = nn.Parameter(module.bias.to(dtype), requires_grad=False)
        model.set_submodule(name, dense)
    return len(packed)


def _find_folder(name: str, revision: str | None) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise ModelError(f"The files of --model_name_or_path {name} cannot be had: {error}; give a folder") from error


def _files(folder: Path) -> dict[str, str]:
    """Return name of a tensor to the file it is in."""
    if (folder / _INDEX).is_file():
        return dict(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"--model_name_or_path {folder} has no .safetensors file, which --auto_gptq reads; convert the checkpoint, "
            "or give another one"
        )
    names: dict[str, str] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            names.update(dict.fromkeys(file.keys(), path.name))
    return names


def _replace_linears_(
    model: nn.Module,
    form: GPTQFormat,
    files: Mapping[str, str],
    *,
    kernels: GPTQKernels,
    dtype: torch.dtype,
    name: str,
) -> None:
    targets = [key.removesuffix(".qweight") for key in files if key.endswith(".qweight")]
    if not targets:
        raise ModelError(f"{name} says that it is a GPTQ checkpoint, but no weight in it is packed; give another one")
    linear = {target: module for target, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in targets:
        module = linear.get(target)
        if module is None:
            raise ModelError(
                f"{name} has a packed weight {target}, but {type(model).__name__} has no linear layer of that name; "
                "give a checkpoint whose files belong together"
            )
        reason = form.why_not(module.in_features, module.out_features)
        if reason:
            raise ModelError(f"{name} has a packed weight {target} whose {reason}; give another checkpoint")
        has_bias = module.bias is not None
        model.set_submodule(
            target,
            GPTQLinear(module.in_features, module.out_features, form, bias=has_bias, dtype=dtype, kernels=kernels),
        )


def _tensors(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file_name in sorted(set(files.values())):
        with safe_open(folder / file_name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                yield key, file.get_tensor(key)


def _fill_(
    model: PreTrainedModel,
    folder: Path,
    files: Mapping[str, str],
    *,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> None:
    """Put the tensors of the files into ``model``, in place, and refuse what is missing or does not fit."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules():
        for own in module._parameters:
            owners[f"{prefix}.{own}" if prefix else own] = (module, own)
    unused, misfits = [], []
    for key, tensor in _tensors(folder, files):
        owner = owners.get(key)
        current = None if owner is None else owner[0]._parameters[owner[1]]
        if owner is None or current is None:
            # writers give every packed layer a bias, of zeros where the model has none
            if not (key.endswith(".bias") and not tensor.any()):
                unused.append(key)
            continue
        if current.shape != tensor.shape:
            misfits.append(f"{key} is {list(tensor.shape)} and must be {list(current.shape)}")
            continue
        # scales stay as they are stored: a weight is rounded once, after the product
        of = dtype if tensor.is_floating_point() and owner[1] != "scales" else tensor.dtype
        owner[0]._parameters[owner[1]] = nn.Parameter(tensor.to(device, of), requires_grad=tensor.is_floating_point())
    for module in model.modules():
        if isinstance(module, GPTQLinear):
            _finish_(module, device)
    model.tie_weights()
    missing = [key for key, parameter in model.named_parameters() if parameter.is_meta]
    for what, found in (("has weights of other sizes than its config.json says:", misfits), ("lacks", missing)):
        if found:
            raise ModelError(
                f"The checkpoint {name} {what} {', '.join(found[:3])}{', ...' * (len(found) > 3)}; give a complete "
                "checkpoint whose files belong together"
            )
    if unused:
        _log.warning("%s has %d weights that %s does not use: %s", name, len(unused), type(model).__name__,
                     ", ".join(sorted(unused)[:3]))  # fmt: skip


def _finish_(module: GPTQLinear, device: torch.device) -> None:
    """Freeze a packed layer, in place; older files leave out the groups where they are contiguous."""
    if module.g_idx.is_meta and not module.form.desc_act:
        size = module.in_features if module.form.group_size == -1 else module.form.group_size
        groups = torch.arange(module.in_features, dtype=torch.int32, device=device) // size
        module.g_idx = nn.Parameter(groups, requires_grad=False)
    module.requires_grad_(False)
