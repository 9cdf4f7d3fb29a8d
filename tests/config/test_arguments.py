import pytest

from tuning.config.arguments import build_parser, read_arguments, suggest
from tuning.config.catalog import list_flags
from tuning.errors import ConfigError


@pytest.fixture(scope="module")
def flags():
    return list_flags()


def test_values_stay_text(flags):
    raw = read_arguments(["--max_steps", "3", "--bf16", "--target_modules", "a", "b", "--padding_free"], flags)
    assert raw.values == {"max_steps": "3", "bf16": True, "target_modules": ["a", "b"], "padding_free": []}
    assert (raw.config, raw.repeated) == (None, ())


def test_spellings_of_a_flag(flags):
    raw = read_arguments(
        ["--max-steps=3", "--no_dataloader_pin_memory", "--no-average-tokens-across-devices", "--bitsandbytes", "nf4"],
        flags,
    )
    assert raw.values == {
        "max_steps": "3",
        "dataloader_pin_memory": "false",
        "average_tokens_across_devices": "false",
        "bitsandbytes": ["nf4"],
    }


@pytest.mark.parametrize("argv", [["run.json", "--max_steps", "3"], ["--max_steps", "3", "--config=run.json"]])
def test_the_file_by_flag_or_by_place(flags, argv):
    assert read_arguments(argv, flags).config == "run.json"


def test_the_file_may_come_last(flags):
    assert read_arguments(["--max_steps", "3", "run.json"], flags).config == "run.json"


def test_values_that_look_like_flags(flags):
    raw = read_arguments(["--max_steps", "-1", "--response_template=--A:", "--instruction_template", "-- Q:"], flags)
    assert raw.values == {"max_steps": "-1", "response_template": "--A:", "instruction_template": "-- Q:"}


def test_a_flag_given_twice(flags):
    raw = read_arguments(["--seed", "1", "--max_steps", "1", "--max_steps", "2", "--seed", "1"], flags)
    assert raw.values["max_steps"] == "2"
    assert raw.repeated == ("max_steps",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_step", "3"], "--max_step is no flag; did you mean max_steps?"),
        (["--max", "3"], "--max is no flag; see --help for all flags"),
        (["--no_bf16"], "--no_bf16 is no flag; did you mean bf16?"),
        (["--qqq", "1", "--learning_rates=2"], "--qqq is no flag; see --help for all flags\n"
         "--learning_rates is no flag; did you mean learning_rate?"),
        (["--max_steps"], "--max_steps: expected one argument; see --help"),
        (["--target_modules"], "--target_modules: expected at least one argument; see --help"),
        (["a.json", "b.json"], "the command line holds a.json b.json with no flag in front; one configuration file may "
         "stand so, name the flag of everything else"),
        (["a.json", "--config", "b.json"], "the command line holds a.json after --config b.json with no flag in front; "
         "one configuration file may stand so, name the flag of everything else"),
        (["-x"], "the command line holds -x with no flag in front; one configuration file may stand so, name the flag "
         "of everything else"),
    ],
)  # fmt: skip
def test_refuses(flags, argv, message):
    with pytest.raises(ConfigError) as error:
        read_arguments(argv, flags)
    assert str(error.value) == message


def test_old_names_are_read_and_not_in_the_help(flags):
    assert read_arguments(["--no_cuda", "--warmup_ratio", "0.1"], flags, ["no_cuda", "warmup_ratio"]).values == {
        "no_cuda": [],
        "warmup_ratio": ["0.1"],
    }
    assert "no_cuda" not in build_parser(flags, ["no_cuda"]).format_help()


def test_help_has_every_flag_with_its_default(flags):
    text = build_parser(flags).format_help()
    assert [name for name in flags if f"--{name} " not in text and f"--{name}," not in text] == []
    assert text.index("--model_name_or_path") < text.index("--padding_free") < text.index("--r ")
    assert text.index("--r ") < text.index("--save_model_dir") < text.index("--packing ") < text.index("--max_steps")
    words = " ".join(text.split())
    assert "The batch size per device for training. Default: 8." in words
    assert "Rank of the adapters. Default: 8." in words
    assert "~10% slower performance" in words


def test_suggest_names_the_closest():
    assert suggest("max_stps", ["max_steps", "seed"]) == "did you mean max_steps?"
    assert suggest("zzz", ["max_steps", "seed"]) == "see --help for all flags"
