import json
from importlib import metadata

import pytest

from tests.config.inputs import launch, problems_of, read, write_json
from tuning.config import catalog
from tuning.config.acceleration_configs import (
    BNBQLoraConfig,
    FastKernelsConfig,
    FusedLoraConfig,
    MultiPack,
    PaddingFree,
)
from tuning.config.parsing import parse, parse_mapping
from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.errors import ConfigError


def test_nothing_given_is_nothing_but_defaults():
    config = read()
    assert (config.train, config.peft, config.peft_method, config.given) == ({}, None, "none", frozenset())
    assert config.acceleration.active() == {}
    assert (config.source, config.notes, config.exp_metadata) == (None, (), None)


def test_values_are_typed_and_go_where_they_belong():
    config = read(
        "--model_name_or_path", "m", "--max_seq_length", "512", "--learning_rate", "1e-5", "--bf16", "--max_steps", "2",
        "--lr_scheduler_kwargs", '{"num_cycles": 1}', "--peft_method", "lora", "--r", "4", "--target_modules", "a", "b",
        "--padding_free", "huggingface", "--fast_kernels", "rope",
    )  # fmt: skip
    assert config.model.model_name_or_path == "m"
    assert config.data.max_seq_length == 512
    assert config.train == {
        "learning_rate": 1e-5,
        "bf16": True,
        "max_steps": 2,
        "lr_scheduler_kwargs": {"num_cycles": 1},
    }
    assert config.peft == LoraConfig(r=4, target_modules=["a", "b"])
    assert config.acceleration.active() == {
        "padding_free": PaddingFree(),
        "fast_kernels": FastKernelsConfig(kernels=("rope",)),
    }
    assert {"learning_rate", "r", "padding_free", "model_name_or_path"} <= config.given


def test_the_config_is_frozen():
    config = read("--max_steps", "2")
    with pytest.raises(AttributeError):
        config.peft_method = "lora"
    with pytest.raises(TypeError):
        config.train["max_steps"] = 3


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("how", ["flag", "place", "variable"])
def test_a_file_means_what_the_command_line_means(tmp_path, suffix, how):
    values = {
        "learning_rate": "1e-5", "bf16": "false", "max_steps": "2", "logging_steps": 1, "packing": False,
        "lr_scheduler_kwargs": {"num_cycles": 1}, "target_modules": ["a"], "peft_method": "lora", "run_name": None,
        "padding_free": ["huggingface"], "multipack": {"num_processes": "4"}, "eval_strategy": "no",
    }  # fmt: skip
    path = tmp_path / f"run.{suffix}"
    path.write_text(json.dumps(values))
    argv = {"flag": ["--config", str(path)], "place": [str(path)], "variable": []}[how]
    config = read(*argv, config_path=str(path) if how == "variable" else None)
    assert config.train == {
        "learning_rate": 1e-5, "bf16": False, "max_steps": 2, "logging_steps": 1.0, "packing": False,
        "lr_scheduler_kwargs": {"num_cycles": 1}, "eval_strategy": "no",
    }  # fmt: skip
    assert config.peft == LoraConfig(target_modules=["a"])
    assert config.acceleration.active() == {"padding_free": PaddingFree(), "multipack": MultiPack(num_processes=4)}
    assert config.source == str(path)
    assert "run_name" not in config.given


def test_the_command_line_wins_over_the_file(tmp_path):
    path = write_json(tmp_path / "run.json", {"max_steps": 5, "seed": 1, "multipack": 4, "learning_rate": "bad"})
    config = read(path, "--max_steps", "2", "--multipack", "8", "--learning_rate", "1.0")
    assert config.train == {"max_steps": 2, "seed": 1, "learning_rate": 1.0}
    assert config.acceleration.attention.multipack == MultiPack(num_processes=8)


def test_the_command_line_turns_off_what_the_file_turns_on(tmp_path):
    path = write_json(tmp_path / "run.json", {"padding_free": "huggingface", "bf16": True})
    config = read(path, "--padding_free", "false", "--bf16", "false")
    assert config.acceleration.active() == {}
    assert config.train == {"bf16": False}


