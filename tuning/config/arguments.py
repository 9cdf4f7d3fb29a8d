"""The argparse side of the command line: tokens to raw values, and the help.

Values stay text here; :mod:`tuning.config.parsing` casts them as it casts those of a file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from tuning.config.catalog import FieldSpec
from tuning.config.values import UNSET, describe_choices
from tuning.errors import ConfigError

__all__ = ["RawArguments", "build_parser", "read_arguments", "suggest"]

_GROUP_TITLES: Final = {
    "run": "the run",
    "model": "model",
    "data": "data",
    "acceleration": "acceleration",
    "lora": "LoRA (--peft_method lora)",
    "pt": "prompt tuning (--peft_method pt)",
    "plugin": "third-party plugins",
    "tuning": "training",
    "trl": "training, from TRL's SFTConfig",
    "transformers": "training, from transformers' TrainingArguments",
}
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(=.*)?", re.DOTALL)
_BARE = object()  # a flag without a value


@dataclass(frozen=True, kw_only=True, slots=True)
class RawArguments:
    """What stands on the command line.

    Attributes:
        values: Flag as spelled, without dashes, to text, list of texts, or True for a flag alone.
        config: Path of the configuration file, or None.
        repeated: Flags that were given more than once with different values; the last counts.
    """

    values: Mapping[str, Any]
    config: str | None
    repeated: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with its usage text."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see --help")


class _Store(argparse.Action):
    """Store the raw value and notice when another one was there."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # noqa: ANN401 - argparse's signature
        option_string: str | None = None,
    ) -> None:
        """Store ``values`` under the option as it is spelled."""
        name = str(option_string).removeprefix("--")
        value = True if values is _BARE else values
        if name in namespace.values and namespace.values[name] != value:
            namespace.repeated.append(name)
        namespace.values[name] = value


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean ...?"`` for an unknown name, or where to look."""
    close = get_close_matches(name, list(known), n=2, cutoff=0.7)
    return f"did you mean {' or '.join(close)}?" if close else "see --help for all flags"


def build_parser(flags: Mapping[str, FieldSpec], extra: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all flags; its help is the product's help.

    Args:
        flags: Every flag by name.
        extra: Old names that are accepted, and not in the help.
    """
    parser = _Parser(
        prog="python -m tuning.sft_trainer",
        usage="python -m tuning.sft_trainer [CONFIG] [--flag value ...]",
        description="Fine-tune a causal language model. Flags may be spelled with - or _; a boolean flag alone means "
        "true. A JSON or YAML file of flags may be named first; the command line wins over it.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=118),
    )
    for owner, title in _GROUP_TITLES.items():
        specs = [spec for spec in flags.values() if spec.owner == owner]
        group = parser.add_argument_group(title) if specs else None
        for spec in specs:
            assert group is not None
            group.add_argument(
                *(f"--{name}" for name in (spec.name, *spec.aliases)), action=_Store, dest="values",
                default=argparse.SUPPRESS, metavar=_metavar(spec), help=_help(spec), **_arity(spec),
            )  # fmt: skip
    for name in extra:
        parser.add_argument(
            f"--{name}", action=_Store, dest="values", default=argparse.SUPPRESS, nargs="*", help=argparse.SUPPRESS
        )
    return parser


def _arity(spec: FieldSpec) -> dict[str, Any]:
    bases = spec.kind.bases
    if "nested" in bases:
        return {"nargs": "*"}
    if spec.name in ("trackers", "loss_across_gpus") or ("list" in bases and "str" not in bases):
        return {"nargs": "+"}
    return {} if spec.const is UNSET else {"nargs": "?", "const": _BARE}


def _metavar(spec: FieldSpec) -> str:
    bases = spec.kind.bases
    if "nested" in bases:
        return "OPTION"
    for base, word in (("bool", "BOOL"), ("dict", "JSON"), ("int", "N"), ("float", "X")):
        if base in bases:
            return word
    return "TEXT"


def _help(spec: FieldSpec) -> str:
    text = spec.help.replace("\n", " ").strip()
    if spec.kind.choices and not all(choice in text for choice in spec.kind.choices):
        text += f" {describe_choices(spec.kind.choices).capitalize()}."
    if spec.default is not UNSET and spec.default is not None and spec.default != [] and "efault" not in text:
        default = str(spec.default).lower() if isinstance(spec.default, bool) else spec.default
        text += f" Default: {default}."
    return text.replace("%", "%%")


def read_arguments(argv: Sequence[str], flags: Mapping[str, FieldSpec], extra: Sequence[str] = ()) -> RawArguments:
    """Read the command line; ``--help`` prints the help and ends the process with 0.

    Args:
        argv: Tokens after the program's name.
        flags: Every flag by name.
        extra: Old names that are accepted.

    Raises:
        ConfigError: With every unknown flag, or with what argparse cannot read.
        SystemExit: After the help.
    """
    parser = build_parser(flags, extra)
    tokens = _spell(argv, flags, extra)
    namespace = argparse.Namespace(values={}, repeated=[])
    namespace, rest = parser.parse_known_args(tokens, namespace)
    values: dict[str, Any] = namespace.values
    config = values.pop("config", None)
    if rest:
        if len(rest) > 1 or config is not None or rest[0].startswith("-"):
            where = f"after --config {config} " if config is not None else ""
            raise ConfigError(
                f"the command line holds {' '.join(rest)} {where}with no flag in front; one configuration file may "
                "stand so, name the flag of everything else"
            )
        config = rest[0]
    return RawArguments(values=values, config=config, repeated=tuple(dict.fromkeys(namespace.repeated)))


def _spell(argv: Sequence[str], flags: Mapping[str, FieldSpec], extra: Sequence[str]) -> list[str]:
    """Return ``argv`` with every flag in its one spelling: underscores, and ``--no_x`` as ``--x=false``."""
    known = {"help", *flags, *extra, *(alias for spec in flags.values() for alias in spec.aliases)}
    negated = {f"no_{name}": name for name, spec in flags.items() if "bool" in spec.kind.bases and spec.default is True}
    tokens, problems = [], []
    for token in argv:
        match = _FLAG.fullmatch(token)
        if match is None:
            tokens.append(token)
            continue
        name, value = match[1].replace("-", "_"), match[2] or ""
        if name in known:
            tokens.append(f"--{name}{value}")
        elif name in negated and not value:
            tokens.append(f"--{negated[name]}=false")
        else:
            problems.append(f"--{match[1]} is no flag; {suggest(name, known)}")
    if problems:
        raise ConfigError(problems)
    return tokens
