"""Trainer callbacks: the log file, the progress bar, the clock and the sampler's epoch."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tuning.trainers.checkpoints import write_added_tokens, writing

if TYPE_CHECKING:
    from torch.utils.data import Sampler
    from transformers import PreTrainedTokenizerBase

    from tuning.trainers.metrics import Stopwatch

__all__ = ["AddedTokens", "LastLine", "LogFile", "Progress", "SamplerEpoch", "StepClock"]

_LOG_FILE = "training_logs.jsonl"
# log key -> name in the file, as fms-hf-tuning writes it
_LOSSES = {"loss": "training_loss", "eval_loss": "validation_loss"}
_METERS = ("num_tokens", "supervised_tokens", "padding_share", "tokens_per_second", "peak_memory_gib", "grad_norm")


class LogFile(TrainerCallback):
    """Appends losses and meters to ``training_logs.jsonl`` in the output folder, one object a line.

    Args:
        metadata: The user's own facts about the run, written first; None writes nothing.
    """

    def __init__(self, metadata: Mapping[str, Any] | None = None) -> None:
        self.metadata = metadata

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401 - the signature of TrainerCallback
    ) -> None:
        """Write the metadata, on rank 0."""
        del control, kwargs
        if state.is_world_process_zero and self.metadata is not None:
            _append(args.output_dir, [{"name": "exp_metadata", "data": dict(self.metadata)}])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401 - the signature of TrainerCallback
    ) -> None:
        """Write the lines of one log call, on rank 0."""
        del control, kwargs
        if not state.is_world_process_zero or not logs:
            return
        where = {"epoch": round(logs.get("epoch", 0.0), 2), "step": state.global_step}
        when = datetime.datetime.now(tz=datetime.UTC).isoformat()
        lines = [
            {"name": name, "data": {**where, "value": logs[key], "timestamp": when}}
            for key, name in _LOSSES.items()
            if key in logs
        ]
        meters = {key: logs[key] for key in _METERS if key in logs}
        if meters:
            lines.append({"name": "training_meters", "data": {**where, **meters, "timestamp": when}})
        if lines:
            _append(args.output_dir, lines)


def _append(output_dir: str, lines: list[dict[str, Any]]) -> None:
    path = Path(output_dir) / _LOG_FILE
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, sort_keys=True) + "\n" for line in lines)


class LastLine(TrainerCallback):
    """Asks for a log line at the last step, so that a run shorter than ``logging_steps`` has a loss to show."""

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401 - the signature of TrainerCallback
    ) -> None:
        """Ask for it, unless nothing is logged at all."""
        del kwargs
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True


class Progress(ProgressCallback):
    """Hugging Face's progress bar with real tokens a second beside it."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ANN401 - the signature of TrainerCallback
    ) -> None:
        """Show the speed, then print the line as usual."""
        if state.is_world_process_zero and self.training_bar is not None and logs and "tokens_per_second" in logs:
            self.training_bar.set_postfix_str(f"{logs['tokens_per_second']:,.0f} real tokens/s")
        super().on_log(args, state, control, logs=logs, **kwargs)


class StepClock(TrainerCallback):
    """Runs the stopwatch from the first step to the end of training.

    Args:
        stopwatch: Of the trainer; evaluation and saving stop it themselves.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the signature of TrainerCallback
        """Start the clock."""
        self.stopwatch.start()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - the signature of TrainerCallback
        """Stop the clock."""
        self.stopwatch.stop()


class SamplerEpoch(TrainerCallback):
    """Tells the batch sampler the epoch; accelerate's wrappers do not reach it after a resume.

    Args:
        sampler: With ``set_epoch``.
    """

    def __init__(self, sampler: Sampler[list[int]]) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401 - the signature of TrainerCallback
    ) -> None:
        """Set the epoch, from 0."""
        del args, control, kwargs
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(int(state.epoch or 0))


class AddedTokens(TrainerCallback):
    """Writes ``added_tokens_info.json`` into each checkpoint.

    Args:
        tokenizer: Of the run.
        added: Tokens the run added; none writes nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, added: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.added = added

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401 - the signature of TrainerCallback
    ) -> None:
        """Write the file beside the checkpoint just saved."""
        del control, kwargs
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            write_added_tokens(folder, self.tokenizer, self.added)
