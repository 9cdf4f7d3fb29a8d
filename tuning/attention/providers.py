"""Which kernel does the attention: what exists on this device, what it can do, which is fastest, and why.

The table below is the whole policy. :data:`PROVIDERS` is ordered by speed where two can do the same work (figures in
docs/attention.md); the first that can serve a request is taken. A provider says in words why it cannot, and these
words are the log line and, if none is left, the error. Packages are imported when they are chosen, not before; one that
is installed and broken is passed over by name, never in silence.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tuning.attention.flex import load_flex
from tuning.attention.packages import load_flash_attn_2, load_flash_attn_3, load_flash_attn_4, load_torch_varlen
from tuning.attention.segments import attend_segments
from tuning.attention.variant import Kernel
from tuning.environment import installed_version
from tuning.errors import UnsupportedError

__all__ = ["PROVIDERS", "Choice", "Provider", "Request", "choose"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one kind of attention layer needs.

    Attributes:
        device_type: ``"cuda"``, ``"cpu"``, ...
        capability: (major, minor) of the GPU; None without one.
        dtype: Of queries, keys and values.
        width: Head width of queries and keys.
        value_width: Head width of values.
        window: There is a sliding window.
        softcap: Scores are capped.
        sinks: There are learned sinks.
        dropout: Attention weights are dropped.
    """

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    width: int
    value_width: int
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False

    def describe(self) -> str:
        """Return the request in words."""
        needs = [name for name in ("window", "softcap", "sinks", "dropout") if getattr(self, name)]
        device = self.device_type
        if self.capability is not None:
            device += f" (compute capability {self.capability[0]}.{self.capability[1]})"
        widths = f"{self.width}" if self.width == self.value_width else f"{self.width} (values {self.value_width})"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} on {device}, head width {widths}" + "".join(f", {need}" for need in needs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provider:
    """One way to do the work.

    Attributes:
        name: What log lines call it.
        device_type: Where its kernel runs.
        find: Returns why it is not on this machine, or None.
        refuse: Returns why it cannot serve a request, or None.
        load: Imports what it needs and returns the kernel.
    """

    name: str
    device_type: str
    find: Callable[[], str | None]
    refuse: Callable[[Request], str | None]
    load: Callable[[], Kernel]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The provider of a request.

    Attributes:
        name: Of the provider.
        kernel: Its kernel.
        passed_over: Name and reason of every faster provider for this kind of device that was not taken.
    """

    name: str
    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...]

    def describe(self) -> str:
        """Return which and why, for the log."""
        why = "; ".join(f"not {name}: {reason}" for name, reason in self.passed_over)
        return f"{self.name} ({why})" if why else self.name


def choose(request: Request, providers: Sequence[Provider] | None = None) -> Choice:
    """Return the fastest provider that can serve ``request``.

    Args:
        request: What is needed.
        providers: Fastest first; default: :data:`PROVIDERS`.

    Raises:
        UnsupportedError: If none can; the text tells why each cannot.
    """
    passed_over: list[tuple[str, str]] = []
    for provider in PROVIDERS if providers is None else providers:
        if provider.device_type != request.device_type:
            continue
        reason = provider.refuse(request) or provider.find()
        if reason is None:
            try:
                return Choice(name=provider.name, kernel=provider.load(), passed_over=tuple(passed_over))
            except (ImportError, OSError, AttributeError) as error:
                reason = f"installed, but it fails to import ({type(error).__name__}: {error})"
        passed_over.append((provider.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over) or "none is for this kind of device"
    raise UnsupportedError(
        f"--padding_free needs an attention kernel that keeps samples apart, for {request.describe()}, "
        f"and this machine has none ({reasons}). Use another --torch_dtype, or train without --padding_free."
    )


def _refuse_flash(request: Request, *, since: tuple[int, int], widest: int = 256) -> str | None:
    """Return what every flash kernel refuses: old GPUs, fp32, odd or very wide heads."""
    if request.capability is None or request.capability < since:
        return f"for compute capability {since[0]}.{since[1]} and later"
    if request.dtype not in _HALF:
        return f"no {str(request.dtype).removeprefix('torch.')}"
    if request.width % 8 or request.width > widest:
        return f"head width {request.width} (multiples of 8 up to {widest})"
    return None


def _lacks(request: Request, *features: str) -> str | None:
    """Return the first of ``features`` that is asked for, as a reason."""
    missing = [feature for feature in features if getattr(request, feature)]
    if not missing and request.value_width != request.width:
        return f"values of head width {request.value_width} beside {request.width}"
    return f"no {missing[0]}" if missing else None


def _refuse_flash_3(request: Request) -> str | None:
    if request.capability is not None and request.capability[0] != 9:
        return "for compute capability 9.x"
    return _refuse_flash(request, since=(9, 0)) or _lacks(request, "sinks", "dropout")


def _refuse_flash_4(request: Request) -> str | None:
    # Blackwell's kernels stop at 128, but for 256 x 256
    widest = 256 if request.capability is not None and request.capability[0] == 9 else 128
    return _refuse_flash(request, since=(9, 0), widest=widest) or _lacks(request, "softcap", "dropout")


def _refuse_torch_varlen(request: Request) -> str | None:
    return _refuse_flash(request, since=(8, 0)) or _lacks(request, "softcap", "sinks", "dropout")


def _refuse_flash_2(request: Request) -> str | None:
    if request.softcap and request.dropout:
        return "no softcap together with dropout"
    return _refuse_flash(request, since=(8, 0)) or _lacks(request, "sinks")


def _refuse_flex(request: Request) -> str | None:
    return "no dropout" if request.dropout else None


def _refuse_cpu_flash(request: Request) -> str | None:
    missing = [feature for feature in ("softcap", "sinks") if getattr(request, feature)]
    return f"no {missing[0]}" if missing else None


def _refuse_nothing(request: Request) -> str | None:
    return None


def _find_module(name: str, distribution: str | None = None) -> Callable[[], str | None]:
    """Return a finder of the module ``name``, and of the distribution it must come from."""

    def find() -> str | None:
        if distribution is not None and installed_version(distribution) is None:
            return "not installed"
        return None if importlib.util.find_spec(name) is not None else "not installed"

    return find


def _find_nothing() -> str | None:
    return None


# order: forward and backward of 16,384 tokens in 60 samples, one H200 (docs/attention.md); FlashAttention 3 was not at
# hand there and stands first on Hopper by its authors' figures. flash-attn-4 puts its package inside flash-attn's name,
# so flash-attn itself is asked for by its distribution.
PROVIDERS: tuple[Provider, ...] = (
    Provider(
        name="FlashAttention 3", device_type="cuda",
        find=_find_module("flash_attn_interface"), refuse=_refuse_flash_3, load=load_flash_attn_3,
    ),
    Provider(
        name="flash-attn-4", device_type="cuda",
        find=_find_module("flash_attn", "flash-attn-4"), refuse=_refuse_flash_4, load=load_flash_attn_4,
    ),
    Provider(
        name="torch varlen", device_type="cuda",
        find=_find_module("torch.nn.attention.varlen"), refuse=_refuse_torch_varlen, load=load_torch_varlen,
    ),
    Provider(
        name="flash-attn 2", device_type="cuda",
        find=_find_module("flash_attn", "flash-attn"), refuse=_refuse_flash_2, load=load_flash_attn_2,
    ),
    Provider(name="flex_attention", device_type="cuda", find=_find_nothing, refuse=_refuse_flex, load=load_flex),
    Provider(
        name="torch's CPU flash kernel, sample by sample", device_type="cpu",
        find=_find_nothing, refuse=_refuse_cpu_flash, load=lambda: attend_segments,
    ),
    Provider(
        name="written-out attention, sample by sample", device_type="cpu",
        find=_find_nothing, refuse=_refuse_nothing, load=lambda: attend_segments,
    ),
)  # fmt: skip
