import dataclasses
import types

import pytest

from tests.config.inputs import argv_of, broken_rules, launch, read, valid_flags
from tuning.config.validation import check, resolve
from tuning.errors import ConfigError


def test_valid_flags_pass(tmp_path):
    config = resolve(read(*argv_of(valid_flags(tmp_path))), launch())
    check(config, launch())
    assert not (tmp_path / "out").exists()


def test_every_broken_rule_is_told_at_once(tmp_path):
    problems = broken_rules(
        tmp_path, "--packing", "--multipack", "4", "--learning_rate", "-1", "--max_length", "9", "--r", "4",
        "--max_seq_length", "8",
    )  # fmt: skip
    assert problems == [
        "--max_seq_length 8 and --max_length 9 say different things about one setting; keep one",
        "--multipack needs --padding_free, since its batches hold samples of any length; add --padding_free "
        "huggingface "
        "or drop --multipack",
        "--r belongs to --peft_method lora, but --peft_method is none; add --peft_method lora or drop --r",
        "--learning_rate is -1.0, but takes a number from 0; correct the value",
        "--packing true joins and cuts samples, so that they are trained on out of their place; use --padding_free "
        "huggingface, with --multipack mode=budget for full packs",
    ]


def test_the_error_holds_one_line_a_problem(tmp_path):
    config = resolve(read(*argv_of(valid_flags(tmp_path)), "--fp16", "--bf16", "--seed", "-1"), launch())
    with pytest.raises(ConfigError) as error:
        check(config, launch())
    assert str(error.value) == (
        "--fp16 and --bf16 are both true; keep one\n"
        "--seed is -1, but takes a whole number from 0 to 4294967295; correct the value"
    )


def test_resolve_and_check_change_nothing(tmp_path):
    config = read(*argv_of(valid_flags(tmp_path)), "--max_length", "64")
    before = dataclasses.replace(config)
    resolve(config, launch())
    assert config == before
    assert isinstance(resolve(config, launch()).train, types.MappingProxyType)


def test_notes(tmp_path):
    config = resolve(
        read(*argv_of(valid_flags(tmp_path)), "--assistant_only_loss", "false", "--validation_split", "0.1"), launch()
    )
    assert config.notes == (
        "--assistant_only_loss false changes nothing: conversations are trained on the assistant's turns unless "
        "--train_on_input is true",
        "validation data was given, but --eval_strategy is no; set it to steps or epoch to evaluate",
    )
