"""Cross-entropy of given logits, forward and backward, against liger-kernel, torch.compile, eager, and copy.

The floor is three passes over ``[tokens, vocabulary]``: read for the loss, read and write for the gradient.

    python scripts/bench/cross_entropy.py
    TRITON_INTERPRET=1 python scripts/bench/cross_entropy.py --tiny
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence

import torch
from _bench import Recorder, argument_parser, best_of, compare, copy_bandwidth, extra_memory

from tuning.kernels._softmax import Launch, LossOptions, softmax_rows_
from tuning.kernels.cross_entropy import cross_entropy

_PASSES = 3
_ALLOWED = 2.0**-8


def contenders(
    logits: torch.Tensor, labels: torch.Tensor, *, compiled: bool
) -> dict[str, Callable[[], Sequence[torch.Tensor]]]:
    """Return name to a function that gives the mean loss and the gradient."""
    count = (labels != -100).sum()

    def both(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        def work() -> Sequence[torch.Tensor]:
            loss = function(logits) / count
            return loss, *torch.autograd.grad(loss, logits)

        return work

    def plain(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")

    found = {"ours": both(lambda logits: cross_entropy(logits, labels).loss_sum), "eager": both(plain)}
    if compiled:
        found["compiled"] = both(torch.compile(plain, dynamic=False))
    return found


def liger(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Callable[[], Sequence[torch.Tensor]]]:
    """Return liger's function, which writes the gradient over the logits; empty where it is not installed."""
    if not importlib.util.find_spec("liger_kernel"):
        return {}
    from liger_kernel.transformers.functional import liger_cross_entropy

    def work() -> Sequence[torch.Tensor]:
        loss = liger_cross_entropy(logits, labels)
        return loss, *torch.autograd.grad(loss, logits)

    return {"liger": work}


def sweep(recorder: Recorder, case: str, logits: torch.Tensor, labels: torch.Tensor, *, tiny: bool) -> None:
    """Time launch parameters of the row kernel: loss alone, gradient alone, and both in one launch."""
    options = LossOptions(-100, 0.0, 1.0, 0.0, logits.shape[1])
    one = torch.ones((), device=logits.device)
    lse = softmax_rows_(logits, labels, options).lse
    grad = torch.empty_like(logits)
    launches = [
        Launch(block, warps, stages)
        for block, warps, stages in itertools.product((2048, 4096, 8192, 16384), (4, 8, 16, 32), (1, 2, 3))
        if 8 <= block // (32 * warps) <= 32
    ]
    for what, kwargs in (
        ("loss", {}),
        ("gradient", {"grad_TV": grad, "grad_scale": one, "lse_T": lse}),
        ("both", {"grad_TV": grad, "grad_scale": one, "statistics": True}),
    ):
        variants = {
            f"block {launch.block} warps {launch.warps} stages {launch.stages}": functools.partial(
                softmax_rows_, logits, labels, options, launch=launch, **kwargs
            )
            for launch in launches
        }
        best_of(recorder, f"{case} {what}", variants, tiny=tiny)


def main() -> None:
    """Run all shapes."""
    options = argument_parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = Recorder("cross_entropy", csv_path=options.csv, commit=options.commit)
    allowed = _ALLOWED if device == "cuda" else 2 * _ALLOWED
    for tokens, vocab in [(5, 70)] if options.tiny else [(8192, 32000), (2048, 151936)]:
        torch.manual_seed(0)
        logits = torch.randn(tokens, vocab, device=device).to(torch.bfloat16).requires_grad_()
        labels = torch.randint(0, vocab, (tokens,), device=device)
        case = f"{tokens} x {vocab} bf16"
        if options.sweep:
            sweep(recorder, case, logits.detach(), labels, tiny=options.tiny)
            continue
        wide = logits.detach().double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(wide, labels)
        expected = (loss.detach(), *torch.autograd.grad(loss, wide))
        del loss, wide
        works = contenders(logits, labels, compiled=device == "cuda")
        for name, work in works.items():
            memory = extra_memory(work, outputs=logits.numel() * logits.element_size())
            recorder.add(f"{case} {name}", "extra_memory", memory / 2**30, "GiB")
        times = compare(recorder, case, works, expected, allowed=allowed, tiny=options.tiny)
        for name, work in liger(logits, labels).items():
            times |= compare(recorder, case, {name: work}, expected, allowed=3 * allowed, tiny=options.tiny)
            if name in times:
                recorder.add(f"{case} ours", f"speed_over_{name}", times[name].p50 / times["ours"].p50, "x")
        copy = copy_bandwidth(logits.numel(), tiny=options.tiny)
        recorder.add(case, "copy", copy, "TB/s")
        for name, timing in times.items():
            bandwidth = _PASSES * logits.numel() * logits.element_size() / timing.p50 / 1e9
            recorder.add(f"{case} {name}", "share_of_copy", bandwidth / copy, "share")


if __name__ == "__main__":
    main()
