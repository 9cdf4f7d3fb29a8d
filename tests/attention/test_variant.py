"""A variant is a value."""

import dataclasses

import pytest

from tuning.attention.variant import PLAIN, Variant


def test_plain_adds_nothing():
    assert Variant() == PLAIN
    assert (PLAIN.window, PLAIN.scale, PLAIN.softcap, PLAIN.sinks, PLAIN.dropout) == (None, None, None, None, 0.0)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.window = 3
