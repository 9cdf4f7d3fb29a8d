"""``--bitsandbytes`` and ``--auto_gptq``: LoRA over a base whose weights are stored in 4 bits (or 2 or 8, GPTQ).

``--bitsandbytes`` (``--bnb_qlora``) quantises an ordinary checkpoint while it is loaded, through transformers and the
package bitsandbytes. ``--auto_gptq`` loads a checkpoint that is quantised, with a layer and a kernel of our own
(``tuning.models.gptq``, ``tuning.kernels.gptq``). Both unpack a weight for one product at a time.

Adapters are kept in fp32 as over any other base; TRL rounds them to bfloat16 where a base has 4 bits, and AdamW's
steps of a learning rate of 1e-4 are lost in the rounding of values near 0.05.

docs/adr/040-quantised-bases-and-fused-lora.md has the alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tuning.acceleration.plugin import AccelerationPlugin, Facts, Patch
from tuning.config.acceleration_configs import AutoGPTQLoraConfig, BNBQLoraConfig
from tuning.errors import PluginError
from tuning.models import loader
from tuning.models.gptq import GPTQKernels
from tuning.models.gptq_checkpoint import load_gptq, read_format
from tuning.models.lora_layers import why_not_sharded

__all__ = ["AutoGPTQPlugin", "BNBQLoraPlugin"]

# what --auto_gptq passes on of the keyword arguments of from_pretrained
_GPTQ_KWARGS = frozenset({"attn_implementation", "dtype", "revision", "trust_remote_code"})
# of peft's init_lora_weights, those that do not read the base weight
_STARTS = (True, False, "gaussian")


class BNBQLoraPlugin(AccelerationPlugin[BNBQLoraConfig]):
    """Quantises the base to 4 bits at load; stable."""

    name = "bnb_qlora"
    config_type = BNBQLoraConfig
    packages = ("bitsandbytes",)

    def check(self, facts: Facts) -> None:
        """Refuse what is no LoRA run over an ordinary checkpoint.

        Raises:
            PluginError: With the reason.
        """
        _check_lora("--bitsandbytes", facts)
        _check_sharding("--bitsandbytes", facts)
        if "gguf_file" in facts.model_kwargs:
            raise PluginError(
                "--bitsandbytes quantises an ordinary checkpoint, but the model is a GGUF file; give a folder with "
                "safetensors, or drop --bitsandbytes"
            )
        method = _quant_method(facts.model_config)
        if method is not None:
            advice = "use --auto_gptq triton_v2" if method == "gptq" else "give the checkpoint it was made from"
            raise PluginError(
                f"--bitsandbytes quantises at load, but {facts.model_name_or_path} is quantised already, by {method}; "
                f"{advice}"
            )

    def load_model(self, facts: Facts) -> nn.Module:
        """Load and quantise; parameters beside the linear layers keep the dtype of the run."""
        from transformers import BitsAndBytesConfig  # noqa: PLC0415 - seconds; other runs do not need it

        dtype = facts.model_kwargs.get("dtype")
        compute = dtype if isinstance(dtype, torch.dtype) else _default_dtype(facts)
        options = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.config.quant_type,
            bnb_4bit_compute_dtype=compute,
            # scales of 8 bits: 0.37 bits a weight less, at no cost that a step of training shows (arXiv:2305.14314)
            bnb_4bit_use_double_quant=True,
        )
        kwargs = {**facts.model_kwargs, "dtype": compute, "quantization_config": options}
        kwargs.setdefault("device_map", {"": facts.train_args.device})
        model = loader.load_model(loader.Checkpoint(name=facts.model_name_or_path, kwargs={}), kwargs)
        _keep_packing_(model)
        if not self.config.no_peft_model:
            _prepare_(model)
        return model

    def patches(self, model: nn.Module, facts: Facts) -> Sequence[Patch]:
        """Hide from the trainer that the base has 4 bits, since it would round the adapters."""
        return [Patch(name="bnb_qlora.adapters_keep_their_dtype", target="", apply=_hidden_4bit)]


class AutoGPTQPlugin(AccelerationPlugin[AutoGPTQLoraConfig]):
    """Loads a GPTQ checkpoint as a frozen base; stable."""

    name = "auto_gptq"
    config_type = AutoGPTQLoraConfig

    def check(self, facts: Facts) -> None:
        """Refuse what is no LoRA run over a GPTQ checkpoint that can be unpacked.

        Raises:
            PluginError: With the reason.
            ModelError: If the checkpoint is no GPTQ one, or of another kind.
        """
        if not self.config.from_quantized:
            raise PluginError(
                "--auto_gptq from_quantized=false would quantise the model itself, which is not supported; name a "
                "GPTQ checkpoint with --model_name_or_path"
            )
        _check_lora("--auto_gptq", facts)
        _check_sharding("--auto_gptq", facts)
        others = sorted(set(facts.model_kwargs) - _GPTQ_KWARGS)
        if others:
            raise PluginError(
                f"--auto_gptq loads the checkpoint itself and takes no {', '.join(others)}; drop it from "
                "model_init_kwargs, or drop --auto_gptq"
            )
        read_format(facts.model_name_or_path, facts.model_config)

    def load_model(self, facts: Facts) -> nn.Module:
        """Load the packed weights onto the device.

        Raises:
            ModelError: If the files are not complete.
        """
        return load_gptq(
            facts.model_name_or_path,
            facts.model_config,
            facts.model_kwargs,
            kernels=_kernels(),
            device=facts.train_args.device,
        )


def _kernels() -> GPTQKernels:
    from tuning.kernels.gptq import gptq_weight  # noqa: PLC0415 - needs triton, which not every torch brings
    from tuning.kernels.lora import linear_of  # noqa: PLC0415 - as above

    return GPTQKernels(unpack=gptq_weight, product=linear_of)


def _check_lora(flag: str, facts: Facts) -> None:
    kind = getattr(getattr(facts.peft_config, "peft_type", None), "value", None)
    if kind != "LORA":
        raise PluginError(
            f"{flag} loads a quantised base, which cannot be trained itself, and this run trains no LoRA adapters; add "
            f"--peft_method lora or drop {flag}"
        )
    if flag != "--auto_gptq":
        return
    if getattr(facts.peft_config, "use_dora", False):
        raise PluginError("--use_dora reads the base weight, which --auto_gptq keeps packed; drop one of them")
    start = getattr(facts.peft_config, "init_lora_weights", True)
    if start not in _STARTS:
        raise PluginError(
            f"init_lora_weights {start} starts adapters from the base weight, which --auto_gptq keeps packed; use "
            "true or gaussian"
        )


def _check_sharding(flag: str, facts: Facts) -> None:
    reason = why_not_sharded(facts.train_args)
    if reason:
        raise PluginError(
            f"{flag} keeps packed weights, which are sharded by whole layers or not at all, but {reason}; use --fsdp "
            f"with version 2 and TRANSFORMER_BASED_WRAP, or drop {flag}"
        )


def _quant_method(model_config: Any) -> str | None:  # noqa: ANN401 - any model's configuration
    options = getattr(model_config, "quantization_config", None)
    if options is None:
        return None
    options = options if isinstance(options, dict) else options.to_dict()
    return str(options.get("quant_method", "an unknown method"))


def _default_dtype(facts: Facts) -> torch.dtype:
    """Return the dtype for ``--torch_dtype auto``: that of the checkpoint, where it says so."""
    dtype = getattr(facts.model_config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _keep_packing_(model: nn.Module) -> None:
    """Stop, in place, bitsandbytes from packing weights anew in the first evaluation on some CPUs.

    With AVX-512 for bfloat16 it packs them for its inference product and leaves them so, and the backward of later
    steps takes the bytes for the old packing: gradients are noise, and nothing says so.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False


def _prepare_(model: nn.Module) -> None:
    """Freeze the base, in place, and where it is fp16 keep what is not quantised in fp32.

    peft's own preparation also turns bfloat16 into fp32, which has the range already: embedding and head then take
    twice the memory, and the head computes without tensor cores.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
        if parameter.dtype == torch.float16:
            parameter.data = parameter.data.to(torch.float32)


@contextmanager
def _hidden_4bit(model: nn.Module) -> Iterator[None]:
    # peft has wrapped the model by now and forwards what it does not find on itself
    model.__dict__["is_loaded_in_4bit"] = False
    try:
        yield
    finally:
        del model.__dict__["is_loaded_in_4bit"]
