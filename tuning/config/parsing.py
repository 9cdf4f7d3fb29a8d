"""Command line and configuration file to :class:`RunConfig`.

Both sources give raw values by flag name; the command line wins; then every value is cast as the flag's field has it
(:mod:`tuning.config.values`) and everything that is wrong is told at once. Nothing heavy is imported. Old spellings are
understood here and in :mod:`tuning.config.old_names` only.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuning.config.acceleration_configs import (
    AccelerationFrameworkConfig,
    AttentionAndDistributedPackingConfig,
    FusedOpsAndKernelsConfig,
    QuantizedLoraConfig,
)
from tuning.config.arguments import read_arguments, suggest
from tuning.config.catalog import NESTED_TYPES, FieldSpec, list_flags
from tuning.config.configs import DataArguments, ModelArguments
from tuning.config.files import read_config_file
from tuning.config.fms_file import read_framework_file
from tuning.config.nested import build_config, names_off
from tuning.config.old_names import ALWAYS, REFUSED, RENAMED, convert_renamed, read_always, read_trackers
from tuning.config.peft_config import LoraConfig, PromptTuningConfig
from tuning.config.run_config import RunConfig
from tuning.config.synonyms import same_thing
from tuning.config.values import UNSET, cast, show
from tuning.environment import Launch
from tuning.errors import ConfigError

__all__ = ["RunConfig", "parse", "parse_mapping"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """One value as it was given.

    Attributes:
        spelled: Name it was given under.
        label: That name as messages show it: ``--max_steps``, or ``run.json: max_steps``.
        value: Raw, not None.
    """

    spelled: str
    label: str
    value: Any


def parse(argv: Sequence[str], launch: Launch) -> RunConfig:
    """Read what the user asked for.

    Args:
        argv: Tokens after the program's name.
        launch: Its ``config_path`` is read if the command line names no file.

    Raises:
        ConfigError: With everything that cannot be read.
        SystemExit: After ``--help``, with 0.
    """
    flags = list_flags()
    raw = read_arguments(argv, flags, _extra_names(flags))
    notes = [f"--{name} was given more than once; the last one counts" for name in raw.repeated]
    path = raw.config or launch.config_path
    if raw.config and launch.config_path and raw.config != launch.config_path:
        notes.append(f"{raw.config} is read, and not {launch.config_path}, which SFT_TRAINER_CONFIG_JSON_PATH names")
    reader = _Reader(flags, notes)
    command_line = reader.collect(raw.values, prefix="--")
    file_values = reader.collect(read_config_file(path), prefix=f"{path}: ") if path else {}
    return reader.build(_merge(command_line, file_values), source=path)


def parse_mapping(values: Mapping[str, Any], *, source: str = "the configuration") -> RunConfig:
    """Read flags from a mapping, as from a file.

    Args:
        values: Flag name to value.
        source: Name of it in messages.

    Raises:
        ConfigError: With everything that cannot be read.
    """
    reader = _Reader(list_flags(), [])
    return reader.build(reader.collect(values, prefix=f"{source}: "), source=None)


def _extra_names(flags: Mapping[str, FieldSpec]) -> list[str]:
    return [name for name in (*RENAMED, *ALWAYS, *REFUSED) if name not in flags]


def _merge(strong: Mapping[str, _Given], weak: Mapping[str, _Given]) -> dict[str, _Given]:
    """Return both, ``strong`` winning over the same flag and over its synonyms."""
    overruled = {name for given in strong for name in same_thing(given)}
    return {**strong, **{name: item for name, item in weak.items() if name not in overruled}}


class _Reader:
    """Casts values and keeps what is to be said about them.

    Args:
        flags: Every flag by name.
        notes: Grows.
    """

    def __init__(self, flags: Mapping[str, FieldSpec], notes: list[str]) -> None:
        self.flags = flags
        self.notes = notes
        self.problems: list[str] = []
        self.words = {*_extra_names(flags), "loss_across_gpus"}
        self.canonical = {alias: spec.name for spec in flags.values() for alias in spec.aliases}
        self.canonical |= {old: new for old, new in RENAMED.items() if old not in flags}

    def collect(self, values: Mapping[str, Any], *, prefix: str) -> dict[str, _Given]:
        """Sort one source's values by canonical flag name; null is not asked for."""
        known = {*self.flags, *self.canonical, *_extra_names(self.flags)} - {"config"}
        result: dict[str, _Given] = {}
        for spelled, value in values.items():
            label = f"{prefix}{spelled}"
            name = self.canonical.get(spelled, spelled)
            if spelled not in known:
                self.problems.append(f"{label} is no flag; {suggest(spelled, known)}")
            elif spelled in REFUSED and spelled not in self.flags:
                if value not in (None, False, [], {}):
                    self.problems.append(f"{label} {REFUSED[spelled]}")
            elif value is not None:
                value = self._old_value(spelled, value, label)
                if value is None:
                    continue
                if name in result and result[name].value != value:
                    other = result[name]
                    self.problems.append(
                        f"{other.label} {show(other.value)} and {label} {show(value)} are two names of one flag with "
                        "different values; keep one"
                    )
                result[name] = _Given(spelled=spelled, label=label, value=value)
        return result

    def _old_value(self, spelled: str, value: Any, label: str) -> Any:  # noqa: ANN401 - any raw value
        if isinstance(value, list) and spelled in self.words:
            value = True if not value else value[0] if len(value) == 1 else " ".join(map(str, value))
        if spelled in ALWAYS and (spelled not in self.flags or spelled == "loss_across_gpus"):
            note, problem = read_always(spelled, value, label)
            self.notes += [note] if note else []
            self.problems += [problem] if problem else []
            return None
        if spelled in RENAMED and spelled not in self.flags:
            try:
                return convert_renamed(spelled, value)
            except ValueError as error:
                self.problems.append(f"{label} was given {show(value)}, but it takes {error}; correct the value")
                return None
        return value

    def build(self, given: dict[str, _Given], *, source: str | None) -> RunConfig:
        """Cast every value and build the config objects.

        Raises:
            ConfigError: With everything that cannot be read.
        """
        framework_file = given.pop("acceleration_framework_config_file", None)
        if framework_file is not None and not self.problems:
            settings = read_framework_file(str(framework_file.value))
            given = _merge(given, self.collect(settings, prefix=f"{framework_file.value}: "))
        typed = {name: self._cast(self.flags[name], item) for name, item in given.items()}
        if self.problems:
            raise ConfigError(self.problems)
        typed = {name: value for name, value in typed.items() if value is not UNSET}
        by_owner = self._by_owner(typed)
        trackers = typed.pop("trackers", None)
        if trackers and "report_to" not in typed:
            by_owner["train"]["report_to"] = trackers
        method = typed.get("peft_method", "none")
        return RunConfig(
            model=ModelArguments(**by_owner["model"]),
            data=DataArguments(**by_owner["data"]),
            train=types.MappingProxyType(by_owner["train"]),
            peft_method=method,
            peft=LoraConfig(**by_owner["lora"])
            if method == "lora"
            else PromptTuningConfig(**by_owner["pt"])
            if method == "pt"
            else None,
            acceleration=_acceleration(by_owner["acceleration"], by_owner["plugin"]),
            exp_metadata=typed.get("exp_metadata"),
            given=frozenset(typed),
            source=source,
            notes=tuple(self.notes),
        )

    def _by_owner(self, typed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        owners = ("model", "data", "train", "lora", "pt", "acceleration", "plugin", "run")
        result: dict[str, dict[str, Any]] = {owner: {} for owner in owners}
        for name, value in typed.items():
            spec = self.flags[name]
            result["train" if spec.is_training else spec.owner][name] = value
        return result

    def _cast(self, spec: FieldSpec, item: _Given) -> Any:  # noqa: ANN401 - whatever the flag takes
        value = spec.const if item.value is True and spec.const is not UNSET else item.value
        try:
            if spec.owner == "plugin":
                return UNSET if names_off(value) else value
            if "nested" in spec.kind.bases:
                return self._cast_nested(spec, item)
            result = cast(value, spec.kind)
            return read_trackers(result, item.label) if spec.name == "trackers" else result
        except ConfigError as error:
            self.problems += error.problems
        except ValueError as error:
            self.problems.append(f"{item.label} was given {show(value)}, but it takes {error}; correct the value")
        return UNSET

    def _cast_nested(self, spec: FieldSpec, item: _Given) -> Any:  # noqa: ANN401 - a config object
        config = (
            None
            if names_off(item.value)
            else build_config(
                NESTED_TYPES[spec.name], [] if item.value is True else item.value, flag=spec.name, label=item.label
            )
        )
        if config is None or getattr(config, "is_off", False):
            self.notes.append(f"{item.label} {_plain(item.value)} asks for nothing, so it is off")
            return UNSET
        return config


def _plain(value: Any) -> str:  # noqa: ANN401 - any raw value
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else show(value)


def _acceleration(flags: Mapping[str, Any], plugins: Mapping[str, Any]) -> AccelerationFrameworkConfig:
    def pick(config_type: type) -> dict[str, Any]:
        return {item.name: flags[item.name] for item in dataclasses.fields(config_type) if item.name in flags}

    return AccelerationFrameworkConfig(
        attention=AttentionAndDistributedPackingConfig(**pick(AttentionAndDistributedPackingConfig)),
        kernels=FusedOpsAndKernelsConfig(**pick(FusedOpsAndKernelsConfig)),
        quantized=QuantizedLoraConfig(**pick(QuantizedLoraConfig)),
        extra=tuple(sorted(plugins.items())),
    )
