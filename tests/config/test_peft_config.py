import dataclasses

import pytest

from tuning.config.peft_config import LoraConfig, PromptTuningConfig


def test_defaults_are_those_of_the_flags():
    assert (LoraConfig().r, LoraConfig().lora_alpha, LoraConfig().lora_dropout) == (8, 32, 0.05)
    assert PromptTuningConfig().num_virtual_tokens == 8


def test_they_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoraConfig().r = 4
