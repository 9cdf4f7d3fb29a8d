"""The catalog and a real ``HfArgumentParser`` over the real dataclasses list the same flags."""

import json

import pytest

from tests.config.inputs import argv_of, launch, read, valid_flags
from tuning.config import validation
from tuning.config.acceleration_configs import BNBQLoraConfig, MultiPack, PaddingFree
from tuning.config.catalog import list_flags
from tuning.config.values import UNSET
from tuning.errors import ConfigError

# flag -> how ours differs on purpose
DIFFERENT_TYPE = {
    "debug": "HfArgumentParser takes the enum alone and forgets the default; ours takes its words",
    "liger_kernel_config": "HfArgumentParser makes no dict of text; ours reads JSON",
    "parallelism_config": "a Python object, which ours refuses and HfArgumentParser cannot make",
}
OWNERS = ("run", "model", "data", "lora", "tuning", "trl", "transformers")
NO_DATACLASS = {"config", "trackers", "acceleration_framework_config_file", "loss_across_gpus"}


@pytest.fixture(scope="module")
def hf():
    from tuning.sft_trainer import get_parser

    return get_parser()


@pytest.fixture(scope="module")
def actions(hf):
    return {action.dest: action for action in hf._actions if action.dest != "help" and "--no_" not in str(action)}


@pytest.fixture(scope="module")
def flags():
    return list_flags()


def test_both_parsers_know_the_same_flags(actions, flags):
    assert set(actions) == set(flags) - NO_DATACLASS


def test_both_parsers_have_the_same_defaults(actions, flags):
    theirs = {name: action.default for name, action in actions.items() if name not in DIFFERENT_TYPE}
    left_out = NO_DATACLASS | set(DIFFERENT_TYPE)
    assert theirs == {name: spec.default for name, spec in flags.items() if name not in left_out}


def test_both_parsers_have_the_same_choices(actions, flags):
    theirs = {name: tuple(action.choices) for name, action in actions.items() if action.choices is not None}
    ours = {name: spec.kind.choices for name, spec in flags.items() if spec.kind.choices is not None}
    assert theirs == {name: choices for name, choices in ours.items() if name not in DIFFERENT_TYPE}


def test_both_parsers_know_the_same_spellings(hf, flags):
    theirs = {option for option in hf._option_string_actions if option.startswith("--no_")}
    ours = {f"--no_{name}" for name, spec in flags.items() if spec.kind.bases == ("bool",) and spec.default is True}
    assert theirs == ours


def samples(spec):
    """Command lines that set the flag."""
    bases, choices = spec.kind.bases, spec.kind.choices
    if "nested" in bases:
        return []
    if choices:
        return [[choice] for choice in choices]
    if bases == ("list",):
        return [["a"], ["a", "b"]]
    if "dict" in bases:
        return [['{"a": 1, "b": {"c": [true]}}']]
    if "bool" in bases:
        return [[word] for word in ("true", "False", "yes", "0")] + ([[]] if spec.const is True else [])
    if "int" in bases:
        return [["3"], ["-1"]]
    if "float" in bases:
        return [["1e-5"], ["2"]]
    return [["text"], ["2"]]


def theirs_of(name, value, tokens):
    """The value of ``HfArgumentParser``, and what transformers or TRL make of it later where it stays text."""
    if isinstance(value, str) and value.startswith("{"):
        return json.loads(value)
    if name == "fsdp" and tokens:
        return {"true": True, "False": False, "yes": True, "0": False}[tokens[0]]
    return int(value) if name == "pad_to_multiple_of" else value


def ours_of(config, name, owner):
    parts = {"model": config.model, "data": config.data, "lora": config.peft, "pt": config.peft}
    if owner in parts:
        return getattr(parts[owner], name)
    return config.train.get(name, config.exp_metadata)


