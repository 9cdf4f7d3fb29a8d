"""Do one optimizer step as the product does it, and keep the loss and every gradient before it.

Run as a program (under ``torchrun``) it writes them to a file; imported, :func:`one_step` returns them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tuning.config.acceleration_configs import (
    AttentionAndDistributedPackingConfig,
    FastKernelsConfig,
    FusedOpsAndKernelsConfig,
    MultiPack,
    PaddingFree,
)
from tuning.config.configs import DataArguments, ModelArguments
from tuning.run import train
from tuning.trainers import arguments


class Gradients(TrainerCallback):
    """Keeps a copy of every gradient of the first optimizer step."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if not self.first:
            self.first = {
                name.removeprefix("module."): parameter.grad.detach().clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }


def one_step(model: str, data: str, output: str, *, flags: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Train one step.

    Args:
        model: Folder of the model and tokenizer.
        data: File of pretokenized rows.
        output: Folder for the run.
        flags: ``padding_free``, ``multipack``, ``fast_kernels`` and their options.
        values: Training arguments beside those that every variant shares.
    """
    gradients = Gradients()
    multipack = flags.get("multipack")
    kernels = flags.get("fast_kernels")
    shared = {
        "output_dir": output, "use_cpu": True, "max_steps": 1, "report_to": "none", "logging_steps": 1,
        "save_strategy": "no", "learning_rate": 0.0, "max_grad_norm": 0.0, "disable_tqdm": True, "optim": "sgd",
        "resume_from_checkpoint": "false",
    }  # fmt: skip
    trainer, _ = train(
        ModelArguments(model_name_or_path=model, torch_dtype="float32"),
        DataArguments(training_data_path=data),
        arguments.build({**shared, **values}),
        attention_and_distributed_packing_config=AttentionAndDistributedPackingConfig(
            padding_free=PaddingFree() if flags.get("padding_free") else None,
            multipack=MultiPack(**multipack) if multipack is not None else None,
        ),
        fusedops_kernels_config=FusedOpsAndKernelsConfig(
            fast_kernels=FastKernelsConfig(kernels=tuple(kernels)) if kernels else None
        ),
        additional_callbacks=[gradients],
    )
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return {
        "loss": loss,
        "gradients": gradients.first,
        "rank": trainer.args.process_index,
        "world_size": trainer.args.world_size,
    }


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    result = one_step(**request["step"])
    if result["rank"] == 0:
        torch.save(result, request["result"])
