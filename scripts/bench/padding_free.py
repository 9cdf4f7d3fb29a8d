"""Padded against padding-free training steps: the same model, the same samples, an equal loss first.

Every variant builds the model anew from the same seed, trains on the same rows in the same order through a trainer
(TRL's own, or ours with plugins), and is timed over windows of steps; the clock is read with the device idle at the
ends of a window only, and every window holds the same samples for every variant. A variant whose first loss differs
from the first variant's is reported as wrong, and no speed is printed for it.

    python scripts/bench/padding_free.py --shape tiny
    python scripts/bench/padding_free.py --shape mistral-7b --batch 8 4 --checkpointing true
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from _bench import Recorder
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedTokenizerFast, TrainerCallback

from tuning.acceleration.framework import AccelerationFramework
from tuning.acceleration.plugin import Facts
from tuning.acceleration.plugins import BUILTIN
from tuning.config.acceleration_configs import FastKernelsConfig, PaddingFree
from tuning.data.collators import PaddedCollator
from tuning.trainers import arguments
from tuning.trainers.fit import restored
from tuning.trainers.sft import SFTTrainer

# FLAN-like tokens a sample: log-normal with a median of 175 and a mean near 276
_MEDIAN, _SIGMA, _SHORTEST, _LONGEST = 175, 0.95, 8, 2048
_LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        trainer: ``trl`` or ``ours``.
        padding_free: Whether no padding is computed.
        kernels: Fast kernels of ours, or ``liger`` for TRL with Liger.
        checkpointing: Recompute activations; None as the run says.
    """

    trainer: str
    padding_free: bool
    kernels: tuple[str, ...] = ()
    checkpointing: bool | None = None


VARIANTS = {
    "trl-padded": Variant("trl", padding_free=False),
    "trl-padding_free": Variant("trl", padding_free=True),
    "trl-padding_free-liger": Variant("trl", padding_free=True, kernels=("liger",)),
    "padded": Variant("ours", padding_free=False),
    "padding_free": Variant("ours", padding_free=True),
    "padding_free-kernels": Variant("ours", padding_free=True, kernels=("auto",)),
}
SHAPES = {
    "tiny": LlamaConfig(
        vocab_size=2000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=_LONGEST,
    ),
    "1b": LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=_LONGEST,
    ),
    "mistral-7b": MistralConfig(sliding_window=None, max_position_embeddings=4096),
}  # fmt: skip


class Windows(TrainerCallback):
    """Notes the time, with the device idle, at the ends of equal windows of steps.

    Args:
        warm_up: Steps before the first window.
        steps: Steps of each window.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps, self.times = warm_up, steps, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time at the end of a window."""
        if state.global_step >= self.warm_up and (state.global_step - self.warm_up) % self.steps == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())