@pytest.mark.parametrize(
    ("in_file", "argv", "expected"),
    [
        ({"max_length": 64}, ["--max_seq_length", "128"], {"max_seq_length"}),
        ({"max_seq_length": 64}, ["--max_length", "128"], {"max_length"}),
        ({"completion_only_loss": True}, ["--assistant_only_loss"], {"assistant_only_loss"}),
        ({"evaluation_strategy": "steps"}, ["--eval_strategy", "no"], {"eval_strategy"}),
        ({"bitsandbytes": "nf4"}, ["--bnb_qlora", "fp4"], {"bnb_qlora"}),
        ({"trackers": ["wandb"]}, ["--report_to", "mlflow"], {"report_to"}),
        ({"use_liger_kernel": True}, ["--fast_kernels", "rope"], {"fast_kernels"}),
    ],
)
def test_the_command_line_wins_over_synonyms_in_the_file(tmp_path, in_file, argv, expected):
    assert read(write_json(tmp_path / "run.json", in_file), *argv).given == expected


def test_the_file_of_the_command_line_wins_over_the_variable(tmp_path):
    first = write_json(tmp_path / "a.json", {"seed": 1})
    second = write_json(tmp_path / "b.json", {"seed": 2})
    config = read(first, config_path=second)
    assert config.train == {"seed": 1}
    assert config.notes == (f"{first} is read, and not {second}, which SFT_TRAINER_CONFIG_JSON_PATH names",)


def test_a_flag_given_twice_is_noted():
    config = read("--max_steps", "1", "--max_steps", "2")
    assert config.train == {"max_steps": 2}
    assert config.notes == ("--max_steps was given more than once; the last one counts",)


def test_two_names_of_one_flag_in_one_source():
    assert problems_of("--bnb_qlora", "nf4", "--bitsandbytes", "fp4") == [
        '--bnb_qlora ["nf4"] and --bitsandbytes ["fp4"] are two names of one flag with different values; keep one'
    ]
    assert problems_of("--bnb_qlora", "nf4", "--bitsandbytes", "nf4") == []


@pytest.mark.parametrize("value", ["none", "None", None])
def test_no_peft_method(tmp_path, value):
    config = read(write_json(tmp_path / "run.json", {"peft_method": value}))
    assert (config.peft_method, config.peft) == ("none", None)


def test_peft_methods():
    assert read("--peft_method", "LORA").peft == LoraConfig()
    config = read("--peft_method", "pt", "--num_virtual_tokens", "4", "--prompt_tuning_init", "random")
    assert config.peft == PromptTuningConfig(num_virtual_tokens=4, prompt_tuning_init="RANDOM")


@pytest.mark.parametrize("argv", [["--exp_metadata", '{"gpu": "H200"}'], ["{file}"]])
def test_exp_metadata(tmp_path, argv):
    path = write_json(tmp_path / "run.json", {"exp_metadata": {"gpu": "H200"}})
    assert read(*[token.replace("{file}", path) for token in argv]).exp_metadata == {"gpu": "H200"}


@pytest.mark.parametrize("argv", [["--gradient_checkpointing"], ["--gradient_checkpointing", "True"]])
def test_gradient_checkpointing_is_a_word(argv, tmp_path):
    assert read(*argv).train == {"gradient_checkpointing": "true"}
    assert read(write_json(tmp_path / "run.json", {"gradient_checkpointing": False})).train == {
        "gradient_checkpointing": "false"
    }


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--fsdp"], True),
        (["--fsdp", "true"], True),
        (["--fsdp", "full_shard auto_wrap"], "full_shard auto_wrap"),
    ],
)
def test_fsdp_is_a_boolean_or_text(argv, expected):
    assert read(*argv).train == {"fsdp": expected}


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (
            ["--fast_kernels", "False", "False", "False"],
            "--fast_kernels False False False asks for nothing, so it is off",
        ),
        (["--fast_kernels", "none"], "--fast_kernels none asks for nothing, so it is off"),
        (["--fused_lora", "auto_gptq", "False"], "--fused_lora auto_gptq False asks for nothing, so it is off"),
    ],
)
def test_what_asks_for_nothing_is_off_and_noted(argv, note):
    config = read(*argv)
    assert config.acceleration.active() == {}
    assert config.notes == (note,)


