"""Resolve synonyms, then check every rule."""

from __future__ import annotations

from tuning.config.run_config import RunConfig
from tuning.environment import Launch

__all__ = ["check", "resolve"]


def resolve(config: RunConfig, launch: Launch) -> RunConfig:
    """Return ``config`` with one name for each thing."""
    return config


def check(config: RunConfig, launch: Launch) -> None:
    """Raise with every broken rule."""
