"""A multipack run that may kill itself between two micro-steps; started by torchrun.

``python -m torch.distributed.run ... -m tests.distributed.killed_run REQUEST``: a JSON file with ``model``, ``data``,
``output``, ``mode``, ``resume``, ``result`` and ``kill_in_step`` (None: not at all).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

from tests.equivalence.product import run_product


class Kill(TrainerCallback):
    """Ends the process without a word inside an optimizer step, after its first micro-step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(request: dict) -> None:
    run = run_product(
        request["model"], request["data"], request["output"],
        flags={"padding_free": True, "multipack": {"mode": request["mode"]}}, callbacks=[Kill(request["kill_in_step"])],
        num_train_epochs=3, gradient_accumulation_steps=2, learning_rate=0.05, optim="adamw_torch",
        save_strategy="steps", save_steps=1, save_total_limit=2, resume_from_checkpoint=request["resume"],
    )  # fmt: skip
    batches = [(step, values["input_ids"], values["cu_seq_lens_q"]) for step, values in run.record.batches]
    weights = run.trainer.model.state_dict()
    torch.save(
        {"batches": batches, "weights": weights, "loss": run.logged("loss")},
        f"{request['result']}.{run.trainer.args.process_index}",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
