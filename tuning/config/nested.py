"""Nested options: one flag that is a dataclass.

``--multipack 16``, ``--multipack num_processes=16 mode=budget`` and ``--fused_lora True bitsandbytes`` all fill the
fields of one config object; a file may give text, a list or an object instead. Bare values need no order: each goes to
the first field not yet filled, in the order of declaration, that can take it, so the old positional spelling is a
special case. A config class with a grammar of its own has a class method ``read(bare, named, label=...)``.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from tuning.config.values import UNSET, Kind, cast, describe, is_bool_word, kind_of_hint, show
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
            problems.append(
                f"--{flag} was given {item.name} {show(value)}, but it takes {describe_choices(choices)}; "
                "correct the value"
            )
    if problems:
        raise ConfigError(problems)


def describe_choices(choices: Sequence[str]) -> str:
    """Return choices in words."""
    return f"only {choices[0]}" if len(choices) == 1 else f"one of {', '.join(choices)}"


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
    if isinstance(value, Mapping):
        return [], dict(value)
    tokens: list[Any] = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
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
    takes_bool = any("bool" in kind.bases for kind in kinds.values())
    if len(bare) == 1 and not named and not takes_bool and is_bool_word(bare[0]) and bare[0] not in (0, 1, "0", "1"):
        bare = []  # --padding_free true: the flag with its defaults
    options, problems = _cast_named(named, kinds, label)
    for token in bare:
        name = _first_taker(token, kinds, options)
        if name is None:
            free = [key for key in kinds if key not in options]
            known = "; ".join(f"{key} takes {describe(kinds[key])}" for key in free) or "every option is given already"
            problems.append(f"{label} was given {show(token)}, which none of its options takes ({known}); correct it")
        else:
            options[name] = cast(token, kinds[name])
    if problems:
        raise ConfigError(problems)
    return config_type(**options)


def _cast_named(named: Mapping[str, Any], kinds: Mapping[str, Kind], label: str) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {}
    problems = []
    for name, value in named.items():
        if name not in kinds:
            close = get_close_matches(name, kinds, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its options are {', '.join(kinds)}"
            problems.append(f"{label} has no option {name}; {hint}")
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
