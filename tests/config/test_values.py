from enum import Enum
from typing import Any, Literal

import pytest

from tuning.config.values import Kind, cast, describe, is_bool_word, kind_of_hint, show


def kind(*bases, optional=False, choices=None):
    return Kind(bases=tuple(sorted(bases)), optional=optional, choices=choices)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (int, kind("int")),
        (float | None, kind("float", optional=True)),
        (dict[str, Any] | str | None, kind("dict", "str", optional=True)),
        (None | str | list[str], kind("list", "str", optional=True)),
        (Color | str, kind("str", choices=("red", "blue"))),
        (str | list[Color], kind("list", "str", choices=("red", "blue"))),
        (str | None | Literal[False], kind("false", "str", optional=True)),
        (tuple[str, ...], kind("list")),
        (complex | None, kind("other", optional=True)),
    ],
)
def test_kind_of_hint(hint, expected):
    assert kind_of_hint(hint) == expected


@pytest.mark.parametrize(
    ("value", "bases", "expected"),
    [
        ("1e-5", ("float",), 1e-5),
        (1, ("float",), 1.0),
        ("2", ("int",), 2),
        (2.0, ("int",), 2),
        ("-1", ("int",), -1),
        ("false", ("bool",), False),
        ("NO", ("bool",), False),
        ("t", ("bool",), True),
        (1, ("bool",), True),
        (True, ("bool",), True),
        ("false", ("false", "str"), False),
        ("no", ("bool", "str"), False),
        ("all", ("bool", "str"), "all"),
        ("8", ("int", "str"), 8),
        ("auto", ("int", "str"), "auto"),
        (2024, ("str",), "2024"),
        ('{"num_cycles": 1}', ("dict",), {"num_cycles": 1}),
        ({"a": 1}, ("dict",), {"a": 1}),
        ("config.json", ("dict", "str"), "config.json"),
        ("q_proj", ("list",), ["q_proj"]),
        (["a", "b"], ("list",), ["a", "b"]),
        ('["a", "b"]', ("list", "str"), ["a", "b"]),
        ("wandb", ("list", "str"), "wandb"),
        ("[PAD]", ("list",), ["[PAD]"]),
        (["[PAD]"], ("list",), ["[PAD]"]),
        (['["a", "b"]'], ("list",), ["a", "b"]),
        ("[]", ("list", "str"), []),
        ("inf", ("float",), float("inf")),
    ],
)
def test_cast(value, bases, expected):
    result = cast(value, kind(*bases))
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "bases", "message"),
    [
        ("two", ("int",), "a whole number"),
        ("1e3", ("int",), "a whole number"),
        (2.5, ("int",), "a whole number"),
        (True, ("int",), "a whole number"),
        (True, ("float",), "a number"),
        ("nan", ("float",), "a number"),
        (float("nan"), ("float",), "a number"),
        ("maybe", ("bool",), "true or false"),
        (2, ("bool",), "true or false"),
        (True, ("str",), "text"),
        (["a"], ("str",), "text"),
        ([["a"]], ("list",), "a list of texts"),
        ("abc", ("dict",), "a JSON object"),
        ({"a": 1}, ("int", "str"), "a whole number or text"),
        ("x", ("other",), "a Python object, which neither a flag nor a file can give"),
        (
            "{'num_cycles': 1}",
            ("dict",),
            "a JSON object, and this one cannot be read at character 2 (Expecting property name enclosed in double "
            "quotes; JSON wants double quotes)",
        ),
    ],
)
def test_cast_refuses(value, bases, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the full text is compared
        cast(value, kind(*bases))
    assert str(error.value) == message


def test_choices_in_any_case_and_booleans_among_them():
    words = kind("str", choices=("auto", "true", "false"))
    assert [cast(value, words) for value in ("Auto", True, "no", "1")] == ["auto", "true", "false", "true"]
    assert cast("text", kind("str", choices=("TEXT", "RANDOM"))) == "TEXT"
    with pytest.raises(ValueError, match=r"^one of on, off$"):
        cast(False, kind("str", choices=("on", "off")))
    with pytest.raises(ValueError, match=r"^only huggingface$"):
        cast("x", kind("str", choices=("huggingface",)))
    with pytest.raises(ValueError, match=r"^a list of red, blue$"):
        cast(["green"], kind("list", choices=("red", "blue")))


def test_describe_names_every_base():
    assert describe(kind("int", "float")) == "a number"
    assert describe(kind("bool", "str", choices=("all", "no"))) == "true or false or one of all, no"


def test_show_is_json():
    assert [show(value) for value in (True, "ü", [1], None)] == ["true", '"ü"', "[1]", "null"]


def test_is_bool_word():
    assert [is_bool_word(value) for value in (True, "Yes", "0", "maybe", 1)] == [True, True, True, False, False]
