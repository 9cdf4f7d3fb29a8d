"""Settings of generation that upstream would refuse to save, at the first checkpoint."""

import logging

import pytest
from transformers import GenerationConfig

from tests.tiny import build_model
from tuning.errors import ModelError
from tuning.models.generation import mend_generation_config_


def model_with(**values):
    model = build_model()
    model.generation_config = GenerationConfig(**values)
    return model


def test_sampling_without_do_sample_is_mended_and_can_be_saved(tmp_path, caplog):
    """As many published checkpoints have it: https://github.com/huggingface/transformers/issues/30371."""
    model = model_with(temperature=0.5, top_p=0.9)
    with pytest.raises(ValueError, match="do_sample"):
        model.save_pretrained(tmp_path / "before")
    with caplog.at_level(logging.WARNING, logger="tuning"):
        mend_generation_config_(model, "some/model")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("tuning.")] == [
        "the generation_config.json of some/model has settings of sampling without do_sample, which cannot be saved; "
        "it is saved with do_sample true"
    ]
    model.save_pretrained(tmp_path / "after")
    saved = GenerationConfig.from_pretrained(tmp_path / "after")
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.5, 0.9)


def test_settings_that_are_fit_stay(caplog):
    model = model_with(max_new_tokens=7)
    before = model.generation_config.to_dict()
    mend_generation_config_(model, "some/model")
    assert model.generation_config.to_dict() == before
    assert not caplog.records


def test_settings_that_cannot_be_mended():
    model = model_with(temperature=0.5)
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ModelError) as caught:
        mend_generation_config_(model, "some/model")
    text = str(caught.value)
    assert text.startswith("The generation_config.json of some/model cannot be saved beside a checkpoint: ")
    assert text.endswith("; correct or remove the file")


def test_a_model_that_does_not_generate():
    model = build_model()
    model.generation_config = None
    mend_generation_config_(model, "some/model")
    assert model.generation_config is None
