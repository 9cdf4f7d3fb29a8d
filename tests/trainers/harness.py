"""A real trainer on a few rows: what the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tests.tiny import PAD, build_tokenizer
from tuning.data.collators import FlattenedCollator, PaddedCollator
from tuning.seats import Seats
from tuning.trainers.arguments import TrainingArguments, build
from tuning.trainers.sft import SFTTrainer

COLLATORS: dict[str, Callable[[], Any]] = {
    "padded": lambda: PaddedCollator(PAD),
    "flattened": FlattenedCollator,
}

# targets that are not "this id plus one" cost 4.767273, the others 0.767273
TWO_BAD = [10, 30, 12]
EIGHT_GOOD = [20, 21, 22, 23, 24, 25, 26, 27, 28]
BAD, GOOD = 4.767273, 0.767273


def dataset(rows: Sequence[Sequence[int] | tuple[Sequence[int], Sequence[int]]]) -> Dataset:
    """Return a data set of ids, or of (ids, labels) where they differ."""
    pairs = [row if isinstance(row, tuple) else (row, row) for row in rows]
    return Dataset.from_list([{"input_ids": list(ids), "labels": list(labels)} for ids, labels in pairs])


def arguments(folder: Path, **values: Any) -> TrainingArguments:
    """Return the arguments of a short run on the CPU: one row a batch, in order, no checkpoint, a log line a step."""
    short = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "train_sampling_strategy": "sequential",
    }
    return build({**short, **values})


def make_trainer(
    folder: Path,
    model: torch.nn.Module,
    rows: Sequence[Any],
    *,
    collator: str = "padded",
    eval_rows: Sequence[Any] | None = None,
    seats: dict[str, Any] | None = None,
    hooks: dict[str, Any] | None = None,
    **values: Any,
) -> SFTTrainer:
    """Return a trainer of ``model`` on ``rows``.

    Args:
        folder: Output folder.
        model: Trained in place.
        rows: Ids, or pairs of ids and labels.
        collator: A name of ``COLLATORS``.
        eval_rows: For evaluation.
        seats: Further seats.
        hooks: Further arguments of the trainer.
        **values: Training arguments.
    """
    return SFTTrainer(
        model,
        arguments(folder, **values),
        train_dataset=dataset(rows),
        eval_dataset=None if eval_rows is None else dataset(eval_rows),
        tokenizer=build_tokenizer(),
        seats=Seats(collator=COLLATORS[collator](), **(seats or {})),
        **(hooks or {}),
    )


def losses(trainer: SFTTrainer) -> list[float]:
    """Return the losses of the log, in order."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class KeepGradients:
    """Keeps the gradients of each optimizer step, as they are after clipping."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.steps: list[dict[str, torch.Tensor]] = []

    def attach(self, trainer: SFTTrainer) -> KeepGradients:
        """Copy them just before each step of the optimizer."""
        from transformers import TrainerCallback

        keeper = self

        class Keeper(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, **kwargs):
                found = dict(trainer.model.named_parameters())
                keeper.steps.append({name: found[name].grad.clone() for name in keeper.names})

        trainer.add_callback(Keeper())
        return self
