"""LoRA over dense, 4-bit and GPTQ bases: TRL with peft, ours, and ours fused, with equal gradients first.

Every variant builds the same random base and the same random adapters, shows that loss and adapter gradients of one
batch without dropout are those of the first variant over that base, and then trains on the same rows in the same
order. Windows of steps are timed as in ``padding_free.py``. A variant with other gradients is reported as wrong, and
no speed is printed for it. Batches of 44 rows hold 12,000 tokens in the mean.

    python scripts/bench/lora.py --shape tiny
    python scripts/bench/lora.py --shape mistral-7b --batch 8 44 --variants trl-padded trl-padding_free lora fused
    python scripts/bench/lora.py --shape mistral-7b --batch 30 --variants fused trl-qlora qlora qlora-fused gptq-fused
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import trl
from _bench import Recorder
from datasets import Dataset
from padding_free import SHAPES, Windows, build_model, build_rows, build_tokenizer, read_lengths
from peft import LoraConfig, get_peft_model
from torch import nn

from tuning.acceleration.framework import AccelerationFramework
from tuning.acceleration.patching import applied_patches
from tuning.acceleration.plugin import Facts
from tuning.acceleration.plugins import BUILTIN
from tuning.config.acceleration_configs import FastKernelsConfig, FusedLoraConfig, PaddingFree
from tuning.data.collators import PaddedCollator
from tuning.kernels.gptq import gptq_weight
from tuning.kernels.lora import linear_of
from tuning.models.gptq import GPTQFormat, GPTQKernels, GPTQLinear
from tuning.trainers import arguments
from tuning.trainers.fit import restored
from tuning.trainers.sft import SFTTrainer

# loss, and the norm of the gradients' difference over their norm
_ALLOWED = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (2e-2, 5e-2)}


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        trainer: ``trl`` or ``ours``.
        base: ``dense``, ``nf4`` or ``gptq``.
        padding_free: Whether no padding is computed.
        fused: Whether LoRA layers are fused; fast kernels are on in ours anyway.
        autocast: Mixed precision, as both trainers have it by default.
    """

    trainer: str
    base: str = "dense"
    padding_free: bool = True
    fused: bool = False
    autocast: bool = True


VARIANTS = {
    "trl-padded": Variant("trl", padding_free=False),
    "trl-padding_free": Variant("trl"),
    "trl-padding_free-no_autocast": Variant("trl", autocast=False),
    "lora": Variant("ours"),
    "fused": Variant("ours", fused=True),
    "trl-qlora": Variant("trl", base="nf4"),
    "qlora": Variant("ours", base="nf4"),
    "qlora-fused": Variant("ours", base="nf4", fused=True),
    "gptq": Variant("ours", base="gptq"),
    "gptq-fused": Variant("ours", base="gptq", fused=True),
}


