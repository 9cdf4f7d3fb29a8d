"""Run the product on a few rows and keep what it did: batches, losses, learning rates, gradients, weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests import tiny
from tuning.config.acceleration_configs import (
    AttentionAndDistributedPackingConfig,
    FusedOpsAndKernelsConfig,
    MultiPack,
    PaddingFree,
    QuantizedLoraConfig,
)
from tuning.config.configs import DataArguments, ModelArguments
from tuning.run import train
from tuning.trainers import arguments


class Record(TrainerCallback):
    """Keeps every batch that reaches the model while training, and the gradients of each optimizer step.

    Attributes:
        batches: ``(optimizer step, keyword arguments)`` of each micro-step.
        evaluated: Keyword arguments of each evaluation batch.
        gradients: By parameter name, one dict a step.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[int, dict[str, Any]]] = []
        self.evaluated: list[dict[str, Any]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._hook: Any = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def keep(module, args, values):
            if module.training:
                self.batches.append((state.global_step, dict(values)))
            else:
                self.evaluated.append(dict(values))

        self._hook = model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(
            {
                name.removeprefix("module."): parameter.grad.detach().clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        )

    def on_train_end(self, args, state, control, **kwargs):
        self._hook.remove()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run did on this rank.

    Attributes:
        trainer: After training.
        metrics: Of the run.
        record: Batches and gradients.
    """

    trainer: Any
    metrics: Mapping[str, float]
    record: Record = field(repr=False)

    def logged(self, key: str) -> list[float]:
        """Return the values of ``key`` in the log, in order."""
        return [entry[key] for entry in self.trainer.state.log_history if key in entry]

    def first_ids(self) -> list[tuple[int, list[int]]]:
        """Return (optimizer step, first id of each sample) of each micro-step; a filler has none."""
        return [(step, _first_ids(values)) for step, values in self.record.batches]


def _first_ids(values: Mapping[str, Any]) -> list[int]:
    ids = values["input_ids"]
    if "cu_seq_lens_q" in values:
        found = ids[0, values["cu_seq_lens_q"][:-1].long()].tolist()
    else:
        starts = values["attention_mask"].int().argmax(dim=1)
        found = ids[torch.arange(len(ids)), starts].tolist()
    # the only sample that begins with padding is a filler
    return [first for first in found if first != tiny.PAD]


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    """Write rows of ids, or of (ids, labels), as pretokenized JSON lines, and return the path."""
    pairs = [row if isinstance(row, tuple) else (row, row) for row in rows]
    lines = [json.dumps({"input_ids": list(ids), "labels": list(labels)}) for ids, labels in pairs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def run_product(
    model: str,
    data: str,
    output: str,
    *,
    flags: Mapping[str, Any] | None = None,
    peft: Any = None,
    evaluation: str | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    data_values: Mapping[str, Any] | None = None,
    **values: Any,
) -> Run:
    """Train as ``tuning.sft_trainer`` does.

    Args:
        model: Folder of the model and tokenizer.
        data: File of pretokenized rows.
        output: Folder for the run.
        flags: Flag to its options; ``padding_free`` may be True and ``multipack`` a dict.
        peft: Adapters.
        evaluation: File of rows to evaluate on.
        callbacks: Beside the one that keeps the record.
        data_values: Further data arguments.
        values: Training arguments beside those that every run shares.
    """
    flags = flags or {}
    padding_free, multipack = flags.get("padding_free"), flags.get("multipack")
    shared = {
        "output_dir": output, "use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no",
        "max_grad_norm": 0.0, "disable_tqdm": True, "optim": "sgd", "resume_from_checkpoint": "false",
        "warmup_steps": 0, "per_device_train_batch_size": 1,
    }  # fmt: skip
    record = Record()
    trainer, metrics = train(
        ModelArguments(model_name_or_path=model, torch_dtype="float32"),
        DataArguments(training_data_path=data, validation_data_path=evaluation, **(data_values or {})),
        arguments.build({**shared, **values}),
        peft,
        attention_and_distributed_packing_config=AttentionAndDistributedPackingConfig(
            padding_free=PaddingFree() if padding_free is True else padding_free,
            multipack=MultiPack(**multipack) if isinstance(multipack, dict) else multipack,
        ),
        fusedops_kernels_config=FusedOpsAndKernelsConfig(
            fast_kernels=flags.get("fast_kernels"), fused_lora=flags.get("fused_lora")
        ),
        quantized_lora_config=QuantizedLoraConfig(auto_gptq=flags.get("auto_gptq"), bnb_qlora=flags.get("bnb_qlora")),
        additional_callbacks=[record, *callbacks],
    )
    return Run(trainer=trainer, metrics=metrics, record=record)
