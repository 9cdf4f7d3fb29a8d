"""Rules on numbers: one table says what each takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

from tuning.config.run_config import RunConfig
from tuning.config.values import show

__all__ = ["check_numbers"]

_Test = Callable[[Any], bool]


def _at_least(low: float) -> _Test:
    return lambda value: low <= value < math.inf


def _above(low: float) -> _Test:
    return lambda value: low < value < math.inf


def _in_share(value: float) -> bool:
    return 0 <= value < 1


def _is_step_count(value: float) -> bool:
    return 0 < value < 1 or (value >= 1 and float(value).is_integer())


_TOO_LARGE: Final = 2**63
# 2**32: the seeds numpy takes
_SEED: tuple[str, _Test] = ("a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32)
_COUNT: tuple[str, _Test] = ("a whole number from 1", _at_least(1))
_FROM_0: tuple[str, _Test] = ("a number from 0", _at_least(0))
_SHARE: tuple[str, _Test] = ("a number from 0 to below 1", _in_share)
_STEPS: tuple[str, _Test] = ("a whole number of steps from 1, or a share of all steps below 1", _is_step_count)

# training argument -> what it takes
_TRAIN: Final[dict[str, tuple[str, _Test]]] = {
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": ("a number above 0", _above(0)),
    "data_seed": _SEED,
    "dataloader_num_workers": ("a whole number from 0", _at_least(0)),
    "dataloader_prefetch_factor": _COUNT,
    "dataset_num_proc": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "eval_delay": _FROM_0,
    "gradient_accumulation_steps": _COUNT,
    "label_smoothing_factor": _SHARE,
    "learning_rate": _FROM_0,
    # infinity measures the norm without clipping
    "max_grad_norm": ("a number from 0", lambda value: value >= 0),
    "max_length": ("a whole number from 2", _at_least(2)),
    "max_steps": ("-1 for no limit, or a whole number from 1", lambda value: value == -1 or value >= 1),
    "neftune_noise_alpha": ("a number above 0", _above(0)),
    "pad_to_multiple_of": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "per_device_train_batch_size": _COUNT,
    "router_aux_loss_coef": _FROM_0,
    "save_total_limit": _COUNT,
    "seed": _SEED,
    "torch_empty_cache_steps": _COUNT,
    "warmup_steps": _FROM_0,
    "weight_decay": _FROM_0,
}
_OURS: Final[dict[str, tuple[str, _Test]]] = {
    "embedding_size_multiple_of": _COUNT,
    "lora_alpha": ("a number above 0", _above(0)),
    "lora_dropout": _SHARE,
    "max_seq_length": ("a whole number from 2", _at_least(2)),
    "num_virtual_tokens": _COUNT,
    "preprocessing_num_workers": _COUNT,
    "r": _COUNT,
    "validation_split": _SHARE,
}
_MULTIPACK: Final[dict[str, tuple[str, _Test]]] = {"num_processes": _COUNT, "max_tokens": _COUNT}


def check_numbers(config: RunConfig) -> list[str]:
    """Return a sentence for every number outside of what its flag takes."""
    problems = []
    for part in (config.model, config.data, config.peft):
        if part is not None and dataclasses.is_dataclass(part):
            for item in dataclasses.fields(part):
                problems += _judge(f"--{item.name}", getattr(part, item.name), _OURS.get(item.name))
    multipack = config.acceleration.attention.multipack
    if multipack is not None:
        for name, rule in _MULTIPACK.items():
            problems += _judge(f"--multipack {name}", getattr(multipack, name), rule)
    for name, rule in _TRAIN.items():
        problems += _judge(f"--{name}", config.train.get(name), rule)
    return [*problems, *_check_duration(config), *_check_intervals(config)]


def _judge(label: str, value: Any, rule: tuple[str, _Test] | None) -> list[str]:  # noqa: ANN401 - any field
    if rule is None or value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    words, test = rule
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        return [f"{label} is {value}, which no count of 64 bits can hold; correct the value"]
    return [] if test(value) else [f"{label} is {show(value)}, but takes {words}; correct the value"]


def _check_duration(config: RunConfig) -> list[str]:
    epochs, steps = config.train.get("num_train_epochs"), config.train.get("max_steps")
    if epochs is not None and (steps is None or steps == -1):
        return _judge("--num_train_epochs", epochs, ("a number above 0, unless --max_steps is given", _above(0)))
    return []


def _check_intervals(config: RunConfig) -> list[str]:
    problems = []
    for name in ("logging", "eval", "save"):
        strategy = config.train.get(f"{name}_strategy")
        strategy = getattr(strategy, "value", strategy)
        if strategy == "steps" or (strategy is None and name != "eval"):
            problems += _judge(f"--{name}_steps", config.train.get(f"{name}_steps"), _STEPS)
    workers = config.train.get("dataloader_num_workers") or 0
    if config.train.get("dataloader_prefetch_factor") is not None and workers < 1:
        problems.append(
            "--dataloader_prefetch_factor is for worker processes, but --dataloader_num_workers is 0; give workers or "
            "drop it"
        )
    return problems
