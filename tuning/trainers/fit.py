"""Train to the end: resume, train, save the final model, print the summary, and take our traces off the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import ProgressCallback

from tuning.errors import CheckpointError
from tuning.logs import logger
from tuning.trainers.callbacks import AddedTokens, LogFile, Progress, SamplerEpoch, StepClock
from tuning.trainers.checkpoints import read_run_state, write_added_tokens
from tuning.trainers.metrics import render_summary

if TYPE_CHECKING:
    from torch import nn

    from tuning.trainers.sft import SFTTrainer

__all__ = ["fit", "restored"]

_log = logger(__name__)
_GIB = 2**30


def fit(trainer: SFTTrainer, resume_from: str | None, *, added_tokens: tuple[str, ...] = ()) -> dict[str, float]:
    """Train ``trainer`` to the end and save its model.

    Args:
        trainer: Ready to train.
        resume_from: A complete checkpoint, or None.
        added_tokens: Tokens the run added to the tokenizer; their ids are written beside each checkpoint.

    Returns:
        Hugging Face's metrics of the run, and ours: ``train_real_tokens``, ``train_tokens_per_second``,
        ``train_supervised_tokens``, ``train_padding_share``.

    Raises:
        CheckpointError: If the checkpoint was written by a run with other data, seed or ranks.
    """
    _add_callbacks(trainer, added_tokens)
    if resume_from is not None:
        _restore(trainer, Path(resume_from))
    result = trainer.train(resume_from_checkpoint=resume_from)
    metrics = {**result.metrics, **trainer.final_meters()}
    args = trainer.args
    folder = args.save_model_dir or args.output_dir
    trainer.save_model(folder)
    if args.should_save:
        write_added_tokens(Path(folder), trainer.processing_class, added_tokens)
    trainer.save_state()
    _log.info("finished:\n%s", _summary(trainer, metrics, folder))
    return metrics


def _add_callbacks(trainer: SFTTrainer, added_tokens: tuple[str, ...]) -> None:
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(Progress())
    trainer.add_callback(LogFile())
    trainer.add_callback(StepClock(trainer.stopwatch))
    trainer.add_callback(AddedTokens(trainer.processing_class, added_tokens))
    if trainer.batch_sampler is not None:
        trainer.add_callback(SamplerEpoch(trainer.batch_sampler))


def _restore(trainer: SFTTrainer, checkpoint: Path) -> None:
    state = read_run_state(checkpoint)
    if state is None:
        _log.warning("%s was written by another trainer: token counts start from zero", checkpoint)
        return
    trainer.totals = state.counts
    trainer.resumed_tokens = state.counts.real
    load = getattr(trainer.batch_sampler, "load_state_dict", None)
    if (load is None) != (state.sampler is None):
        before, now = ("without", "with") if state.sampler is None else ("with", "without")
        raise CheckpointError(
            f"{checkpoint} was written {before} --multipack and this run is {now} it, so its batches would not go on "
            "where they stopped; use the same flags, or pass --resume_from_checkpoint false"
        )
    if load is not None:
        load(state.sampler)


def _summary(trainer: SFTTrainer, metrics: dict[str, float], folder: str) -> str:
    totals = trainer.totals
    first_loss = next((entry["loss"] for entry in trainer.state.log_history if "loss" in entry), None)
    last_loss = next((entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry), None)
    eval_loss = next((e["eval_loss"] for e in reversed(trainer.state.log_history) if "eval_loss" in e), None)
    peak = None
    if trainer.args.device.type == "cuda":
        peak = f"{torch.cuda.max_memory_allocated(trainer.args.device) / _GIB:.2f} GiB"
    return render_summary(
        {
            "optimizer steps": trainer.state.global_step,
            "real tokens": f"{totals.real:,.0f}",
            "supervised tokens": f"{totals.supervised:,.0f}",
            "padding computed": f"{100 * totals.padding_share:.1f} %",
            "real tokens/s": f"{metrics['train_tokens_per_second']:,.1f}",
            "first logged loss": first_loss,
            "last logged loss": last_loss,
            "evaluation loss": eval_loss,
            "peak memory": peak,
            "model": folder,
        }
    )


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Take off ``model`` on exit what upstream trainers put on it: wrapped forwards, hooks, checkpointing.

    TRL replaces the model's forward by one with a fused head, accelerate wraps it for mixed precision, and both stay
    after training. Afterwards ``model`` is in evaluation mode.
    """
    owners: list[Any] = [model]
    inner = getattr(model, "get_base_model", None)
    if inner is not None:
        owners.append(inner())
    before = [(owner, dict(owner.__dict__)) for owner in owners]
    try:
        yield
    finally:
        for owner in owners:
            # transformers from 5.24 calls it activation checkpointing
            for word in ("activation", "gradient"):
                if hasattr(type(owner), f"is_{word}_checkpointing"):
                    if getattr(owner, f"is_{word}_checkpointing"):
                        getattr(owner, f"{word}_checkpointing_disable")()
                    break
            if getattr(owner, "_require_grads_hook", None) is not None:
                owner.disable_input_require_grads()
        for owner, attributes in before:
            for name in ("forward", "_original_forward"):
                if name in attributes:
                    owner.__dict__[name] = attributes[name]
                else:
                    owner.__dict__.pop(name, None)
        model.eval()
