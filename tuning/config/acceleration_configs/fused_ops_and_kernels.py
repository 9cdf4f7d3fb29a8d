"""``--fast_kernels`` and ``--fused_lora``."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from tuning.config.nested import build_config, check_choices, names_off
from tuning.config.values import BOOL_WORDS, is_bool_word, show
from tuning.errors import ConfigError

__all__ = ["KERNELS", "FastKernelsConfig", "FusedLoraConfig", "FusedOpsAndKernelsConfig"]

KERNELS = ("cross_entropy", "linear_cross_entropy", "rms_norm", "rope", "swiglu")
# linear_cross_entropy holds the whole of cross_entropy
_ALL = ("linear_cross_entropy", "rms_norm", "rope", "swiglu")
# the names of fms-hf-tuning's flag and of its plugin's rules
_OTHER_NAMES: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "fast_loss": "cross_entropy",
        "fused_ce_liger": "linear_cross_entropy",
        "fast_rms_layernorm": "rms_norm",
        "fast_rope_embeddings": "rope",
        "FastCrossEntropyLoss": "cross_entropy",
        "FastRMSLayerNorm": "rms_norm",
        "FastRoPE": "rope",
    }
)
_POSITIONS = ("fast_loss", "fast_rms_layernorm", "fast_rope_embeddings")


@dataclass(frozen=True, kw_only=True, slots=True)
class FastKernelsConfig:
    """``--fast_kernels``: which Triton kernels replace the model's own operations.

    Besides its fields the constructor takes the names of fms-hf-tuning:
    ``FastKernelsConfig(fast_loss=True, fast_rms_layernorm=True, fast_rope_embeddings=True)``. ``fast_loss`` may be
    ``"fused_ce_liger"``, which means ``linear_cross_entropy``.

    Raises:
        ConfigError: If a kernel is unknown, or ``auto`` comes with names.
    """

    kernels: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Kernels that must be applied, sorted, from: " + ", ".join(KERNELS) + "."},
    )
    auto: bool = field(
        default=False, metadata={"help": "Apply whatever fits this model and device, and say what does not."}
    )
    fast_loss: InitVar[bool | str | None] = None
    fast_rms_layernorm: InitVar[bool | None] = None
    fast_rope_embeddings: InitVar[bool | None] = None

    def __post_init__(
        self, fast_loss: bool | str | None, fast_rms_layernorm: bool | None, fast_rope_embeddings: bool | None
    ) -> None:
        """Bring names to canonical form."""
        old = {
            "fast_loss": fast_loss,
            "fast_rms_layernorm": fast_rms_layernorm,
            "fast_rope_embeddings": fast_rope_embeddings,
        }
        label = "--fast_kernels"
        names = {_canonical(name, label) for name in self.kernels}
        names |= {name for name, wanted in _switches(old, label).items() if wanted}
        if self.auto and names:
            raise ConfigError(_auto_with_names(names, label))
        object.__setattr__(self, "kernels", _without_implied(names))

    @property
    def is_off(self) -> bool:
        """Whether nothing is asked for."""
        return not self.kernels and not self.auto

    @classmethod
    def read(cls, bare: Sequence[Any], named: Mapping[str, Any], *, label: str) -> FastKernelsConfig:
        """Read the options of the flag.

        Args:
            bare: Names of kernels, ``all``, ``auto``, ``none``, or the old three booleans.
            named: ``rope=True``; from Python or a file also ``kernels`` and ``auto``.
            label: The flag as messages shall name it.

        Raises:
            ConfigError: If a name is unknown or given twice, or options contradict each other.
        """
        if not bare and not named:
            raise ConfigError(f"{label} was given nothing; name any of {', '.join(KERNELS)}, or all, auto or none")
        options = dict(named)
        listed = options.pop("kernels", None) or ()
        words = [*bare, *([listed] if isinstance(listed, str) else listed)]
        if options.pop("auto", False) in (True, "true", "True"):
            words.append("auto")
        if words and all(is_bool_word(word) or word == "fused_ce_liger" for word in words):
            options = _merge(_positional(words, label), options, label)
            words = []
        lower = [str(word).lower() for word in words]
        switches = _switches(options, label)
        for word in ("all", "auto", "none"):
            if word in lower and (len(words) > 1 or switches):
                raise ConfigError(f"{label} was given {word} together with other options; keep {word} or the others")
        if lower == ["auto"]:
            return cls(auto=True)
        if lower in (["none"], ["all"]):
            return cls(kernels=_ALL if lower == ["all"] else ())
        wanted = _merge(_named_true(words, label), switches, label)
        return cls(kernels=tuple(name for name, on in wanted.items() if on))


def _canonical(name: object, label: str) -> str:
    text = _OTHER_NAMES.get(str(name), str(name))
    if text not in KERNELS:
        close = get_close_matches(text, (*KERNELS, *_OTHER_NAMES, "all", "auto", "none"), n=1)
        hint = f"did you mean {close[0]}?" if close else f"name any of {', '.join(KERNELS)}, or all, auto or none"
        raise ConfigError(f"{label} was given {show(name)}, which is no kernel; {hint}")
    return text


def _positional(words: Sequence[Any], label: str) -> dict[str, Any]:
    if len(words) == 1 and (words[0] is False or BOOL_WORDS.get(str(words[0]).lower()) is False):
        return {}
    if len(words) == 1 and words[0] == "fused_ce_liger":
        return {"fast_loss": "fused_ce_liger"}
    if len(words) != len(_POSITIONS):
        raise ConfigError(
            f"{label} was given {' '.join(map(str, words))}, but booleans come in threes ({', '.join(_POSITIONS)}); "
            "give three of them, or names of kernels, all, auto or none"
        )
    return dict(zip(_POSITIONS, words, strict=True))


def _switches(options: Mapping[str, Any], label: str) -> dict[str, bool]:
    """Return canonical name to whether it is wanted, of ``name=value`` options."""
    wanted: dict[str, bool] = {}
    for name, value in options.items():
        if value is None:
            continue
        kernel = _canonical(name, label)
        if kernel == "cross_entropy" and value == "fused_ce_liger":
            kernel, on = "linear_cross_entropy", True
        elif is_bool_word(value):
            on = value if isinstance(value, bool) else BOOL_WORDS[value.lower()]
        else:
            takes = "true, false or fused_ce_liger" if kernel == "cross_entropy" else "true or false"
            raise ConfigError(f"{label} was given {name} {show(value)}, but it takes {takes}; correct the value")
        if kernel in wanted:
            raise ConfigError(f"{label} was given {kernel} twice; keep one")
        wanted[kernel] = on
    return wanted


def _named_true(words: Sequence[Any], label: str) -> dict[str, bool]:
    wanted: dict[str, bool] = {}
    for word in words:
        name = _canonical(word, label)
        if name in wanted:
            raise ConfigError(f"{label} was given {name} twice; keep one")
        wanted[name] = True
    return wanted


def _merge(left: Mapping[str, Any], right: Mapping[str, Any], label: str) -> dict[str, Any]:
    for name in left:
        if name in right:
            raise ConfigError(f"{label} was given {name} twice; keep one")
    return {**left, **right}


def _auto_with_names(names: Iterable[str], label: str) -> str:
    return f"{label} was given auto together with {', '.join(sorted(names))}; keep auto or the names"


def _without_implied(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(names - {"cross_entropy"} if "linear_cross_entropy" in names else names))


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedLoraConfig:
    """``--fused_lora``: base product, adapters and activation in one step.

    Raises:
        ConfigError: If ``base_layer`` is none of the choices.
    """

    base_layer: str = field(
        default="auto",
        metadata={
            "help": "Kind of base layer: auto_gptq, bitsandbytes, or auto.",
            "choices": ["auto_gptq", "bitsandbytes", "auto"],
        },
    )
    fused_lora: bool = field(default=True, metadata={"help": "Whether to fuse."})

    def __post_init__(self) -> None:
        """Refuse an unknown base layer."""
        check_choices(self, flag="fused_lora")

    @property
    def is_off(self) -> bool:
        """Whether nothing is asked for."""
        return not self.fused_lora


if TYPE_CHECKING:
    _FusedLoraOption = FusedLoraConfig | None
    _FastKernelsOption = FastKernelsConfig | None
else:
    # texts, lists and objects are built in __post_init__; `str` is what HfArgumentParser takes for such a field
    _FusedLoraOption = FusedLoraConfig | str | None
    _FastKernelsOption = FastKernelsConfig | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedOpsAndKernelsConfig:
    """The kernel flags together; text, lists and objects are built into the config objects. What is off is None.

    Raises:
        ConfigError: If an option cannot be read.
    """

    fused_lora: _FusedLoraOption = field(
        default=None,
        metadata={"help": "Fuse LoRA layers: auto_gptq True, bitsandbytes True, or auto. Default: off.", "nargs": "*"},
    )
    fast_kernels: _FastKernelsOption = field(
        default=None,
        metadata={
            "help": "Fast kernels by name, all, auto, or none; see docs/kernels.md. Default: off.",
            "nargs": "*",
        },
    )

    def __post_init__(self) -> None:
        """Build the config objects, once."""
        types_by_name: dict[str, type[FusedLoraConfig] | type[FastKernelsConfig]] = {
            "fused_lora": FusedLoraConfig,
            "fast_kernels": FastKernelsConfig,
        }
        for name, config_type in types_by_name.items():
            value = getattr(self, name)
            built = None if names_off(value) else build_config(config_type, value, flag=name)
            object.__setattr__(self, name, None if built is None or built.is_off else built)
