import dataclasses

import pytest

from tuning.config.run_config import RunConfig


def test_a_run_of_defaults():
    config = RunConfig()
    assert config.acceleration.active() == {}
    assert (config.peft, config.given, config.notes) == (None, frozenset(), ())


def test_it_is_frozen():
    config = RunConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.peft_method = "lora"
    with pytest.raises(TypeError):
        config.train["max_steps"] = 1