def quantise_(model: Any, base: str, dtype: torch.dtype) -> None:
    """Replace the linear layers of ``model``, in place, one at a time: by nf4, or by random packed integers."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or module is head:
            continue
        if base == "nf4":
            import bitsandbytes as bnb

            new: Any = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=dtype, quant_type="nf4",
                device="meta",
            )  # fmt: skip
            weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", module=new)
            new.weight = weight.to(module.weight.device)
            new.support_avx512bf16_for_cpu = False  # or the first evaluation on the CPU spoils the packing
            model.is_loaded_in_4bit = True
        else:
            kernels = GPTQKernels(unpack=gptq_weight, product=linear_of)
            new = GPTQLinear(
                module.in_features, module.out_features, GPTQFormat(), bias=False, dtype=dtype, kernels=kernels,
                device=module.weight.device,
            )  # fmt: skip
            for packed in (new.qweight, new.qzeros):
                packed.data.random_(-(2**31), 2**31 - 1)
            new.scales.data.fill_(0.003)  # 15 steps of it are four times 0.02 / sqrt(2), the spread of a fresh weight
            new.g_idx.data.copy_(torch.arange(module.in_features) // new.form.group_size)
        model.set_submodule(name, new)


def build(options: argparse.Namespace, variant: Variant, dtype: torch.dtype, device: str) -> Any:
    """Return the model of a variant with random adapters, the same for every variant over one base."""
    model = build_model(options.shape, dtype, device)
    if variant.base != "dense":
        quantise_(model, variant.base, dtype)
    config = LoraConfig(
        r=options.r, lora_alpha=2 * options.r, lora_dropout=options.dropout, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def gradients(model: Any, rows: Dataset, dtype: torch.dtype, device: str) -> tuple[float, torch.Tensor]:
    """Return loss and all adapter gradients of the first row, without dropout."""
    ids = torch.tensor([rows[0]["input_ids"]], device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype != torch.float32):
        logits = model.eval()(input_ids=ids).logits
    loss = nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    model.train()
    return float(loss.detach()), torch.cat([grad.flatten().float() for grad in grads])


@contextlib.contextmanager
def build_trainer(
    variant: Variant, model: Any, rows: Dataset, values: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[Any, tuple[float, torch.Tensor]]]:
    """Yield the trainer of a variant, and loss and gradients of the patched model before TRL rounds its adapters.

    What was changed on the model is undone afterwards.
    """
    tokenizer = build_tokenizer(model.config.vocab_size)
    # TRL leaves attention to flash-attn; here its flattened batches get the same attention as ours
    flags: dict[str, Any] = {"padding_free": PaddingFree()} if variant.padding_free else {}
    if variant.trainer == "trl":
        args: Any = trl.SFTConfig(
            **values, padding_free=variant.padding_free, max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
    else:
        args = arguments.build(values)
        flags["fast_kernels"] = FastKernelsConfig(auto=True)
        if variant.fused:
            flags["fused_lora"] = FusedLoraConfig()
    framework = AccelerationFramework(flags, plugins=BUILTIN)
    facts = Facts(
        model_config=model.config, model_name_or_path="", model_kwargs={}, train_args=args,
        peft_config=model.peft_config["default"], active=framework.active, world_size=1, rank=0, seed=0,
        device_type=args.device.type,
        compute_capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
    )  # fmt: skip
    framework.check(facts)
    framework.check_model(model, facts)
    with restored(model), framework.patched(model, facts):
        gate = gradients(model, rows, dtype, args.device.type)
        if variant.trainer == "trl":
            yield trl.SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer), gate
            return
        # as the plugin of --bitsandbytes: TRL would round the adapters
        hidden = contextlib.nullcontext()
        if variant.base == "nf4":
            from tuning.acceleration.plugins.quantized_peft import BNBQLoraPlugin
            from tuning.config.acceleration_configs import BNBQLoraConfig

            hidden = applied_patches(model, BNBQLoraPlugin(BNBQLoraConfig()).patches(model, facts))
        with hidden:
            seats = framework.seats([len(row) for row in rows["input_ids"]], PaddedCollator(pad_token_id=0), facts)
            yield SFTTrainer(model, args, train_dataset=rows, eval_dataset=None, tokenizer=tokenizer, seats=seats), gate


def measure(name: str, options: argparse.Namespace, batch: int, lengths: list[int], device: str) -> dict[str, Any]:
    """Train one variant and return its gate, tokens a second of every window, and peak memory."""
    variant = VARIANTS[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build(options, variant, dtype, device)
    rows = build_rows(lengths, model.config.vocab_size)
    clock = Windows(options.warm_up, options.steps)
    values = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": batch, "seed": 0,
        "bf16": device == "cuda" and variant.autocast, "use_cpu": device == "cpu",
        "max_steps": options.warm_up + options.windows * options.steps, "optim": "adamw_torch_fused",
        "learning_rate": 1e-6, "logging_steps": 1000, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "dataloader_drop_last": True, "train_sampling_strategy": "sequential",
        "gradient_checkpointing": options.checkpointing == "true",
    }  # fmt: skip
    with build_trainer(variant, model, rows, values, dtype) as (trainer, (loss, grads)):
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.add_callback(clock)
        trainer.train()
    speeds = []
    for index, (start, end) in enumerate(zip(clock.times, clock.times[1:], strict=False)):
        first = (options.warm_up + index * options.steps) * batch
        speeds.append(sum(lengths[first : first + options.steps * batch]) / (end - start))
    measured = sum(lengths[options.warm_up * batch :]) / (clock.times[-1] - clock.times[0])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"loss": loss, "grads": grads.cpu(), "speed": measured, "windows": speeds, "peak_gib": peak, "dtype": dtype}


def report(recorder: Recorder, case: str, result: dict[str, Any], gate: dict[str, Any], first: dict[str, Any]) -> None:
    """Record one variant: its gate against the first over its base, and its speed against the first of all."""
    loss_error = abs(result["loss"] - gate["loss"])
    grad_error = float((result["grads"] - gate["grads"]).norm() / gate["grads"].norm())
    recorder.add(case, "gradient_error", grad_error, "relative")
    loss_allowed, grad_allowed = _ALLOWED[result["dtype"]]
    if not (loss_error <= loss_allowed and grad_error <= grad_allowed):
        recorder.add(case, "loss_error", loss_error, "nats")
        return
    recorder.add(case, "real_tokens_per_second", result["speed"], "tokens/s")
    recorder.add(case, "ratio", result["speed"] / first["speed"], "x")
    ratios = [ours / theirs for ours, theirs in zip(result["windows"], first["windows"], strict=True)]
    recorder.add(case, "ratio_lowest_window", min(ratios), "x")
    recorder.add(case, "ratio_highest_window", max(ratios), "x")
    if result["peak_gib"]:
        recorder.add(case, "peak_memory", result["peak_gib"], "GiB")


def main() -> None:
    """Run the variants asked for and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS),
                        default=["trl-padded", "trl-padding_free", "lora", "fused"])  # fmt: skip
    parser.add_argument("--batch", nargs="+", type=int, default=[8])
    parser.add_argument("--r", type=int, default=16, help="LoRA rank")
    parser.add_argument("--dropout", type=float, default=0.05, help="before the adapters")
    parser.add_argument("--lengths", help="JSON file with {'lengths': [...]}; default: log-normal, FLAN-like")
    parser.add_argument("--checkpointing", choices=["true", "false"], default="false")
    parser.add_argument("--warm_up", type=int, default=4)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of a window")
    parser.add_argument("--csv", help="file that rows are appended to, such as scripts/bench/results.csv")
    parser.add_argument("--commit", help="commit that is measured; default: ask git")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = Recorder("lora", csv_path=options.csv, commit=options.commit)
    for batch in options.batch:
        lengths = read_lengths(options.lengths, batch * (options.warm_up + options.windows * options.steps))
        gates: dict[str, dict[str, Any]] = {}
        first: dict[str, Any] = {}
        for name in options.variants:
            result = measure(name, options, batch, lengths, device)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            first = first or result
            case = f"{options.shape} batch {batch} checkpointing {options.checkpointing} r {options.r} {name}"
            report(recorder, case, result, gates.setdefault(VARIANTS[name].base, result), first)


if __name__ == "__main__":
    main()
