"""Values of flags: what a flag takes, and the cast from text or from a file's value to it.

The command line gives text, a configuration file gives numbers, booleans, lists and objects. Both go through
:func:`cast`, so that ``"1e-5"``, ``"false"`` and ``"2"`` mean the same in both, and nothing of a wrong type is passed
on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

__all__ = [
    "BOOL_WORDS",
    "UNSET",
    "Kind",
    "cast",
    "describe",
    "describe_choices",
    "is_bool_word",
    "kind_of_hint",
    "show",
]

# the words of transformers.hf_argparser.string_to_bool
BOOL_WORDS: Final[Mapping[str, bool]] = types.MappingProxyType(
    dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)
)
UNSET: Final = object()  # default of a field that has none, or none that can be read
_WHOLE = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a flag takes.

    Attributes:
        bases: Any of ``bool``, ``false`` (no other boolean), ``int``, ``float``, ``dict``, ``list`` (of texts),
            ``str``, ``nested`` (a config dataclass) and ``other`` (nothing that text can say), sorted.
        optional: None is allowed.
        choices: Texts allowed for ``str`` and for the items of ``list``; None: any.
    """

    bases: tuple[str, ...]
    optional: bool = False
    choices: tuple[str, ...] | None = None


def kind_of_hint(hint: Any, choices: tuple[str, ...] | None = None) -> Kind:  # noqa: ANN401 - any annotation
    """Return the kind of a resolved type annotation.

    Args:
        hint: As ``typing.get_type_hints`` gives it.
        choices: From the field's metadata, if it has any; an enum brings its own.
    """
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    bases: set[str] = set()
    for member in members:
        origin = typing.get_origin(member) or member
        if origin is typing.Literal:
            bases |= {"false" if value is False else "str" for value in typing.get_args(member)}
        elif isinstance(origin, type) and issubclass(origin, Enum):
            bases.add("str")
            choices = choices or tuple(str(item.value) for item in origin)
        elif origin in (list, tuple):
            bases.add("list")
            items = typing.get_args(member)
            if items and isinstance(items[0], type) and issubclass(items[0], Enum):
                choices = choices or tuple(str(item.value) for item in items[0])
        elif origin in (bool, int, float, str, dict):
            bases.add(origin.__name__)
        elif dataclasses.is_dataclass(origin) and origin.__module__.startswith("tuning."):
            bases.add("nested")
        elif member is not types.NoneType:
            bases.add("other")
    return Kind(bases=tuple(sorted(bases)), optional=types.NoneType in members, choices=choices)


def is_bool_word(value: object) -> bool:
    """Say whether ``value`` is a boolean or a word for one."""
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in BOOL_WORDS)


def show(value: object) -> str:
    """Return ``value`` as an error message shows it."""
    return json.dumps(value, ensure_ascii=False, default=str)


_NOUNS: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "bool": "true or false",
        "false": "false",
        "int": "a whole number",
        "float": "a number",
        "dict": "a JSON object",
        "list": "a list of texts",
        "str": "text",
        "other": "a Python object, which neither a flag nor a file can give",
    }
)


def describe_choices(choices: Sequence[str]) -> str:
    """Return choices in words."""
    return f"only {choices[0]}" if len(choices) == 1 else f"one of {', '.join(choices)}"


def describe(kind: Kind) -> str:
    """Return what ``kind`` takes, in words."""
    nouns = {base: _NOUNS[base] for base in _CASTS if base in kind.bases and base in _NOUNS}
    if kind.choices is not None:
        if "str" in nouns:
            nouns["str"] = describe_choices(kind.choices)
        if "list" in nouns:
            nouns["list"] = f"a list of {', '.join(kind.choices)}"
    if "int" in nouns and "float" in nouns:
        del nouns["int"]
    if "other" in kind.bases and not nouns:
        return _NOUNS["other"]
    return " or ".join(nouns.values())


def cast(value: object, kind: Kind) -> Any:  # noqa: ANN401 - whatever the flag takes
    """Return ``value`` as ``kind`` has it.

    Args:
        value: Text of the command line, or a value of a file; not None.
        kind: What the flag takes.

    Raises:
        ValueError: With what the flag takes, in words, or where the JSON text is wrong.
    """
    for base, convert in _CASTS.items():
        if base in kind.bases:
            result = convert(value, kind)
            if result is not UNSET:
                return result
    raise ValueError(describe(kind))


def _bool(value: object, kind: Kind) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and "int" not in kind.bases and "float" not in kind.bases:
        return BOOL_WORDS.get(str(value), UNSET)
    return BOOL_WORDS.get(value.lower(), UNSET) if isinstance(value, str) else UNSET


def _false(value: object, kind: Kind) -> object:
    return False if value is False or (isinstance(value, str) and value.lower() == "false") else UNSET


def _int(value: object, kind: Kind) -> object:
    if isinstance(value, bool):
        return UNSET
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else UNSET
    return int(value) if isinstance(value, str) and _WHOLE.fullmatch(value.strip()) else UNSET


def _float(value: object, kind: Kind) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return UNSET
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return UNSET
    return UNSET if math.isnan(number) else number


def _dict(value: object, kind: Kind) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return _read_object(value)
    return UNSET


def _list(value: object, kind: Kind) -> object:
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str):
        listed = _listed(value[0])
        value = value if listed is None else listed
    elif isinstance(value, str):
        listed = _listed(value)
        value = listed if listed is not None else value if "str" in kind.bases else [value]
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        return UNSET
    items = [_str(item, kind) for item in value]
    return UNSET if UNSET in items else items


def _listed(text: str) -> tuple[Any, ...] | None:
    """Return the list that ``text`` is in JSON, or None; ``[PAD]`` is a text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return tuple(value)


def _str(value: object, kind: Kind) -> object:
    if not isinstance(value, (int, float, str)):
        return UNSET
    if kind.choices is None:
        return UNSET if isinstance(value, bool) else str(value)
    by_lower = {choice.lower(): choice for choice in kind.choices}
    text = str(value).lower()
    if text not in by_lower and text in BOOL_WORDS:
        # a field of texts such as true, false and auto takes every word for true
        text = str(BOOL_WORDS[text]).lower()
    return by_lower.get(text, UNSET)


def _read_object(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"a JSON object, and this one cannot be read at character {error.pos + 1} ({error.msg}; "
            "JSON wants double quotes)"
        ) from error


# the most telling first: "2" for a flag of int and str is a number
_CASTS: Final[Mapping[str, Callable[[object, Kind], object]]] = types.MappingProxyType(
    {"bool": _bool, "false": _false, "int": _int, "float": _float, "dict": _dict, "list": _list, "str": _str}
)
