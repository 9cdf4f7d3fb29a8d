"""RMSNorm, forward and backward, against liger-kernel, torch.compile of the reference, eager, and the copy bandwidth.

The floor is five passes over ``[rows, width]`` (read x, write y; read x and dy, write dx).

    python scripts/bench/rms_norm.py
    TRITON_INTERPRET=1 python scripts/bench/rms_norm.py --tiny
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence

import torch
from _bench import Recorder, argument_parser, best_of, compare, copy_bandwidth

from tuning.kernels import reference
from tuning.kernels import rms_norm as module
from tuning.kernels.rms_norm import rms_norm

_EPS = 1e-6
_PASSES = 5
# two roundings of bf16: the normalised row and the result
_ALLOWED = 2 * 2.0**-8


def contenders(
    x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, *, compiled: bool
) -> dict[str, Callable[[], Sequence[torch.Tensor]]]:
    """Return name to a function that gives result and both gradients."""

    def both(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        def work() -> Sequence[torch.Tensor]:
            y = function(x, weight)
            return y, *torch.autograd.grad(y, (x, weight), dy)

        return work

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, weight, _EPS)

    found = {"ours": both(lambda x, weight: rms_norm(x, weight, _EPS)), "eager": both(plain)}
    if compiled:
        found["compiled"] = both(torch.compile(plain, dynamic=False))
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        found["liger"] = both(lambda x, weight: LigerRMSNormFunction.apply(x, weight, _EPS, 0.0, "llama", False))
    return found


def sweep(
    recorder: Recorder, case: str, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, *, tiny: bool
) -> None:
    """Time launch parameters of both kernels."""
    _, rstd = module._forward(x, weight, _EPS, 0.0, cast_before_weight=True)
    base = module._backward_launch(x.shape[1]).rows
    rows = sorted({max(1, base // 2), base, base * 2})
    forward = {
        str(tuple(launch)): lambda launch=launch: module._forward(
            x, weight, _EPS, 0.0, cast_before_weight=True, launch=launch
        )
        for launch in itertools.starmap(module.Launch, itertools.product(rows, (1, 2, 4, 8, 16)))
    }
    best_of(recorder, f"{case} forward", forward, tiny=tiny)
    backward = {
        str(tuple(launch)): lambda launch=launch: module._backward(
            dy, x, weight, rstd, 0.0, weight_grad=True, launch=launch
        )
        for launch in itertools.starmap(module.Launch, itertools.product(rows[:2], (4, 8, 16), (1, 2, 4), (1, 2, 3)))
    }
    best_of(recorder, f"{case} backward", backward, tiny=tiny)


def main() -> None:
    """Run all shapes."""
    options = argument_parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = Recorder("rms_norm", csv_path=options.csv, commit=options.commit)
    shapes = [(16384, 4096), (655_360, 128)]
    if not options.sweep:
        shapes += [(16384, 2880), (8192, 8192)]
    for rows, width in [(6, 20)] if options.tiny else shapes:
        torch.manual_seed(0)
        x = torch.randn(rows, width, device=device).to(torch.bfloat16).requires_grad_()
        weight = torch.randn(width, device=device).to(torch.bfloat16).requires_grad_()
        dy = torch.randn(rows, width, device=device).to(torch.bfloat16)
        case = f"{rows} x {width} bf16"
        if options.sweep:
            sweep(recorder, case, x.detach(), weight.detach(), dy, tiny=options.tiny)
            continue
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        y = reference.rms_norm(*wide, _EPS)
        expected = (y.detach(), *torch.autograd.grad(y, wide, dy.double()))
        del y
        allowed = _ALLOWED if device == "cuda" else 2 * _ALLOWED
        works = contenders(x, weight, dy, compiled=device == "cuda")
        times = compare(recorder, case, works, expected, allowed=allowed, tiny=options.tiny)
        copy = copy_bandwidth(rows * width, tiny=options.tiny)
        recorder.add(case, "copy", copy, "TB/s")
        for name, timing in times.items():
            bandwidth = _PASSES * x.numel() * x.element_size() / timing.p50 / 1e9
            recorder.add(f"{case} {name}", "bandwidth", bandwidth, "TB/s")
            recorder.add(f"{case} {name}", "share_of_copy", bandwidth / copy, "share")


if __name__ == "__main__":
    main()
