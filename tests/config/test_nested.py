from dataclasses import dataclass, field

import pytest

from tuning.config.nested import build_config, check_choices, names_off, split_options
from tuning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    count: int = 1
    mode: str = field(default="fast", metadata={"choices": ["fast", "slow"], "retired": {"warp": "which is gone"}})
    limit: int | None = None
    on: bool = True


@dataclass(frozen=True, kw_only=True)
class OneChoice:
    method: str = field(default="only", metadata={"choices": ["only"]})


@dataclass(frozen=True, kw_only=True)
class OffByDefault:
    off: bool = False


@dataclass(frozen=True, kw_only=True)
class Needed:
    path: str


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], Options()),
        (True, Options(on=True)),
        ("3", Options(count=3)),
        (3, Options(count=3)),
        ([3], Options(count=3)),
        ("slow 3", Options(count=3, mode="slow")),
        (["3", "slow", "4096", "false"], Options(count=3, mode="slow", limit=4096, on=False)),
        (["limit=9", "3"], Options(count=3, limit=9)),
        (["mode=slow", "count=3"], Options(count=3, mode="slow")),
        ("3,slow", Options(count=3, mode="slow")),
        ({"count": "3", "on": "false", "limit": None}, Options(count=3, on=False)),
        ('{"count": 3}', Options(count=3)),
        (["[3]"], Options(count=3)),
        (Options(count=7), Options(count=7)),
    ],
)
def test_spellings_of_one_thing(value, expected):
    assert build_config(Options, value, flag="options") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            ["3", "4", "5"],
            '--options was given "5", which none of its options takes (mode takes one of fast, slow; on takes true or '
            "false); correct the value",
        ),
        (["modus=slow"], "--options has no option modus; did you mean mode?"),
        (["x=1"], "--options has no option x; its options are count, mode, limit, on"),
        (["count=one"], '--options was given count "one", but it takes a whole number; correct the value'),
        (["count=1", "count=2"], "--options was given count twice; keep one"),
        (["warp"], '--options was given "warp", which is gone'),
        (["mode=warp"], '--options was given mode "warp", which is gone'),
        (
            "{'count': 3}",
            "--options was given JSON that cannot be read at character 2 (Expecting property name enclosed in double "
            "quotes); correct it",
        ),
    ],
)
def test_refuses(value, message):
    with pytest.raises(ConfigError) as error:
        build_config(Options, value, flag="options")
    assert str(error.value) == message


def test_every_wrong_option_is_told():
    with pytest.raises(ConfigError) as error:
        build_config(Options, ["x=1", "count=one", "warp"], flag="options", label="run.json: options")
    assert len(error.value.problems) == 3
    assert all(problem.startswith("run.json: options ") for problem in error.value.problems)


def test_true_alone_means_the_defaults():
    assert build_config(OffByDefault, True, flag="off") == OffByDefault(off=False)
    assert build_config(OneChoice, True, flag="one") == OneChoice()
    assert build_config(OneChoice, ["true"], flag="one") == OneChoice()
    with pytest.raises(ConfigError) as error:
        build_config(OneChoice, 1, flag="one")
    assert str(error.value) == "--one was given 1, but it takes only only; correct the value"


def test_too_many_values():
    with pytest.raises(ConfigError) as error:
        build_config(OneChoice, ["only", "only"], flag="one")
    assert str(error.value) == '--one was given "only" on top of all its options; drop it'


def test_an_option_without_default_is_asked_for():
    assert build_config(Needed, "a.txt", flag="needed") == Needed(path="a.txt")
    with pytest.raises(ConfigError) as error:
        build_config(Needed, [], flag="needed")
    assert str(error.value) == "--needed needs path, which was not given; add path=..."


@pytest.mark.parametrize("value", [None, False, "false", "none", "null", ["None"], ["False"]])
def test_names_off(value):
    assert names_off(value)


@pytest.mark.parametrize("value", [True, [], "true", ["none", "x"], 0])
def test_names_no_off(value):
    assert not names_off(value)


def test_split_options_keeps_types_of_a_file():
    assert split_options([16, "mode=slow", True], label="--x") == ([16, True], {"mode": "slow"})


def test_check_choices_names_value_and_choices():
    with pytest.raises(ConfigError) as error:
        check_choices(Options(mode="x"), flag="options")
    assert str(error.value) == '--options was given mode "x", but it takes one of fast, slow; correct the value'
