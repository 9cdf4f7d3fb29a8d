"""``--acceleration_framework_config_file``: the YAML of fms-acceleration, read as flags.

Its nesting (plugins, then training or peft, then a section each) carries no meaning that the flag names lack, so only
the leaves that hold options are looked at.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Final

from tuning.config.files import read_config_file
from tuning.errors import ConfigError

__all__ = ["read_framework_file"]

_FUSED_OPS = "fused_ops_and_kernels"  # one section there, two flags here
# path below "plugins" -> flag; the sections as fms-acceleration's sample configurations have them
_SECTIONS: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "training.attention.padding_free": "padding_free",
        "training.dataloader.multipack": "multipack",
        "training.fused_ops_and_kernels": _FUSED_OPS,
        "peft.quantization.auto_gptq": "auto_gptq",
        "peft.quantization.bitsandbytes": "bnb_qlora",
        "peft.quantization.fused_ops_and_kernels": _FUSED_OPS,
    }
)
_LORA_OPTIONS = ("base_layer", "fused_lora")


def read_framework_file(path: str) -> dict[str, Any]:
    """Return the flags that a framework configuration of fms-acceleration asks for.

    Raises:
        ConfigError: If the file cannot be read or holds a setting that is no flag here.
    """
    content = read_config_file(path)
    plugins = content.get("plugins")
    if set(content) != {"plugins"} or not isinstance(plugins, Mapping):
        raise ConfigError(f"{path} is no framework configuration, which has one key, plugins; use --config for flags")
    flags: dict[str, Any] = {}
    problems = []
    for section, options in _iter_sections(plugins, ""):
        flag = _SECTIONS.get(section)
        if flag is None:
            problems.append(f"{path} has plugins.{section}, which has no counterpart here; remove it")
        elif flag == _FUSED_OPS:
            flags |= _split_fused(options)
        elif options.get("use_external_lib"):
            problems.append(f"{path} asks for the package auto_gptq by use_external_lib, which is not used; remove it")
        else:
            flags[flag] = {name: value for name, value in options.items() if name != "use_external_lib"}
    if problems:
        raise ConfigError(problems)
    return flags


def _iter_sections(node: Mapping[str, Any], prefix: str) -> list[tuple[str, Mapping[str, Any]]]:
    sections: list[tuple[str, Mapping[str, Any]]] = []
    for name, value in node.items():
        path = f"{prefix}{name}"
        deeper = isinstance(value, Mapping) and any(key.startswith(f"{path}.") for key in _SECTIONS)
        sections += _iter_sections(value, f"{path}.") if deeper else [(path, value or {})]
    return sections


def _split_fused(options: Mapping[str, Any]) -> dict[str, Any]:
    lora = {name: options[name] for name in _LORA_OPTIONS if name in options}
    # fast_rsm_layernorm: as the sample configurations of the quantised section spell it
    kernels = {name.replace("_rsm_", "_rms_"): value for name, value in options.items() if name not in _LORA_OPTIONS}
    return ({"fused_lora": lora} if lora else {}) | ({"fast_kernels": kernels} if kernels else {})
