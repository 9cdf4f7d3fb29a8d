"""Find norms, rotary attention and gated MLPs of a model by what they compute, never by the name of a class.

A module is a candidate by its attributes (one weight vector and an epsilon; three linear children of fitting widths;
a function of queries, keys, cosines and sines in its forward). What it computes is then asked of the module itself: a
shallow copy with small random weights on the CPU runs on a small random input, and the answer is compared with the
formula. A copy holds other parameters, so neither the model's weights nor their device, dtype or quantisation matter,
and a wrong guess costs a line in a table, not a wrong gradient.

The alternative, a list of class names, is short to write and is out of date with each release of transformers; a
class of the checkpoint's own code would never be on it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from tuning.models.stand_ins import call, shallow_copy, small_linear

__all__ = [
    "GatedMLP", "RMSNorm", "Rotary", "Unfit", "find_gated_mlps", "find_rms_norms", "find_rotaries",
]  # fmt: skip

A = TypeVar("A")
S = TypeVar("S")
_WIDTH, _INNER = 6, 10
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu": nn.functional.gelu,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """A candidate that does not compute the formula.

    Attributes:
        target: Qualified name of the first such module.
        reason: What it does instead; the module is the subject.
    """

    target: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RMSNorm:
    """A root-mean-square norm over the last dimension.

    Attributes:
        target: Qualified name.
        eps: Added to the mean square.
        offset: Added to the weight: 0 or 1.
        cast_before_weight: Whether the normalised row is rounded to the input's dtype before the product.
    """

    target: str
    eps: float
    offset: float
    cast_before_weight: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMLP:
    """``down(activation(gate(x)) * up(x))``, gate and up two layers or the halves of one.

    Attributes:
        target: Qualified name.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
        gate: Attribute of the gate's layer, or of the layer of both.
        up: Attribute of the other layer; None where one layer makes both.
        down: Attribute of the output layer.
    """

    target: str
    activation: str
    gate: str
    up: str | None
    down: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """A module whose forward calls a function that turns queries and keys.

    Attributes:
        target: Qualified name.
        function: Name of that function among the globals of the forward.
        half_tables: The tables hold one angle for both halves.
    """

    target: str
    function: str
    half_tables: bool


def _collect(
    model: nn.Module,
    key_of: Callable[[nn.Module], Hashable | None],
    ask: Callable[[nn.Module], A | None],
    make: Callable[[str, A], S],
    reason: str,
) -> tuple[list[S], list[Unfit]]:
    """Return what is found in ``model``, and the first candidate of each class that does not fit.

    Args:
        model: Searched with all its parts.
        key_of: Gives None for a module that is no candidate, and one key to modules that answer alike.
        ask: Gives what a candidate computes, None if it is something else; asked once a key.
        make: Makes the result of a name and that answer.
        reason: What a candidate does that does not fit.
    """
    found: list[S] = []
    unfit: dict[type, Unfit] = {}
    known: dict[Hashable, A | None] = {}
    for target, module in model.named_modules():
        key = key_of(module)
        if key is None:
            continue
        if "forward" in module.__dict__:
            unfit.setdefault(type(module), Unfit(target=target, reason="has another forward already"))
            continue
        if key not in known:
            known[key] = ask(module)
        answer = known[key]
        if answer is None:
            unfit.setdefault(type(module), Unfit(target=target, reason=reason))
        else:
            found.append(make(target, answer))
    return found, list(unfit.values())


def find_rms_norms(model: nn.Module) -> tuple[list[RMSNorm], list[Unfit]]:
    """Return every RMSNorm of ``model``, and the candidates that compute something else."""

    def key_of(module: nn.Module) -> Hashable | None:
        eps = _epsilon(module)
        return None if eps is None else (type(module), eps, module.get_parameter("weight").numel())

    def make(target: str, answer: tuple[float, float, bool]) -> RMSNorm:
        return RMSNorm(target=target, eps=answer[0], offset=answer[1], cast_before_weight=answer[2])

    return _collect(model, key_of, _norm_convention, make, "computes or rounds otherwise, or takes more than one input")


def _epsilon(module: nn.Module) -> float | None:
    """Return the epsilon of a module that holds one vector called weight and one small number; else None."""
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or any(True for _ in module.children()):
        return None
    numbers = {
        name: value
        for name, value in module.__dict__.items()
        if "eps" in name and type(value) in (int, float) and 0 <= value < 0.1
    }
    return next(iter(numbers.values())) if len(numbers) == 1 else None


def _norm_convention(module: nn.Module) -> tuple[float, float, bool] | None:
    """Return (eps, offset, cast before weight) of a norm that answers as one of the formulas, or None."""
    eps = _epsilon(module)
    # a gate or a residual as a second argument would be part of what it computes
    if eps is None or len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    generator = torch.Generator().manual_seed(0)
    width = module.get_parameter("weight").numel()
    weight, x = torch.randn(width, generator=generator), torch.randn(4, width, generator=generator)
    dtypes = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32))
    inputs = [(x.to(of_x), weight.to(of_weight)) for of_x, of_weight in dtypes]
    answers = [_run_norm(module, *pair) for pair in inputs]
    for offset, early in itertools.product((0.0, 1.0), (True, False)):
        expected = (_norm(*pair, eps, offset, cast_before_weight=early) for pair in inputs)
        if all(_same(a, b) for a, b in zip(answers, expected, strict=True)):
            return eps, offset, early
    return None


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, *, cast_before_weight: bool
) -> torch.Tensor:
    x_hat = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        return (offset + weight if offset else weight) * x_hat.to(x.dtype)
    return ((offset + weight.float()) * x_hat).to(x.dtype)


def _same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Say whether two results are of one dtype and equal up to the order of an fp32 sum."""
    if a is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == torch.float32:
        return torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    # a rounding in another place changes about a third of bf16 results; a sum in another order hardly any
    return float((a != b).float().mean()) < 0.02 and torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-3)


