"""Resolve, then check: every broken rule is found before anything is loaded, and all are told at once.

``resolve`` returns a new config and refuses nothing; ``check`` only reads. Neither imports torch, so a mistake is told
within a fraction of a second, and alike on every rank. The rules are in :mod:`tuning.config.rules`.
"""

from __future__ import annotations

import dataclasses

from tuning.config import rules
from tuning.config.run_config import RunConfig
from tuning.config.synonyms import find_conflicts, normalise_dtype, replace_synonyms
from tuning.environment import Launch
from tuning.errors import ConfigError

__all__ = ["check", "resolve"]


def resolve(config: RunConfig, launch: Launch) -> RunConfig:
    """Return ``config`` with one name for each thing; read only.

    Args:
        config: As parsed, or as a Python program made it.
        launch: How the process was launched.
    """
    notes = (*config.notes, *rules.find_notes(config))
    config = replace_synonyms(config)
    model = config.model
    if model.torch_dtype is not None:
        model = dataclasses.replace(model, torch_dtype=normalise_dtype(model.torch_dtype))
    return dataclasses.replace(config, model=model, notes=notes)


def check(config: RunConfig, launch: Launch) -> None:
    """Refuse what cannot work.

    Args:
        config: As :func:`resolve` returned it. ``config.train`` may hold some training arguments or all.
        launch: How the process was launched.

    Raises:
        ConfigError: With one sentence for every broken rule.
    """
    problems = find_conflicts(config)
    for rule in rules.RULES:
        problems += rule(config)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
