"""The settings of generation that come with a model, made fit to be saved.

Training does not use them, but they are saved beside every checkpoint, and transformers refuses to save settings that
contradict each other. Many published models have such (a temperature without ``do_sample``), and the refusal would
come at the first checkpoint, when hours of training are lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuning.errors import ModelError
from tuning.logs import logger

if TYPE_CHECKING:
    from torch import nn

__all__ = ["mend_generation_config_"]

_log = logger(__name__)


def mend_generation_config_(model: nn.Module, name: str) -> None:
    """Switch ``do_sample`` on in the generation config of ``model``, in place, where its settings ask for sampling.

    Args:
        model: As loaded.
        name: Of the checkpoint, for messages.

    Raises:
        ModelError: If the settings contradict each other in another way.
    """
    config: Any = getattr(model, "generation_config", None)
    if config is None or _find_fault(config) is None:
        return
    config.do_sample = True
    fault = _find_fault(config)
    if fault is not None:
        raise ModelError(
            f"The generation_config.json of {name} cannot be saved beside a checkpoint: {fault}; correct or remove "
            "the file"
        )
    _log.warning(
        "the generation_config.json of %s has settings of sampling without do_sample, which cannot be saved; it is "
        "saved with do_sample true",
        name,
    )


def _find_fault(config: Any) -> str | None:  # noqa: ANN401 - a GenerationConfig
    try:
        config.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())[:300].rstrip(".")
    return None