def test_every_problem_is_told_at_once(tmp_path):
    path = write_json(
        tmp_path / "run.json",
        {"max_stps": 1, "learning_rate": "abc", "multipack": {"mode": "x"}, "bf16": 2, "run_name": True, "seed": 1.5},
    )
    assert problems_of(path, "--optim", "adam", "--lr_scheduler_kwargs", "abc") == [
        f"{path}: max_stps is no flag; did you mean max_steps?",
        '--optim was given "adam", but it takes one of '
        + ", ".join(catalog.list_flags()["optim"].kind.choices)
        + "; correct the value",
        '--lr_scheduler_kwargs was given "abc", but it takes a JSON object; correct the value',
        f'{path}: learning_rate was given "abc", but it takes a number; correct the value',
        f'{path}: multipack was given mode "x", but it takes one of exact, budget; correct the value',
        f"{path}: bf16 was given 2, but it takes true or false; correct the value",
        f"{path}: run_name was given true, but it takes text; correct the value",
        f"{path}: seed was given 1.5, but it takes a whole number; correct the value",
    ]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--bf16", "maybe"], '--bf16 was given "maybe", but it takes true or false; correct the value'),
        (
            ["--peft_method", "ia3"],
            '--peft_method was given "ia3", but it takes one of lora, pt, none; correct the value',
        ),
        (
            ["--max_seq_length_policy", "cut"],
            '--max_seq_length_policy was given "cut", but it takes one of truncate, drop, error; correct the value',
        ),
        (
            ["--parallelism_config", "x"],
            '--parallelism_config was given "x", but it takes a Python object, which neither a flag nor a file '
            "can give; "
            "correct the value",
        ),
        (
            ["--fsdp_config", "{'a': 1}"],
            "--fsdp_config was given \"{'a': 1}\", but it takes a JSON object, and this one cannot be read at "
            "character "
            "2 (Expecting property name enclosed in double quotes; JSON wants double quotes); correct the value",
        ),
        (
            ["--padding_free", "huggingface-injected"],
            '--padding_free was given "huggingface-injected", which patched old versions of transformers and is gone; '
            "use huggingface",
        ),
    ],
)
def test_a_wrong_value(argv, problem):
    assert problems_of(*argv) == [problem]


def test_a_misspelt_key_in_a_file_is_named_with_the_file(tmp_path):
    """A key that is nearly right used to train with the default (transformers, pull 18692)."""
    path = write_json(tmp_path / "run.json", {"model_name_or_path": "m", "per_device_batch_size": 2})
    assert problems_of(path) == [
        f"{path}: per_device_batch_size is no flag; did you mean per_device_eval_batch_size or "
        "per_device_train_batch_size?"
    ]


def test_null_for_an_unknown_key_is_still_unknown(tmp_path):
    path = write_json(tmp_path / "run.json", {"config": "x.json", "qqq": None})
    assert problems_of(path) == [
        f"{path}: config is no flag; did you mean fsdp_config?",
        f"{path}: qqq is no flag; see --help for all flags",
    ]


def test_third_party_flags_stay_raw(monkeypatch, tmp_path):
    points = [metadata.EntryPoint(name="their_plugin", value="their.module:Plugin", group="tuning.plugins")]
    monkeypatch.setattr(catalog.metadata, "entry_points", lambda group: points)
    assert read("--their_plugin", "4", "mode=x").acceleration.extra == (("their_plugin", ["4", "mode=x"]),)
    assert read("--their_plugin").acceleration.extra == (("their_plugin", []),)
    assert read("--their_plugin", "none").acceleration.extra == ()
    path = write_json(tmp_path / "run.json", {"their_plugin": {"count": 4}})
    assert read(path).acceleration.extra == (("their_plugin", {"count": 4}),)


def test_quantised_lora_in_the_old_spelling():
    config = read("--peft_method", "lora", "--bitsandbytes", "nf4", "--fused_lora", "bitsandbytes", "True")
    assert config.acceleration.active() == {
        "bnb_qlora": BNBQLoraConfig(),
        "fused_lora": FusedLoraConfig(base_layer="bitsandbytes"),
    }


def test_parse_mapping_names_its_source():
    assert parse_mapping({"max_steps": "2"}).train == {"max_steps": 2}
    with pytest.raises(ConfigError) as error:
        parse_mapping({"max_step": 2}, source="job 7")
    assert str(error.value) == "job 7: max_step is no flag; did you mean max_steps?"


def test_help_ends_the_process(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], launch())
    assert ended.value.code == 0
    assert "--padding_free" in capsys.readouterr().out
