"""Training arguments: what packtune decides itself, and what happens to values that transformers or TRL refuse."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from trl import SFTConfig

from tuning.config import configs
from tuning.errors import ConfigError
from tuning.trainers import arguments
from tuning.trainers.arguments import TrainingArguments, build

IS_NEW = "activation_checkpointing" in {item.name for item in dataclasses.fields(TrainingArguments)}


@pytest.fixture
def make(tmp_path):
    """Build the arguments of a run on the CPU."""
    return lambda **values: build({"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", **values})


def refusal(make, **values) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**values)
    return str(caught.value)


def test_it_is_a_real_sft_config_and_the_name_of_the_config_room(make):
    assert issubclass(TrainingArguments, SFTConfig)
    assert configs.TrainingArguments is TrainingArguments
    assert isinstance(make(), TrainingArguments)


def test_fields_that_other_flags_decide_are_no_flags():
    hidden = {item.name for item in dataclasses.fields(TrainingArguments) if not item.init}
    assert {"padding_free", "dataset_text_field"} <= hidden
    own = {"gradient_checkpointing", "isolation_check", "max_length", "save_model_dir", "logging_nan_inf_filter"}
    assert own <= {item.name for item in dataclasses.fields(TrainingArguments) if item.init}


def test_defaults(make):
    args = make()
    assert args.padding_free is False
    assert args.max_length is None
    assert args.isolation_check == "on"
    assert args.save_model_dir is None
    assert args.logging_nan_inf_filter is False
    assert args.average_tokens_across_devices is True


# ---- gradient checkpointing ----


@pytest.mark.parametrize(
    ("value", "on", "auto"),
    [
        ("auto", False, True),
        ("AUTO", False, True),
        (None, False, True),
        ("true", True, False),
        ("True", True, False),
        (True, True, False),
        ("1", True, False),
        ("false", False, False),
        (False, False, False),
        ("no", False, False),
    ],
)
def test_gradient_checkpointing_on_the_cpu(make, recwarn, value, on, auto):
    args = make(gradient_checkpointing=value)
    assert (args.gradient_checkpointing, args.is_checkpointing_auto) == (on, auto)
    if IS_NEW:
        assert args.activation_checkpointing is on
    assert [str(w.message) for w in recwarn if "checkpointing" in str(w.message)] == []


def test_auto_recomputes_on_a_gpu():
    assert arguments._read_checkpointing("auto", on_cpu=False) == (True, True)
    assert arguments._read_checkpointing("auto", on_cpu=True) == (False, True)


def test_a_word_that_is_none(make):
    assert refusal(make, gradient_checkpointing="sometimes") == (
        "--gradient_checkpointing sometimes is not known; use true, false or auto"
    )


@pytest.mark.skipif(not IS_NEW, reason="transformers before 5.24 has the old name alone")
def test_two_names_that_contradict_each_other(make):
    assert refusal(make, gradient_checkpointing="true", activation_checkpointing=False) == (
        "--gradient_checkpointing true and --activation_checkpointing false contradict each other; keep one"
    )
    assert refusal(make, gradient_checkpointing=False, activation_checkpointing=True) == (
        "--gradient_checkpointing false and --activation_checkpointing true contradict each other; keep one"
    )


@pytest.mark.skipif(not IS_NEW, reason="transformers before 5.24 has the old name alone")
def test_the_newer_name_alone_decides(make):
    assert make(activation_checkpointing=True).gradient_checkpointing is True
    assert make(activation_checkpointing=True, gradient_checkpointing="true").activation_checkpointing is True
    # auto gives way, and then it was not left to us
    assert make(activation_checkpointing=True).is_checkpointing_auto is False
    assert make(activation_checkpointing=False).is_checkpointing_auto is False


@pytest.mark.skipif(not IS_NEW, reason="transformers before 5.24 has the old name alone")
def test_options_of_checkpointing_keep_either_name(make):
    assert make(gradient_checkpointing_kwargs={"use_reentrant": True}).activation_checkpointing_kwargs == {
        "use_reentrant": True
    }
    assert make(activation_checkpointing_kwargs={"every_n_layers": 2}).gradient_checkpointing_kwargs == {
        "every_n_layers": 2
    }
    assert refusal(
        make,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        activation_checkpointing_kwargs={"use_reentrant": False},
    ) == (
        "--gradient_checkpointing_kwargs {'use_reentrant': True} and --activation_checkpointing_kwargs "
        "{'use_reentrant': False} contradict each other; keep one"
    )


def test_older_transformers_keep_the_old_name(make, monkeypatch):
    args = make()
    fields = [item for item in dataclasses.fields(args) if not item.name.startswith("activation_checkpointing")]
    monkeypatch.setattr(arguments.dataclasses, "fields", lambda _: fields)
    args._set_checkpointing(True)
    assert vars(args)["gradient_checkpointing"] is True


# ---- dtype ----


def test_no_mixed_precision_on_the_cpu_unless_asked_for(make):
    assert make().bf16 is False
    assert make(bf16=False).bf16 is False
    assert make(bf16=True).bf16 is True


def test_a_machine_without_gpu_is_a_cpu_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = build({"output_dir": str(tmp_path), "report_to": "none"})
    assert (args.bf16, args.device.type) == (False, "cpu")


def test_fp16_needs_a_gpu(make):
    assert refusal(make, fp16=True) == (
        "--fp16 needs a GPU, and this run is on the CPU; drop it, or use --bf16 true, which the CPU can do"
    )


# ---- what upstream refuses ----


def test_a_value_that_upstream_refuses(make):
    text = refusal(make, load_best_model_at_end=True)
    assert text.startswith("The training arguments were refused: --load_best_model_at_end requires the save and eval ")
    text = refusal(make, optim="foo")
    assert text.startswith("The training arguments were refused: foo is not a valid OptimizerNames, please select one")


def test_a_name_that_is_no_field(make):
    assert refusal(make, nope=1) == (
        "The training arguments were refused: TrainingArguments.__init__() got an unexpected keyword argument 'nope'"
    )


def test_they_can_be_written_as_json(make):
    written = json.loads(make(gradient_checkpointing="true").to_json_string())
    assert written["gradient_checkpointing"] is True


def test_offloading_needs_a_gpu(make):
    with pytest.raises(ConfigError) as caught:
        make(activation_offloading=True)
    assert str(caught.value) == (
        "--activation_offloading moves activations from the GPU to the CPU, and this run is on the CPU; drop it"
    )


def test_a_tracker_that_is_none(make):
    with pytest.raises(ConfigError) as caught:
        make(report_to="notebook")
    text = str(caught.value)
    assert text.startswith("--report_to names notebook, which is no tracker; name one of azure_ml, ")
    assert text.endswith(", wandb, all, or none")


def test_a_tracker_that_is_not_installed(make, monkeypatch):
    monkeypatch.setattr("tuning.trainers.arguments.get_available_reporting_integrations", lambda: ["mlflow"])
    with pytest.raises(ConfigError) as caught:
        make(report_to=["mlflow", "wandb"])
    assert str(caught.value) == (
        "--report_to names wandb, but its package is not installed; pip install wandb, or use --report_to none"
    )
    assert make(report_to="mlflow").report_to == ["mlflow"]