def _run_norm(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    stand_in = shallow_copy(module)
    stand_in.__dict__["_parameters"] = {"weight": nn.Parameter(weight, requires_grad=False)}
    out = call(type(module).forward, stand_in, x)
    return out if isinstance(out, torch.Tensor) else None


def find_gated_mlps(model: nn.Module) -> tuple[list[GatedMLP], list[Unfit]]:
    """Return every gated MLP of ``model``, and the candidates that compute something else."""

    def key_of(module: nn.Module) -> Hashable | None:
        linear = _linear_children(module)
        if linear is None:
            return None
        others = {name: child for name, child in module.named_children() if name not in linear}
        return type(module), tuple(linear.items()), str(others), module.training

    def make(target: str, answer: tuple[str, str, str | None, str]) -> GatedMLP:
        return GatedMLP(target=target, activation=answer[0], gate=answer[1], up=answer[2], down=answer[3])

    return _collect(model, key_of, _mlp_layers, make, "is no gated MLP of SiLU or GELU")


def _linear_children(module: nn.Module) -> dict[str, tuple[int, int]] | None:
    """Return name to (in, out) of the linear layers of what may be a gated MLP; None for other modules.

    It has two or three of them with fitting widths, no parameter of its own, and an activation beside them.
    """
    linear: dict[str, tuple[int, int]] = {}
    others: list[nn.Module] = []
    for name, child in module.named_children():
        widths = getattr(child, "in_features", None), getattr(child, "out_features", None)
        if isinstance(widths[0], int) and isinstance(widths[1], int):
            linear[name] = widths[0], widths[1]
        else:
            others.append(child)
    has_activation = bool(others) or any(inspect.isroutine(value) for value in module.__dict__.values())
    parameters = itertools.chain(module.parameters(recurse=False), *(child.parameters() for child in others))
    if not has_activation or any(True for _ in parameters):
        return None
    return linear if any(True for _ in _roles(linear)) else None


def _roles(linear: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, ...]]:
    """Yield the orders (gate, up, down) or (gate and up, down) that the widths allow."""
    if len(linear) not in (2, 3):
        return
    for names in itertools.permutations(linear):
        *ins, down = [linear[name] for name in names]
        parts = 2 if len(ins) == 1 else 1
        if all(layer == (down[1], down[0] * parts) for layer in ins):
            yield names


