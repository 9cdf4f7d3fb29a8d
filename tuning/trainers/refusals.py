"""What upstream refuses, told as what it is: a flag that cannot be followed.

transformers and TRL raise plain errors, from deep inside, for an optimizer whose package is not installed, a schedule
without its options, or a metric that no evaluation has. A user can mend these, so they become one message before the
first step. Where upstream takes an option and does nothing with it, it is refused here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuning.errors import CheckpointError, ConfigError, UserError
from tuning.logs import logger

if TYPE_CHECKING:
    import torch

    from tuning.trainers.arguments import TrainingArguments

__all__ = [
    "check_best_metric",
    "check_optimizer_options",
    "of_optimizer",
    "of_push",
    "of_repository",
    "of_schedule",
    "of_trainer",
    "told",
]

_log = logger(__name__)
# what an evaluation of ours always reports
_EVAL_METRICS = (
    "loss", "mean_token_accuracy", "entropy", "num_tokens", "runtime", "samples_per_second", "steps_per_second",
)  # fmt: skip


@contextmanager
def told(say: Callable[[str], UserError], *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of upstream code into one of ours.

    Args:
        say: Makes our error of the first line of upstream's.
        *kinds: What is turned; anything else passes.

    Raises:
        UserError: As ``say`` makes it.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        _log.debug("refused by upstream", exc_info=True)
        raise say(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def of_trainer() -> AbstractContextManager[None]:
    """Tell of arguments that the constructors of transformers and TRL refuse."""
    return told(lambda why: ConfigError(f"The trainer refuses these arguments: {why}"), ValueError, ImportError)


def of_optimizer(args: TrainingArguments) -> AbstractContextManager[None]:
    """Tell of an optimizer that cannot be made."""
    flags = f"--optim {args.optim.value}" + (f" with --optim_args {args.optim_args}" if args.optim_args else "")
    return told(
        lambda why: ConfigError(f"{flags} cannot be used: {why}; mend that or choose another --optim"),
        ImportError, ValueError, TypeError,
    )  # fmt: skip


def of_schedule(args: TrainingArguments) -> AbstractContextManager[None]:
    """Tell of a learning rate schedule that lacks an option or does not take one."""
    options = args.lr_scheduler_kwargs or "{}"
    return told(
        lambda why: ConfigError(
            f"--lr_scheduler_type {args.lr_scheduler_type.value} does not go with --lr_scheduler_kwargs {options}: "
            f"{why}; correct the options"
        ),
        ValueError, TypeError,
    )  # fmt: skip


def of_repository(args: TrainingArguments) -> AbstractContextManager[None]:
    """Tell of a hub on which no repository can be made."""
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    return told(
        lambda why: ConfigError(
            f"--push_to_hub was asked for, but the repository {name} cannot be made on the hub ({why}); log in with "
            "hf auth login, correct --hub_model_id, or drop --push_to_hub"
        ),
        Exception,  # the hub's client lets the errors of its HTTP library through
    )


def of_push(folder: str, repository: str | None) -> AbstractContextManager[None]:
    """Tell of a hub that does not take the model, which is saved."""
    return told(
        lambda why: CheckpointError(
            f"The model is in {folder}, but it could not be pushed to {repository} ({why}); push it with hf upload "
            f"{repository} {folder}"
        ),
        Exception,  # as above
    )


def check_best_metric(args: TrainingArguments) -> None:
    """Refuse a ``metric_for_best_model`` that no evaluation of ours has; upstream stops at the first evaluation.

    Raises:
        ConfigError: If evaluations are made and none reports it.
    """
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no" or metric.removeprefix("eval_") in _EVAL_METRICS:
        return
    raise ConfigError(
        f"--metric_for_best_model is {metric}, which evaluations do not report; name one of {', '.join(_EVAL_METRICS)}"
    )


def check_optimizer_options(optimizer: torch.optim.Optimizer, optim: str, optim_args: str | None) -> None:
    """Refuse an entry of ``optim_args`` that is not in the optimizer as it was made; upstream drops it.

    Args:
        optimizer: Made from the two flags.
        optim: Value of ``--optim``.
        optim_args: ``name=value`` with commas between, or None.

    Raises:
        ConfigError: If the optimizer has no such option, or has it with another value.
    """
    if not optim_args or optim.endswith("_layerwise"):  # those make an optimizer a layer, out of reach from here
        return
    options: Mapping[str, Any] = {key: value for group in optimizer.param_groups for key, value in group.items()}
    options = {**options, **optimizer.defaults}
    for entry in optim_args.replace(" ", "").split(","):
        name, _, value = entry.partition("=")
        if name in options and _is_same(options[name], value):
            continue
        known = ", ".join(sorted(set(options) - {"params"}))
        raise ConfigError(
            f"--optim_args {entry} does nothing with --optim {optim}: {type(optimizer).__name__} was made without it. "
            f"Its options are {known}; some have flags of their own, such as --weight_decay. Drop the entry"
        )


def _is_same(value: object, text: str) -> bool:
    """Say whether an option has the value of a text; what is neither number nor boolean cannot be told and passes."""
    if isinstance(value, bool):
        return value is (text.lower() in ("true", "1", "yes"))
    if not isinstance(value, (int, float)):
        return True
    try:
        return float(text) == float(value)
    except ValueError:
        return False