@pytest.mark.parametrize("method", ["lora", "pt"])
def test_both_parsers_read_the_same_values(hf, actions, flags, method):
    """One command line holds the first sample of every flag, the next one the second, and so on."""
    names = [name for name in actions if name not in DIFFERENT_TYPE and name != "peft_method"]
    names = [name for name in names if flags[name].owner in ({"pt"} if method == "pt" else set(OWNERS))]
    compared = 0
    for number in range(max(len(samples(flags[name])) for name in names)):
        lines = {name: samples(flags[name])[number] for name in names if number < len(samples(flags[name]))}
        # `--bf16` alone is an error there and means true here
        lines = {name: tokens for name, tokens in lines.items() if tokens or actions[name].nargs == "?"}
        argv = [token for name, tokens in lines.items() for token in (f"--{name}", *tokens)]
        theirs = hf.parse_args(argv)
        config = read(*argv, "--peft_method", method)
        for name, tokens in lines.items():
            expected = theirs_of(name, getattr(theirs, name), tokens)
            assert (name, tokens, ours_of(config, name, flags[name].owner)) == (name, tokens, expected)
            compared += 1
    assert compared == sum(
        len([tokens for tokens in samples(flags[name]) if tokens or actions[name].nargs == "?"]) for name in names
    )
    assert compared > (300 if method == "lora" else 3)


def test_no_spelling_reads_the_same(hf, flags):
    names = [
        n for n, spec in flags.items() if spec.kind.bases == ("bool",) and spec.default is True and spec.is_training
    ]
    argv = [f"--no_{name}" for name in names]
    theirs, ours = hf.parse_args(argv), read(*argv)
    assert {name: ours.train[name] for name in names} == {name: getattr(theirs, name) for name in names}
    assert len(names) > 5


def test_a_flag_less_is_noticed(actions, flags):
    fewer = {name: spec for name, spec in flags.items() if name != "max_steps"}
    assert set(actions) != set(fewer) - NO_DATACLASS


def test_hf_argument_parser_over_one_group_of_ours():
    from transformers import HfArgumentParser

    from tuning.config.acceleration_configs import AttentionAndDistributedPackingConfig, QuantizedLoraConfig

    parser = HfArgumentParser((AttentionAndDistributedPackingConfig, QuantizedLoraConfig))
    attention, quantized = parser.parse_args_into_dataclasses(
        ["--padding_free", "huggingface", "--multipack", "16", "--bitsandbytes", "nf4"], look_for_args_file=False
    )
    assert (attention.padding_free, attention.multipack) == (PaddingFree(), MultiPack(num_processes=16))
    assert quantized.bnb_qlora == BNBQLoraConfig()
    (attention,) = HfArgumentParser(AttentionAndDistributedPackingConfig).parse_dict({"padding_free": ["huggingface"]})
    assert attention.padding_free == PaddingFree()


def test_parse_arguments_of_a_mapping(tmp_path):
    from tuning.config.configs import TrainingArguments
    from tuning.sft_trainer import get_parser, parse_arguments

    values = valid_flags(tmp_path) | {"padding_free": ["huggingface"], "max_steps": "2", "use_cpu": True}
    parsed = parse_arguments(get_parser(), values)
    assert isinstance(parsed.train_args, TrainingArguments)
    assert parsed.train_args.max_steps == 2
    assert parsed.attention_and_distributed_packing_config.padding_free == PaddingFree()
    assert parsed.peft_config is None
    with pytest.raises(ConfigError) as error:
        parse_arguments(get_parser(), {"max_step": 3})
    assert str(error.value) == "the configuration: max_step is no flag; did you mean max_steps?"


def test_parse_arguments_of_the_command_line(tmp_path, monkeypatch):
    from tuning.sft_trainer import parse_arguments

    monkeypatch.setattr(
        "sys.argv", ["sft_trainer", *argv_of(valid_flags(tmp_path)), "--peft_method", "lora", "--use_cpu"]
    )
    parsed = parse_arguments()
    assert parsed.peft_config.r == 8
    assert parsed.train_args.use_cpu is True


def test_check_takes_all_training_arguments_at_once(tmp_path):
    """As a Python program has them: an object whose every field is set."""
    import dataclasses

    from tuning.config.configs import TrainingArguments

    flags = valid_flags(tmp_path)
    args = TrainingArguments(output_dir=flags["output_dir"], use_cpu=True)
    values = {item.name: getattr(args, item.name) for item in dataclasses.fields(args) if item.init}
    config = dataclasses.replace(read(*argv_of(flags)), train=values, given=frozenset())
    validation.check(validation.resolve(config, launch()), launch())
    broken = dataclasses.replace(config, train={**values, "packing": True, "learning_rate": -1.0})
    with pytest.raises(ConfigError) as error:
        validation.check(validation.resolve(broken, launch()), launch())
    assert len(error.value.problems) == 2


def test_default_is_unset_nowhere(flags):
    assert [name for name, spec in flags.items() if spec.default is UNSET] == []
