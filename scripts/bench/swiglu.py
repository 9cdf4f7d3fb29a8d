"""SwiGLU and GeGLU, forward and backward, against liger-kernel, torch.compile of the reference, eager, and copy.

The floor is eight passes: read two and write one, read three and write two.

    python scripts/bench/swiglu.py
    TRITON_INTERPRET=1 python scripts/bench/swiglu.py --tiny
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence

import torch
from _bench import Recorder, argument_parser, best_of, compare, copy_bandwidth

from tuning.kernels import reference
from tuning.kernels import swiglu as module
from tuning.kernels.swiglu import geglu, swiglu

_PASSES = 8
_ALLOWED = 2.0**-8
_ACTIVATIONS = {"silu": swiglu, "gelu_tanh": geglu}


def contenders(
    gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, activation: str, *, compiled: bool
) -> dict[str, Callable[[], Sequence[torch.Tensor]]]:
    """Return name to a function that gives result and both gradients."""

    def both(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        def work() -> Sequence[torch.Tensor]:
            y = function(gate, up)
            return y, *torch.autograd.grad(y, (gate, up), dy)

        return work

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return reference.glu(gate, up, activation)

    found = {"ours": both(_ACTIVATIONS[activation]), "eager": both(plain)}
    if compiled:
        found["compiled"] = both(torch.compile(plain, dynamic=False))
    return found


def liger(
    gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, activation: str
) -> dict[str, Callable[[], Sequence[torch.Tensor]]]:
    """Return liger's function, whose backward overwrites its inputs; empty where it is not installed."""
    if not importlib.util.find_spec("liger_kernel"):
        return {}
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    function = LigerSiLUMulFunction if activation == "silu" else LigerGELUMulFunction

    def work() -> Sequence[torch.Tensor]:
        y = function.apply(gate, up)
        return y, *torch.autograd.grad(y, (gate, up), dy)

    return {"liger": work}


def sweep(
    recorder: Recorder,
    case: str,
    inputs: tuple[torch.Tensor, torch.Tensor],
    dy: torch.Tensor,
    activation: str,
    *,
    tiny: bool,
) -> None:
    """Time launch parameters of both kernels."""

    def forward(block: int, warps: int) -> object:
        return module._forward(*inputs, activation, block=block, warps=warps)

    def backward(block: int, warps: int) -> object:
        return module._backward(dy, *inputs, activation, packed=False, block=block, warps=warps)

    for function in (forward, backward):
        variants = {
            f"block {block} warps {warps}": functools.partial(function, block, warps)
            for block, warps in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8))
        }
        best_of(recorder, f"{case} {function.__name__}", variants, tiny=tiny)


def main() -> None:
    """Run all shapes."""
    options = argument_parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = Recorder("swiglu", csv_path=options.csv, commit=options.commit)
    shape = (3, 20) if options.tiny else (16384, 14336)
    allowed = _ALLOWED if device == "cuda" else 2 * _ALLOWED
    for activation in _ACTIVATIONS:
        torch.manual_seed(0)
        gate, up, dy = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(3))
        gate, up = gate.requires_grad_(), up.requires_grad_()
        case = f"{shape[0]} x {shape[1]} {activation} bf16"
        if options.sweep:
            sweep(recorder, case, (gate.detach(), up.detach()), dy, activation, tiny=options.tiny)
            continue
        wide = [t.detach().double().requires_grad_() for t in (gate, up)]
        y = reference.glu(*wide, activation)
        expected = (y.detach(), *torch.autograd.grad(y, wide, dy.double()))
        del y
        works = contenders(gate, up, dy, activation, compiled=device == "cuda")
        times = compare(recorder, case, works, expected, allowed=allowed, tiny=options.tiny)
        for name, work in liger(gate, up, dy, activation).items():
            times |= compare(recorder, case, {name: work}, expected, allowed=3 * allowed, tiny=options.tiny)
            if name in times:
                recorder.add(f"{case} ours", f"speed_over_{name}", times[name].p50 / times["ours"].p50, "x")
        copy = copy_bandwidth(gate.numel(), tiny=options.tiny)
        recorder.add(case, "copy", copy, "TB/s")
        for name, timing in times.items():
            bandwidth = _PASSES * gate.numel() * gate.element_size() / timing.p50 / 1e9
            recorder.add(f"{case} {name}", "bandwidth", bandwidth, "TB/s")
            recorder.add(f"{case} {name}", "share_of_copy", bandwidth / copy, "share")


if __name__ == "__main__":
    main()
