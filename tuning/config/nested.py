"""Nested options: one flag that is a dataclass.

``--multipack 16``, ``--multipack num_processes=16 mode=budget`` and ``--fused_lora True bitsandbytes`` all fill the
fields of one config object; a file may give text, a list or an object instead. Bare values need no order: each goes to
the first field not yet filled, in the order of declaration, that can take it, so the old positional spelling is a
special case. A config class with a grammar of its own has a class method ``read(bare, named, label=...)``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from tuning.config.values import UNSET, Kind, cast, describe, describe_choices, kind_of_hint, show
from tuning.errors import ConfigError

__all__ = ["build_config", "check_choices", "field_kinds", "names_off", "split_options"]

T = TypeVar("T")
_NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def field_kinds(config_type: type) -> dict[str, Kind]:
    """Return the kind of every field of a dataclass that its constructor takes, in order of declaration."""
    hints = typing.get_type_hints(config_type)
    return {
        item.name: kind_of_hint(hints[item.name], _choices(item))
        for item in dataclasses.fields(config_type)
        if item.init
    }


def _choices(item: dataclasses.Field[Any]) -> tuple[str, ...] | None:
    choices = item.metadata.get("choices")
    return None if choices is None else tuple(choices)


def check_choices(config: Any, *, flag: str) -> None:  # noqa: ANN401 - any of our config dataclasses
    """Refuse a field of ``config`` whose value is not among the choices of its metadata.

    Args:
        config: Dataclass instance; read only.
        flag: Flag that it belongs to.

    Raises:
        ConfigError: With every such field.
    """
    problems = []
    for item in dataclasses.fields(config):
        choices, value = _choices(item), getattr(config, item.name)
        if choices is not None and value not in choices:
            advice = item.metadata.get("retired", {}).get(value)
            reason = advice or f"but it takes {describe_choices(choices)}; correct the value"
            problems.append(f"--{flag} was given {item.name} {show(value)}, {reason}")
    if problems:
        raise ConfigError(problems)


def names_off(value: object) -> bool:
    """Say whether ``value`` turns a nested flag off: false, none or null, alone."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return value is None or value is False or (isinstance(value, str) and value.lower() in ("false", "none", "null"))


def split_options(value: object, *, label: str) -> tuple[list[Any], dict[str, Any]]:
    """Split what a nested flag was given into bare values and named ones.

    Args:
        value: Text, tokens of the command line, or a value of a file.
        label: The flag as the message shall name it.

    Raises:
        ConfigError: If an option is named twice.
    """
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(items) == 1 and isinstance(items[0], str) and items[0].lstrip().startswith(("{", "[")):
        items = _read_json(items[0], label)
    if len(items) == 1 and isinstance(items[0], Mapping):
        return [], dict(items[0])
    tokens: list[Any] = []
    for item in items:
        tokens += re.split(r"[\s,]+", item.strip()) if isinstance(item, str) else [item]
    bare, named = [], {}
    for token in tokens:
        match = _NAMED.fullmatch(token) if isinstance(token, str) else None
        if match is None:
            bare.append(token)
        elif match[1] in named:
            raise ConfigError(f"{label} was given {match[1]} twice; keep one")
        else:
            named[match[1]] = match[2]
    return bare, named


def _read_json(text: str, label: str) -> list[Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{label} was given JSON that cannot be read at character {error.pos + 1} ({error.msg}); correct it"
        ) from error
    return value if isinstance(value, list) else [value]


def build_config(config_type: type[T], value: object, *, flag: str, label: str | None = None) -> T:
    """Build the config object of a nested flag.

    Args:
        config_type: Its dataclass.
        value: An instance (returned as it is), text, tokens, or a value of a file; an empty list or true: defaults.
        flag: Name of the flag, without dashes.
        label: The flag as messages shall name it; default: with dashes.

    Raises:
        ConfigError: With every option that is unknown, given twice, or of a wrong type.
    """
    label = label or f"--{flag}"
    if isinstance(value, config_type):
        return value
    bare, named = split_options(value, label=label)
    read = getattr(config_type, "read", None)
    if read is not None:
        return typing.cast(T, read(bare, named, label=label))
    kinds = field_kinds(config_type)
    if len(bare) == 1 and not named and str(bare[0]).lower() in ("true", "yes"):
        bare = []  # --padding_free true: the flag with its defaults
    retired = _retired(config_type)
    options, problems = _cast_named(named, kinds, label, retired)
    for token in bare:
        name = _first_taker(token, kinds, options)
        if name is not None:
            options[name] = cast(token, kinds[name])
        elif isinstance(token, str) and token in retired:
            problems.append(f"{label} was given {show(token)}, {retired[token]}")
        else:
            problems.append(_no_taker(token, {key: kinds[key] for key in kinds if key not in options}, label))
    if not problems:
        problems = [
            f"{label} needs {name}, which was not given; add {name}=..." for name in _missing(config_type, options)
        ]
    if problems:
        raise ConfigError(problems)
    return config_type(**options)


def _missing(config_type: type, options: Mapping[str, Any]) -> list[str]:
    return [
        item.name
        for item in dataclasses.fields(config_type)
        if item.init
        and item.name not in options
        and item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
    ]


def _retired(config_type: type) -> dict[str, str]:
    """Return the values that earlier versions took, and what to do instead."""
    return {
        value: advice
        for item in dataclasses.fields(config_type)
        for value, advice in item.metadata.get("retired", {}).items()
    }


def _no_taker(token: object, free: Mapping[str, Kind], label: str) -> str:
    if not free:
        return f"{label} was given {show(token)} on top of all its options; drop it"
    if len(free) == 1:
        return f"{label} was given {show(token)}, but it takes {describe(*free.values())}; correct the value"
    known = "; ".join(f"{name} takes {describe(kind)}" for name, kind in free.items())
    return f"{label} was given {show(token)}, which none of its options takes ({known}); correct the value"


def _cast_named(
    named: Mapping[str, Any], kinds: Mapping[str, Kind], label: str, retired: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {}
    problems = []
    for name, value in named.items():
        if name not in kinds:
            close = get_close_matches(name, kinds, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its options are {', '.join(kinds)}"
            problems.append(f"{label} has no option {name}; {hint}")
        elif isinstance(value, str) and value in retired:
            problems.append(f"{label} was given {name} {show(value)}, {retired[value]}")
        elif value is not None:
            try:
                options[name] = cast(value, kinds[name])
            except ValueError as error:
                problems.append(f"{label} was given {name} {show(value)}, but it takes {error}; correct the value")
    return options, problems


def _first_taker(token: object, kinds: Mapping[str, Kind], options: Mapping[str, Any]) -> str | None:
    for name, kind in kinds.items():
        if name not in options and _takes(token, kind):
            return name
    return None


def _takes(token: object, kind: Kind) -> bool:
    try:
        return cast(token, kind) is not UNSET
    except ValueError:
        return False
