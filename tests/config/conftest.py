"""Fixtures of the tests of config."""

import pytest

from tuning.config import catalog
from tuning.config.training_fields import read_training_fields


@pytest.fixture(scope="session")
def training_fields_once():
    return read_training_fields()


@pytest.fixture(autouse=True)
def _read_sources_once(monkeypatch, training_fields_once):
    """Parsing reads the installed sources each time; the tests parse hundreds of command lines."""
    monkeypatch.setattr(catalog, "read_training_fields", lambda: training_fields_once)
