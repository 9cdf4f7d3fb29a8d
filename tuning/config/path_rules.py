"""Rules on paths: what is read must be there, and what is written must be writable. Nothing is created.

``os.path.exists`` says no where ``Path.exists`` raises: of a text that is too long for a path, or holds a null byte.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tuning.config.catalog import PATH_OR_OBJECT
from tuning.config.run_config import RunConfig

__all__ = ["check_paths"]

_DATA_SUFFIXES = frozenset({".json", ".jsonl", ".csv", ".parquet", ".arrow", ".tsv", ".txt", ".gz", ".zst"})
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_paths(config: RunConfig) -> list[str]:
    """Return a sentence for every path that is missing, unreadable or not writable."""
    return [*_check_model(config), *_check_data(config), *_check_files(config), *_check_output(config)]


def _check_model(config: RunConfig) -> list[str]:
    name = config.model.model_name_or_path
    if not name:
        return ["--model_name_or_path is not given; name a folder, a hub model or a .gguf file"]
    problems = []
    if _is_path(name, suffixes=frozenset({".gguf"})) and not os.path.exists(name):
        problems.append(f"--model_name_or_path {name} does not exist; correct the path or give a hub name")
    elif os.path.exists(name):
        problems += _unreadable("--model_name_or_path", name)
    tokenizer = config.model.tokenizer_name_or_path
    if tokenizer and _is_path(tokenizer) and not os.path.exists(tokenizer):
        problems.append(f"--tokenizer_name_or_path {tokenizer} does not exist; correct the path or give a hub name")
    elif tokenizer and os.path.exists(tokenizer):
        problems += _unreadable("--tokenizer_name_or_path", tokenizer)
    if config.model.gguf_file and name.endswith(".gguf"):
        problems.append("--gguf_file names a file inside a folder, but --model_name_or_path is a .gguf file; keep one")
    return problems


def _check_data(config: RunConfig) -> list[str]:
    data, problems = config.data, []
    if not data.training_data_path and not data.data_config_path:
        problems.append("--training_data_path is not given; name a file, a folder or a hub data set")
    if data.training_data_path and data.data_config_path:
        problems.append("--training_data_path and --data_config_path both name the training data; keep one")
    for name in ("training_data_path", "validation_data_path"):
        path = getattr(data, name)
        if path and _is_path(path, suffixes=_DATA_SUFFIXES):
            problems += _unreadable(f"--{name}", path)
    return problems


def _check_files(config: RunConfig) -> list[str]:
    """Check flags whose text is always the path of a file."""
    problems = []
    if config.data.data_config_path:
        problems += _unreadable("--data_config_path", config.data.data_config_path)
    for name in sorted(PATH_OR_OBJECT):
        value = config.train.get(name)
        # deepspeed's auto is accelerate's
        if isinstance(value, str) and not (name == "deepspeed" and value == "auto"):
            problems += _unreadable(f"--{name}", value, "correct the path or give a JSON object")
    return problems


def _check_output(config: RunConfig) -> list[str]:
    output_dir = config.train.get("output_dir")
    if not output_dir:
        return ["--output_dir is not given; name a folder for checkpoints and the model"]
    problems = _unwritable("--output_dir", str(output_dir))
    save_dir = config.train.get("save_model_dir")
    return problems + (_unwritable("--save_model_dir", str(save_dir)) if save_dir else [])


def _is_path(text: str, *, suffixes: frozenset[str] = frozenset()) -> bool:
    """Say whether ``text`` can only be a path, or is one that exists; otherwise it may be a hub name."""
    return os.path.exists(text) or Path(text).suffix.lower() in suffixes or _HUB_NAME.fullmatch(text) is None


def _unreadable(label: str, path: str, advice: str = "correct the path") -> list[str]:
    if not os.path.exists(path):
        return [f"{label} {path} does not exist; {advice}"]
    if not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
        return [f"{label} {path} cannot be read; change its permissions or name another"]
    return []


def _unwritable(label: str, path: str) -> list[str]:
    target = Path(os.path.expanduser(path))
    if os.path.exists(target) and not os.path.isdir(target):
        return [f"{label} {path} is a file, not a folder; name a folder"]
    parent = target
    while not os.path.exists(parent) and parent != parent.parent:
        parent = parent.parent
    if not os.path.isdir(parent):
        return [f"{label} {path} cannot be made, since {parent} is a file; name another folder"]
    if not os.access(parent, os.W_OK | os.X_OK):
        where = "it" if parent == target else f"its parent {parent}"
        return [
            f"{label} {path} cannot be written, since {where} is read-only; change permissions or name another folder"
        ]
    return []
