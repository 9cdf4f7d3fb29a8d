from importlib import metadata

import pytest

from tuning.config import catalog
from tuning.config.catalog import NESTED_TYPES, PATH_OR_OBJECT, list_flags, own_flags
from tuning.config.values import UNSET


@pytest.fixture(scope="module")
def flags():
    return list_flags()


def test_names_and_aliases_are_unique(flags):
    names = [name for spec in flags.values() for name in (spec.name, *spec.aliases)]
    assert sorted(names) == sorted(set(names))
    assert len([*own_flags()]) + len([spec for spec in flags.values() if spec.is_training]) == len(flags)


def test_every_flag_says_what_it_is(flags):
    assert [spec.name for spec in flags.values() if not spec.help] == []
    assert [spec.name for spec in flags.values() if not spec.kind.bases] == []


def test_nested_flags_are_those_of_the_bundle(flags):
    assert {name for name, spec in flags.items() if "nested" in spec.kind.bases} == set(NESTED_TYPES)


def test_text_is_no_object(flags):
    takes_both = {name for name, spec in flags.items() if {"dict", "str"} <= set(spec.kind.bases)}
    assert takes_both == PATH_OR_OBJECT


def test_booleans_alone_mean_true(flags):
    assert flags["bf16"].const is True
    assert flags["gradient_checkpointing"].const == "true"
    assert flags["max_steps"].const is UNSET


def test_third_party_plugins_are_flags_by_their_entry_point(monkeypatch):
    points = [
        metadata.EntryPoint(name="their_plugin", value="their.module:Plugin", group="tuning.plugins"),
        metadata.EntryPoint(name="multipack", value="their.module:Other", group="tuning.plugins"),
    ]
    monkeypatch.setattr(catalog.metadata, "entry_points", lambda group: points if group == "tuning.plugins" else [])
    flags = list_flags()
    assert flags["their_plugin"].owner == "plugin"
    assert flags["their_plugin"].help == "Options of the plugin their.module:Plugin."
    assert flags["multipack"].owner == "acceleration"
