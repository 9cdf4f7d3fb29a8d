"""The plugin interface: every hook has a default that takes no seat, and Facts cannot be written to."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from torch import nn

from tuning.acceleration.plugin import AccelerationPlugin, Facts, Patch
from tuning.seats import Seats


@dataclasses.dataclass
class Config:
    size: int = 1


class Bare(AccelerationPlugin[Config]):
    name = "bare"
    config_type = Config


HOOKS = (
    "batch_sampler",
    "callbacks",
    "check",
    "check_model",
    "collator",
    "load_model",
    "loss",
    "may_do_nothing",
    "patches",
    "self_test",
)


def facts(**values) -> Facts:
    known = {
        "model_config": None,
        "model_name_or_path": "m",
        "model_kwargs": {},
        "train_args": None,
        "peft_config": None,
        "active": frozenset(),
        "world_size": 1,
        "rank": 0,
        "seed": 0,
        "device_type": "cpu",
        "compute_capability": None,
    }
    return Facts(**{**known, **values})


def test_hooks_are_frozen_names():
    # a new hook is a conversation: third parties subclass this class
    public = {name for name, value in vars(AccelerationPlugin).items() if inspect.isfunction(value) and name[0] != "_"}
    assert public == set(HOOKS)


def test_every_hook_says_what_it_does():
    assert [name for name in HOOKS if not inspect.getdoc(getattr(AccelerationPlugin, name))] == []


def test_a_plugin_that_overrides_nothing_takes_no_seat():
    plugin = Bare(Config(size=3))
    model = nn.Linear(2, 2)
    assert plugin.config.size == 3
    assert plugin.may_do_nothing() is False
    assert plugin.check(facts()) is None
    assert plugin.check_model(model, facts()) is None
    assert plugin.load_model(facts()) is None
    assert tuple(plugin.patches(model, facts())) == ()
    assert plugin.self_test(model, {}) is None
    assert plugin.collator(lambda samples: {}, facts()) is None
    assert plugin.batch_sampler([1], facts()) is None
    assert plugin.loss(facts()) is None
    assert tuple(plugin.callbacks()) == ()


def test_class_attributes_ask_for_nothing_by_default():
    assert Bare.requires == Bare.conflicts == frozenset()
    assert Bare.packages == ()
    assert Bare.stable is True


@pytest.mark.parametrize("value", [facts(), Patch(name="a.b", target="", apply=lambda module: None)])
def test_values_that_travel_are_frozen(value):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises((AttributeError, TypeError)):
        value.another = 1


def test_seats_by_default_leave_everything_to_the_trainer():
    seats = Seats(collator=lambda samples: {})
    assert (seats.batch_sampler, seats.loss, seats.callbacks) == (None, None, ())
