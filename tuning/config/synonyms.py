"""Flags that say the same thing: one table says which of them is kept.

A run sees the kept name only. Two names with different values are an error, whichever source they come from; a flag of
the command line overrules every synonym in the file.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuning.config.acceleration_configs import FastKernelsConfig
from tuning.config.run_config import RunConfig
from tuning.config.values import show

__all__ = ["SYNONYMS", "Synonym", "find_conflicts", "normalise_dtype", "replace_synonyms", "same_thing"]

_DTYPE_WORDS = types.MappingProxyType(
    {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
)


def _same(value: Any) -> Any:  # noqa: ANN401 - any value
    return value


def _word(value: Any) -> str | None:  # noqa: ANN401 - a boolean, or None
    return None if value is None else str(value).lower()


def normalise_dtype(value: Any) -> str:  # noqa: ANN401 - a text or a torch.dtype
    """Return the name of a dtype as ``torch_dtype`` has it; an unknown one stays as it is."""
    text = str(value).removeprefix("torch.")
    return _DTYPE_WORDS.get(text, text)


def _auto_kernels(value: Any) -> FastKernelsConfig | None:  # noqa: ANN401 - a boolean
    return FastKernelsConfig(auto=True) if value is True else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Synonym:
    """Two names of one thing.

    Attributes:
        kept: The flag a run sees.
        other: A training argument, or ``model_init_kwargs.key``.
        convert: Makes of a value of ``other`` one of ``kept``; None: it asks for nothing.
        meaning: What a value of ``other`` becomes, in words.
    """

    kept: str
    other: str
    convert: Callable[[Any], Any] = _same
    meaning: str = "the same value"


SYNONYMS = (
    Synonym(kept="max_seq_length", other="max_length"),
    Synonym(kept="torch_dtype", other="model_init_kwargs.dtype", convert=normalise_dtype),
    Synonym(kept="torch_dtype", other="model_init_kwargs.torch_dtype", convert=normalise_dtype),
    Synonym(kept="model_revision", other="model_init_kwargs.revision"),
    Synonym(kept="trust_remote_code", other="model_init_kwargs.trust_remote_code"),
    Synonym(kept="fast_kernels", other="use_liger_kernel", convert=_auto_kernels, meaning="true: auto"),
    Synonym(
        kept="train_on_input",
        other="completion_only_loss",
        convert=lambda value: None if value is None else not value,
        meaning="true: false; false: true",
    ),
    Synonym(
        kept="train_on_input",
        other="assistant_only_loss",
        convert=lambda value: False if value is True else None,
        meaning="true: false; false asks for nothing, and the other flags decide",
    ),
    Synonym(kept="preprocessing_num_workers", other="dataset_num_proc"),
    Synonym(kept="chat_template", other="chat_template_path", meaning="the path of a template file"),
    Synonym(
        kept="gradient_checkpointing",
        other="activation_checkpointing",
        convert=_word,
        meaning="the same value",
    ),
    Synonym(kept="gradient_checkpointing_kwargs", other="activation_checkpointing_kwargs"),
)


def same_thing(name: str) -> frozenset[str]:
    """Return ``name`` and every flag that says the same thing."""
    pairs = [(item.kept, item.other) for item in SYNONYMS] + [("report_to", "trackers")]
    kept = next((pair[0] for pair in pairs if name in pair), name)
    return frozenset({name, kept, *(other for first, other in pairs if first == kept)})


def find_conflicts(config: RunConfig) -> list[str]:
    """Return a sentence for every two names of one thing that have different values."""
    problems = []
    for item in SYNONYMS:
        raw, converted, kept = _read_other(config, item), _convert_other(config, item), _read_kept(config, item.kept)
        if converted is not None and kept is not None and kept != converted:
            problems.append(
                f"--{item.kept} {_show(kept)} and --{item.other} {_show(raw)} say different things about one setting; "
                "keep one"
            )
    return problems


def replace_synonyms(config: RunConfig) -> RunConfig:
    """Return ``config`` with each thing under the name that is kept; names in conflict stay, for the check."""
    for item in SYNONYMS:
        converted, kept = _convert_other(config, item), _read_kept(config, item.kept)
        if converted is not None and kept in (None, converted):
            config = _drop(_with_value(config, item.kept, converted), item.other)
        elif converted is None and _read_other(config, item) is not None:
            config = _drop(config, item.other)
    return config


def _convert_other(config: RunConfig, item: Synonym) -> Any:  # noqa: ANN401 - any value
    raw = _read_other(config, item)
    return None if raw is None else item.convert(raw)


def _read_other(config: RunConfig, item: Synonym) -> Any:  # noqa: ANN401 - any value
    first, _, key = item.other.partition(".")
    value = config.train.get(first)
    if not key:
        return value
    return value.get(key) if isinstance(value, Mapping) else None


def _read_kept(config: RunConfig, name: str) -> Any:  # noqa: ANN401 - any value
    """Return what the kept flag asks for, None if it has its default and was not given."""
    if name == "fast_kernels":
        return config.acceleration.kernels.fast_kernels
    for part in (config.model, config.data):
        for field in dataclasses.fields(part):
            if field.name == name:
                value = getattr(part, name)
                value = normalise_dtype(value) if name == "torch_dtype" and value is not None else value
                return value if name in config.given or value != field.default else None
    value = config.train.get(name)
    if name in config.given:
        return value
    return None if value in (False, "auto") else value


def _with_value(config: RunConfig, name: str, value: Any) -> RunConfig:  # noqa: ANN401 - any value
    given = config.given | {name}
    if name == "fast_kernels":
        kernels = dataclasses.replace(config.acceleration.kernels, fast_kernels=value)
        acceleration = dataclasses.replace(config.acceleration, kernels=kernels)
        return dataclasses.replace(config, acceleration=acceleration, given=given)
    if name in {field.name for field in dataclasses.fields(config.model)}:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **{name: value}), given=given)
    if name in {field.name for field in dataclasses.fields(config.data)}:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, **{name: value}), given=given)
    return dataclasses.replace(config, train=types.MappingProxyType({**config.train, name: value}), given=given)


def _drop(config: RunConfig, name: str) -> RunConfig:
    first, _, key = name.partition(".")
    train = {key_: value for key_, value in config.train.items() if key_ != first}
    rest = {key_: value for key_, value in config.train[first].items() if key_ != key} if key else None
    if rest:
        train[first] = rest
    given = config.given if rest else config.given - {first}
    return dataclasses.replace(config, train=types.MappingProxyType(train), given=given)


def _show(value: Any) -> str:  # noqa: ANN401 - any value
    if isinstance(value, FastKernelsConfig):
        return "auto" if value.auto else " ".join(value.kernels)
    return value if isinstance(value, str) else show(value)
