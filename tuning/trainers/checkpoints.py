"""Which checkpoint a run goes on from, what a checkpoint holds beside Hugging Face's files, and the final model.

A job killed while it saved leaves the newest folder half written. Such a folder is told apart by its files alone:
the trainer state must parse, every weights file must be as long as its header says, and optimizer and schedule must be
there: Hugging Face goes on without them and says nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from tuning.errors import CheckpointError
from tuning.logs import logger
from tuning.models.weights import find_weights_fault, is_whole
from tuning.trainers.metrics import Counts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "RunState",
    "find_fault",
    "find_resume",
    "read_run_state",
    "write_added_tokens",
    "write_run_state",
    "writing",
]

_log = logger(__name__)
_STATE_FILE = "packtune_state.json"
_ADDED_TOKENS_FILE = "added_tokens_info.json"  # fms-hf-tuning's name
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FULL_BELOW_BYTES = 1 << 20  # torch's writer says no more than that a position is wrong
_OPTIMIZER_FILES = ("optimizer.pt", "scheduler.pt")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What a checkpoint of ours holds beside Hugging Face's files.

    Attributes:
        counts: Tokens and loss of the run so far.
        sampler: ``state_dict`` of the batch sampler, or None.
    """

    counts: Counts
    sampler: dict[str, Any] | None


def find_resume(output_dir: str, asked: str | None, *, model_only: bool = False) -> str | None:
    """Say which checkpoint to go on from.

    Args:
        output_dir: Where checkpoints of this run are.
        asked: ``None``, ``"true"`` (the newest complete one, if any), ``"false"`` (none), or a checkpoint folder.
        model_only: Checkpoints are written without optimizer.

    Returns:
        The folder, or None to start from the beginning.

    Raises:
        CheckpointError: If a folder was named and it is no complete checkpoint.
    """
    word = (asked or "true").strip()
    if word.lower() in {"false", "none", ""}:
        return None
    if word.lower() != "true":
        fault = find_fault(Path(word), model_only=model_only)
        if fault is not None:
            raise CheckpointError(
                f"--resume_from_checkpoint {word} cannot be resumed from: {fault}; name a complete checkpoint, or "
                "pass true to take the newest complete one"
            )
        _warn_without_optimizer(Path(word))
        return word
    folder = Path(output_dir)
    numbered = [
        (int(match.group(1)), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and (match := _CHECKPOINT.fullmatch(path.name))
    ]
    for _, path in sorted(numbered, reverse=True):
        fault = find_fault(path, model_only=model_only)
        if fault is None:
            _log.info(
                "resuming from %s; to start over, pass --resume_from_checkpoint false or another output_dir", path
            )
            _warn_without_optimizer(path)
            return str(path)
        _log.warning("%s is incomplete (%s) and is passed over", path, fault)
    if numbered:
        _log.warning("%s holds no complete checkpoint: the run starts from the beginning", output_dir)
    return None


def _warn_without_optimizer(folder: Path) -> None:
    fault = find_fault(folder)
    if fault is not None:
        _log.warning("%s holds weights alone (%s): optimizer and learning rate start afresh", folder, fault)


def find_fault(folder: Path, *, model_only: bool = False) -> str | None:
    """Return why ``folder`` is no complete checkpoint, or None if it is one.

    Args:
        folder: A checkpoint folder.
        model_only: Do not ask for an optimizer.
    """
    if not folder.is_dir():
        return "the folder does not exist"
    state = folder / "trainer_state.json"
    if not state.is_file():
        return "trainer_state.json is missing"
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return "trainer_state.json is cut short"
    sharded_state = any(folder.glob("pytorch_model_fsdp*")) or any(folder.glob("global_step*"))
    if sharded_state:
        return None
    return find_weights_fault(folder) or (None if model_only else _find_optimizer_fault(folder))


def _find_optimizer_fault(folder: Path) -> str | None:
    for name in _OPTIMIZER_FILES:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if not is_whole(folder / name):
            return f"{name} is cut short"
    return None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Tell of a disk that is full or gone while something is written into ``folder``.

    Raises:
        CheckpointError: With what the system says; checkpoints that were complete before stay so.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        existing = folder
        while not os.path.isdir(existing) and existing != existing.parent:
            existing = existing.parent
        free_bytes = shutil.disk_usage(existing).free
        if isinstance(error, RuntimeError) and free_bytes >= _FULL_BELOW_BYTES:
            raise
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise CheckpointError(
            f"{folder} cannot be written: {why} ({free_bytes / 1e6:,.1f} MB are free there); make room or mend the "
            "folder, and start the same command again: it goes on from the last complete checkpoint"
        ) from error


def write_run_state(folder: Path, *, counts: Counts, sampler: dict[str, Any] | None) -> None:
    """Write our part of a checkpoint into ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"counts": dataclasses.asdict(counts), "sampler": sampler}
    (folder / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")


def read_run_state(folder: Path) -> RunState | None:
    """Return our part of a checkpoint; None if it was written by another trainer.

    Raises:
        CheckpointError: If the file is there and cannot be read.
    """
    path = folder / _STATE_FILE
    if not path.is_file():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return RunState(counts=Counts(**state["counts"]), sampler=state["sampler"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from an earlier checkpoint") from error


def write_added_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase, added: tuple[str, ...]) -> None:
    """Write which tokens the run added and their ids, as fms-hf-tuning does; nothing if there are none.

    ``folder`` is made where it is missing.
    """
    if added:
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in added}
        info = {"num_new_tokens": len(added), "added_tokens": ids}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _ADDED_TOKENS_FILE).write_text(json.dumps(info, ensure_ascii=False), encoding="utf-8")
