"""Rotary embedding, forward and backward, against liger-kernel, torch.compile of the reference, eager, and copy.

The floor is two passes over queries and keys each way: read and write once, forward and backward.

    python scripts/bench/rope.py
    TRITON_INTERPRET=1 python scripts/bench/rope.py --tiny
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from _bench import Recorder, argument_parser, best_of, compare, copy_bandwidth

from tuning.kernels import reference
from tuning.kernels import rope as module
from tuning.kernels.rope import rope

_PASSES = 4
_ALLOWED = 2.0**-8
# eager bf16 rounds each product and the sum, and is the yardstick all the same
_ALLOWED_EAGER = 3 * 2.0**-8


def contenders(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, grads: list[torch.Tensor], *, compiled: bool
) -> dict[str, Callable[[], Sequence[torch.Tensor]]]:
    """Return name to a function that gives both results and both gradients."""

    def both(function: Callable[..., Sequence[torch.Tensor]]) -> Callable[[], Sequence[torch.Tensor]]:
        def work() -> Sequence[torch.Tensor]:
            outs = function(q, k, cos, sin)
            return *outs, *torch.autograd.grad(outs, (q, k), grads)

        return work

    found = {"ours": both(rope), "eager": both(reference.rope)}
    if compiled:
        found["compiled"] = both(torch.compile(reference.rope, dynamic=False))
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.rope import LigerRopeFunction

        # it turns in place, forward and backward, so it gets copies to keep the inputs of the others
        def liger(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Sequence[torch.Tensor]:
            return LigerRopeFunction.apply(q, k, cos, sin)

        found["liger"] = both(liger)
    return found


def main() -> None:
    """Run all shapes."""
    options = argument_parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = Recorder("rope", csv_path=options.csv, commit=options.commit)
    shapes = [
        # the last column says whether a head's tokens lie together; models give a view of the projection's output
        (16384, 32, 8, 128, 128, False),
        (16384, 32, 8, 128, 128, True),
        (16384, 32, 32, 80, 32, False),
        (16384, 28, 4, 128, 128, False),
    ]
    for tokens, heads, kv_heads, width, rot, by_head in [(5, 3, 2, 10, 10, False)] if options.tiny else shapes:
        torch.manual_seed(0)

        def projected(heads: int, *, tokens: int = tokens, width: int = width, by_head: bool = by_head) -> torch.Tensor:
            x = torch.randn(1, tokens, heads, width, device=device).to(torch.bfloat16).transpose(1, 2)
            return x.contiguous() if by_head else x

        q, k = projected(heads).requires_grad_(), projected(kv_heads).requires_grad_()
        grads = [projected(heads), projected(kv_heads)]
        phase = torch.rand(1, tokens, rot // 2, device=device).repeat(1, 1, 2) * 6.28
        cos, sin = phase.cos().to(torch.bfloat16), phase.sin().to(torch.bfloat16)
        case = f"{tokens} tokens {heads}+{kv_heads} heads of {width}, {rot} turned, bf16{', head by head' * by_head}"
        if options.sweep:
            variants = {
                f"warps {warps}": lambda warps=warps, q=q, k=k, cos=cos, sin=sin: module._turn(
                    q.detach(), k.detach(), cos, sin, None, half_tables=False, backward=False, warps=warps
                )
                for warps in (1, 2, 4, 8, 16)
            }
            best_of(recorder, case, variants, tiny=options.tiny)
            continue
        wide = [t.detach().double().requires_grad_() for t in (q, k)]
        outs = reference.rope(*wide, cos.double(), sin.double())
        expected = (
            *(out.detach() for out in outs),
            *torch.autograd.grad(outs, wide, [g.double() for g in grads]),
        )
        works = contenders(q, k, cos, sin, grads, compiled=device == "cuda")
        if rot != width:
            works.pop("liger", None)
        before = [t.detach().clone() for t in (q, *grads)]
        allowed = _ALLOWED if device == "cuda" else 2 * _ALLOWED
        liger = {name: works.pop(name) for name in ("liger",) if name in works}
        times = compare(recorder, case, works, expected, allowed=allowed, tiny=options.tiny)
        assert all(torch.equal(a.detach(), b) for a, b in zip((q, *grads), before, strict=True))
        for name, work in liger.items():
            # last, because it overwrites its inputs; right on the first call only
            times |= compare(recorder, case, {name: work}, expected, allowed=_ALLOWED_EAGER, tiny=options.tiny)
            if name in times:
                recorder.add(f"{case} ours", f"speed_over_{name}", times[name].p50 / times["ours"].p50, "x")
        num_elements = q.numel() + k.numel()
        copy = copy_bandwidth(num_elements, tiny=options.tiny)
        recorder.add(case, "copy", copy, "TB/s")
        for name, timing in times.items():
            bandwidth = _PASSES * num_elements * q.element_size() / timing.p50 / 1e9
            recorder.add(f"{case} {name}", "bandwidth", bandwidth, "TB/s")
            recorder.add(f"{case} {name}", "share_of_copy", bandwidth / copy, "share")


if __name__ == "__main__":
    main()