def build_rows(lengths: list[int], vocab_size: int) -> Dataset:
    """Return random rows of the lengths given, every token but the first supervised."""
    draw = random.Random(0)
    ids = [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": [[-100, *row[1:]] for row in ids]})


def read_lengths(path: str | None, count: int) -> list[int]:
    """Return ``count`` lengths: those of a JSON file (``{"lengths": [...]}``) up to the longest, or log-normal."""
    draw = random.Random(0)
    if path is None:
        drawn = (round(_MEDIAN * math.exp(draw.gauss(0, _SIGMA))) for _ in range(4 * count))
        return [length for length in drawn if _SHORTEST <= length <= _LONGEST][:count]
    lengths = json.loads(Path(path).read_text(encoding="utf-8"))["lengths"]
    lengths = [length for length in lengths if length <= _LONGEST]
    draw.shuffle(lengths)
    return lengths[:count]


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of ``vocab_size`` made-up words; trainers ask for one, rows are tokenized already."""
    words = {f"t{i}": i for i in range(vocab_size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        pad_token="t0", bos_token="t1", eos_token="t2",
    )  # fmt: skip


def build_model(shape: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """Return a model of random weights, the same for every variant."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype, attn_implementation="sdpa")


@contextlib.contextmanager
def build_trainer(variant: Variant, model: Any, rows: Dataset, values: dict[str, Any]) -> Iterator[Any]:
    """Yield the trainer of a variant; what it changed on the model is undone afterwards."""
    tokenizer = build_tokenizer(model.config.vocab_size)
    flags: dict[str, Any] = {}
    if variant.padding_free:
        # TRL leaves attention to flash-attn; here its flattened batches get the same attention as ours
        flags["padding_free"] = PaddingFree()
    if variant.trainer == "trl":
        args: Any = trl.SFTConfig(
            **values, padding_free=variant.padding_free, max_length=None, use_liger_kernel="liger" in variant.kernels,
            dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
    else:
        args = arguments.build(values)
        if variant.kernels:
            auto = variant.kernels == ("auto",)
            flags["fast_kernels"] = FastKernelsConfig(kernels=() if auto else variant.kernels, auto=auto)
    framework = AccelerationFramework(flags, plugins=BUILTIN)
    facts = Facts(
        model_config=model.config, model_name_or_path="", model_kwargs={}, train_args=args, peft_config=None,
        active=framework.active, world_size=1, rank=0, seed=0, device_type=args.device.type,
        compute_capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
    )  # fmt: skip
    framework.check(facts)
    framework.check_model(model, facts)
    with restored(model), framework.patched(model, facts):
        if variant.trainer == "trl":
            yield trl.SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
            return
        seats = framework.seats([len(row) for row in rows["input_ids"]], PaddedCollator(pad_token_id=0), facts)
        yield SFTTrainer(model, args, train_dataset=rows, eval_dataset=None, tokenizer=tokenizer, seats=seats)


def measure(name: str, options: argparse.Namespace, batch: int, lengths: list[int], device: str) -> dict[str, Any]:
    """Train one variant and return its first loss, tokens a second of every window, and peak memory."""
    variant = VARIANTS[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build_model(options.shape, dtype, device)
    rows = build_rows(lengths, model.config.vocab_size)
    clock = Windows(options.warm_up, options.steps)
    values = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": batch, "bf16": False, "seed": 0,
        "use_cpu": device == "cpu", "max_steps": options.warm_up + options.windows * options.steps,
        "optim": "adamw_torch_fused", "learning_rate": 1e-6, "logging_steps": 1000, "logging_first_step": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_drop_last": True,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": options.checkpointing == "true",
    }  # fmt: skip
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with build_trainer(variant, model, rows, values) as trainer:
        trainer.add_callback(clock)
        trainer.train()
        first_loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    speeds = []
    for index, (start, end) in enumerate(zip(clock.times, clock.times[1:], strict=False)):
        first = (options.warm_up + index * options.steps) * batch
        speeds.append(sum(lengths[first : first + options.steps * batch]) / (end - start))
    measured = sum(lengths[options.warm_up * batch :]) / (clock.times[-1] - clock.times[0])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"loss": first_loss, "speed": measured, "windows": speeds, "peak_gib": peak, "dtype": dtype}


def main() -> None:
    """Run the variants asked for and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=["trl-padded", "padding_free"])
    parser.add_argument("--batch", nargs="+", type=int, default=[8])
    parser.add_argument("--lengths", help="JSON file with {'lengths': [...]}; default: log-normal, FLAN-like")
    parser.add_argument("--checkpointing", choices=["true", "false"], default="false")
    parser.add_argument("--warm_up", type=int, default=4)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of a window")
    parser.add_argument("--csv", help="file that rows are appended to, such as scripts/bench/results.csv")
    parser.add_argument("--commit", help="commit that is measured; default: ask git")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = Recorder("padding_free", csv_path=options.csv, commit=options.commit)
    for batch in options.batch:
        steps = options.warm_up + options.windows * options.steps
        lengths = read_lengths(options.lengths, batch * steps)
        base: dict[str, Any] | None = None
        for name in options.variants:
            result = measure(name, options, batch, lengths, device)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            base = base or result
            error = abs(result["loss"] - base["loss"])
            case = f"{options.shape} batch {batch} checkpointing {options.checkpointing} {name}"
            recorder.add(case, "first_loss", result["loss"], "nats")
            if error > _LOSS_TOLERANCE[result["dtype"]]:
                recorder.add(case, "loss_error", error, "nats")
                continue
            recorder.add(case, "real_tokens_per_second", result["speed"], "tokens/s")
            recorder.add(case, "ratio", result["speed"] / base["speed"], "x")
            ratios = [ours / theirs for ours, theirs in zip(result["windows"], base["windows"], strict=True)]
            recorder.add(case, "ratio_lowest_window", min(ratios), "x")
            recorder.add(case, "ratio_highest_window", max(ratios), "x")
            if device == "cuda":
                recorder.add(case, "peak_memory", result["peak_gib"], "GiB")


if __name__ == "__main__":
    main()
