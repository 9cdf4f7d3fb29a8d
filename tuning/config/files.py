"""Configuration files: JSON or YAML to a flat mapping of flags, with file, line and column in every error."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from tuning.config.values import show
from tuning.errors import ConfigError

__all__ = ["read_config_file", "read_yaml"]


def read_config_file(path: str) -> dict[str, Any]:
    """Read a configuration: YAML if the file is named ``.yaml`` or ``.yml``, JSON otherwise.

    Raises:
        ConfigError: One line that names the file and, for bad syntax, line and column.
    """
    text = _read_text(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty; write a JSON or YAML object of flags into it")
    value = read_yaml(text, path) if path.endswith((".yaml", ".yml")) else _read_json(text, path)
    if not isinstance(value, dict):
        found = {list: "a list", str: "a text", type(None): "nothing"}.get(type(value), "a single value")
        raise ConfigError(f"{path} holds {found} at its top level, but flags need an object; write {{...}} around them")
    wrong = [key for key in value if not isinstance(key, str)]
    if wrong:
        raise ConfigError(f"{path} has the key {show(wrong[0])}, but keys are names of flags; correct it")
    return value


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"the configuration file {path} does not exist; correct the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"the configuration file {path} is a folder; name a file in it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the configuration file {path} is no UTF-8 text (byte {error.start}); give a JSON or YAML file"
        ) from error
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}; correct that") from error
    except ValueError as error:  # a null byte
        raise ConfigError(f"the configuration file {show(path)} cannot be a path; correct it") from error


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {position - (text.rfind(chr(10), 0, position) + 1) + 1}"


def _read_json(text: str, path: str) -> Any:  # noqa: ANN401 - any JSON value
    duplicates: list[str] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        duplicates.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    def refuse(word: str) -> None:
        raise ConfigError(f"{path} holds {word}, which is no JSON number; write a finite one")

    try:
        value = json.loads(text, object_pairs_hook=build, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ConfigError(_syntax_error(text, path, error)) from error
    if duplicates:
        spots = [match.start() for match in re.finditer(rf"{re.escape(json.dumps(duplicates[0]))}\s*:", text)]
        place = _place(text, spots[1]) if len(spots) > 1 else "twice"
        raise ConfigError(f"{path}, {place}: the key {duplicates[0]} is given a second time; keep one")
    return value


def _syntax_error(text: str, path: str, error: json.JSONDecodeError) -> str:
    before = text[: error.pos].rstrip()
    following = text[error.pos :].lstrip()[:1]
    if before.endswith(",") and following in ("}", "]"):
        place = _place(text, len(before) - 1)
        return f"{path}, {place}: trailing comma, which JSON does not allow; remove it"
    if following == "," and text[error.pos + 1 :].lstrip()[:1] in ("}", "]"):  # as Python 3.13 points at it
        return f"{path}, {_place(text, error.pos)}: trailing comma, which JSON does not allow; remove it"
    return f"{path}, {_place(text, error.pos)}: no valid JSON ({error.msg}); correct it"


def read_yaml(text: str, path: str) -> Any:  # noqa: ANN401 - any YAML value
    """Read YAML text whose ``yes``, ``no``, ``on`` and ``off`` stay text, as YAML 1.2 has it.

    ``eval_strategy: no`` would otherwise become False.

    Args:
        text: What the file holds.
        path: Of the file, for messages.

    Raises:
        ConfigError: With line and column.
    """
    import yaml  # noqa: PLC0415 - only for YAML files, to keep the start short

    class Loader(yaml.SafeLoader):
        """Safe loader with the booleans of YAML 1.2, and without duplicate keys."""

        yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
            first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":timestamp"))]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:  # noqa: ANN401, FBT001, FBT002 - PyYAML's signature
            """Refuse a key that is given twice."""
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    place = f"line {key.start_mark.line + 1}, column {key.start_mark.column + 1}"
                    raise ConfigError(f"{path}, {place}: the key {key.value} is given a second time; keep one")
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: no valid YAML ({error.problem or error.context}); correct it") from error
    except yaml.reader.ReaderError as error:
        place = _place(text, error.position)
        raise ConfigError(f"{path}, {place}: no valid YAML ({error.reason}); correct it") from error
