"""Train to the end: resume, train, save the final model, print the summary, and take our traces off the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import ProgressCallback

from tuning.errors import CheckpointError
from tuning.logs import logger
from tuning.trainers.callbacks import AddedTokens, LastLine, LogFile, Progress, SamplerEpoch, StepClock
from tuning.trainers.checkpoints import read_run_state, write_added_tokens, writing
from tuning.trainers.metrics import render_summary

if TYPE_CHECKING:
    from torch import nn

    from tuning.trainers.sft import SFTTrainer

__all__ = ["fit", "restored"]

_log = logger(__name__)
_GIB = 2**30
# what upstream sets on modules and leaves there; as long as the classes' own methods apply again without them
_TRACES = (
    "forward",
    "gradient_checkpointing",
    "model_tags",
    "neftune_noise_alpha",
    "_gradient_checkpointing_func",
    "_is_accelerate_prepared",
    "_original_forward",
    "_require_grads_hook",
    "_require_grads_hooks",
)
# NEFTune's noise, and what makes inputs need a gradient: upstream registers that twice and takes it off once
_EMBEDDING_HOOKS = ("neftune_post_forward_hook", "make_inputs_require_grads")


def fit(
    trainer: SFTTrainer,
    resume_from: str | None,
    *,
    added_tokens: tuple[str, ...] = (),
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Train ``trainer`` to the end and save its model.

    Args:
        trainer: Ready to train.
        resume_from: A complete checkpoint, or None.
        added_tokens: Tokens the run added to the tokenizer; their ids are written beside each checkpoint.
        metadata: The user's own facts about the run; the first line of the log file.

    Returns:
        Hugging Face's metrics of the run, and ours: ``train_real_tokens``, ``train_tokens_per_second``,
        ``train_supervised_tokens``, ``train_padding_share``.

    Raises:
        CheckpointError: If the checkpoint was written by a run with other data, seed or ranks.
    """
    _add_callbacks(trainer, added_tokens, metadata)
    if resume_from is not None:
        _restore(trainer, Path(resume_from))
    result = trainer.train(resume_from_checkpoint=resume_from)
    metrics = {**result.metrics, **trainer.final_meters()}
    args = trainer.args
    folder = args.save_model_dir or args.output_dir
    with writing(Path(folder)):
        trainer.save_state()
        if args.should_save:
            write_added_tokens(Path(folder), trainer.processing_class, added_tokens)
        # last: with --push_to_hub it may fail on the way
        trainer.save_model(folder)
    _log.info("finished:\n%s", _summary(trainer, metrics, folder))
    return metrics


def _add_callbacks(trainer: SFTTrainer, added_tokens: tuple[str, ...], metadata: Mapping[str, Any] | None) -> None:
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(Progress())
    trainer.add_callback(LogFile(metadata))
    trainer.add_callback(LastLine())
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
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry] or [None]
    eval_losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry] or [None]
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
            "first logged loss": _show(losses[0]),
            "last logged loss": _show(losses[-1]),
            "last evaluation loss": _show(eval_losses[-1]),
            "peak memory": peak,
            "model": folder,
        }
    )


def _show(loss: float | None) -> str | None:
    return None if loss is None else f"{loss:.4f}"


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Take off ``model`` on exit what upstream trainers put on it: wrapped forwards, hooks, checkpointing.

    TRL replaces the model's forward by one with a fused head, accelerate wraps it for mixed precision, and both stay
    after training; the noise of NEFTune stays if training raises. Afterwards ``model`` is in evaluation mode.
    """
    before = [(module, {name: module.__dict__[name] for name in _TRACES if name in module.__dict__})
              for module in model.modules()]  # fmt: skip
    embedding = _find_embedding(model)
    hooks = set() if embedding is None else set(embedding._forward_hooks)
    try:
        yield
    finally:
        _stop_checkpointing_(model)
        if embedding is not None:
            for key, hook in list(embedding._forward_hooks.items()):
                if key not in hooks and getattr(hook, "__name__", None) in _EMBEDDING_HOOKS:
                    del embedding._forward_hooks[key]
        for module, attributes in before:
            for name in _TRACES:
                if name in attributes:
                    module.__dict__[name] = attributes[name]
                else:
                    module.__dict__.pop(name, None)
        model.eval()


def _stop_checkpointing_(model: nn.Module) -> None:
    """Switch off, in place, what recomputes activations."""
    owners: list[Any] = [model]
    find_inner: Any = getattr(model, "get_base_model", None)
    if find_inner is not None:
        owners.append(find_inner())
    for owner in owners:
        # transformers from 5.24 calls it activation checkpointing
        for word in ("activation", "gradient"):
            if hasattr(type(owner), f"is_{word}_checkpointing"):
                if getattr(owner, f"is_{word}_checkpointing"):
                    getattr(owner, f"{word}_checkpointing_disable")()
                break


def _find_embedding(model: nn.Module) -> nn.Module | None:
    find: Any = getattr(model, "get_input_embeddings", None)
    return None if find is None else find()