def _mlp_layers(module: nn.Module) -> tuple[str, str, str | None, str] | None:
    """Return (activation, gate, up, down) of a module that answers as a gated MLP, or None."""
    linear = _linear_children(module) or {}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, _WIDTH, generator=generator)
    for names in _roles(linear):
        shapes = {
            3: ((_WIDTH, _INNER), (_WIDTH, _INNER), (_INNER, _WIDTH)),
            2: ((_WIDTH, 2 * _INNER), (_INNER, _WIDTH)),
        }
        layers = [small_linear(*shape, generator) for shape in shapes[len(names)]]
        stand_in = shallow_copy(module)
        parts = {name: shallow_copy(child) for name, child in module.named_children()}
        stand_in.__dict__["_modules"] = parts | dict(zip(names, layers, strict=True))
        out = call(type(module).forward, stand_in, x)
        if not isinstance(out, torch.Tensor):
            continue
        gate, up = (layers[0](x), layers[1](x)) if len(names) == 3 else layers[0](x).chunk(2, dim=-1)
        for activation, function in _ACTIVATIONS.items():
            expected = layers[-1](function(gate) * up)
            if out.shape == expected.shape and torch.allclose(out, expected, rtol=1e-5, atol=1e-6):
                return activation, names[0], names[1] if len(names) == 3 else None, names[-1]
    return None


def find_rotaries(model: nn.Module) -> tuple[list[Rotary], list[Unfit]]:
    """Return every module whose forward turns queries and keys as the formula does, and those that do otherwise."""

    def key_of(module: nn.Module) -> Hashable | None:
        calls = _rotary_calls(type(module).forward)
        return tuple(calls) or None

    def ask(module: nn.Module) -> tuple[str, bool] | None:
        (name, function), *more = _rotary_calls(type(module).forward)
        half_tables = None if more else _half_tables(function)
        return None if half_tables is None else (name, half_tables)

    def make(target: str, answer: tuple[str, bool]) -> Rotary:
        return Rotary(target=target, function=answer[0], half_tables=answer[1])

    return _collect(model, key_of, ask, make, "turns other pairs of dimensions than the two halves")


def _unwrapped(function: Callable[..., Any]) -> Any:  # noqa: ANN401 - a function, of which the code is looked at
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _rotary_calls(forward: Callable[..., Any]) -> list[tuple[str, Callable[..., Any]]]:
    """Return the functions of (q, k, cos, sin) that ``forward`` knows by a global name."""
    inner = _unwrapped(forward)
    code = getattr(inner, "__code__", None)
    calls = []
    for name in code.co_names if code is not None else ():
        function = inner.__globals__.get(name)
        if not callable(function) or isinstance(function, type):
            continue
        try:
            parameters = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            continue
        if parameters[:4] == ["q", "k", "cos", "sin"]:
            calls.append((name, function))
    return calls


def _half_tables(function: Callable[..., Any]) -> bool | None:
    """Say whether a rotary function takes tables of half the width; None if it is no rotation of halves."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8, generator=generator), torch.randn(2, 1, 5, 8, generator=generator)
    for half_tables in (False, True):
        cos, sin = (torch.randn(2, 5, 4 if half_tables else 8, generator=generator) for _ in range(2))
        out = call(function, q, k, cos, sin)
        if not isinstance(out, tuple) or len(out) != 2:
            continue
        tables = [torch.cat((t, t), dim=-1).unsqueeze(1) if half_tables else t.unsqueeze(1) for t in (cos, sin)]
        expected = [x * tables[0] + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * tables[1] for x in (q, k)]
        if all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(out, expected, strict=True)):
            return half_tables
    return None
