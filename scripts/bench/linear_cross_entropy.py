"""Output head and cross-entropy in one, forward and backward, against liger-kernel, plain torch, and its products.

The floor is the three matrix products of the head (logits, gradient of the hidden states, gradient of the weight),
timed in the same run in row tiles of 4,096. Extra memory is what is allocated above the two gradients. The error of
each gradient against fp64 is shown beside the plain head's. The loss is the mean over the labels, as a trainer's is,
so no contender may assume that the upstream gradient is one.

    python scripts/bench/linear_cross_entropy.py
    TRITON_INTERPRET=1 python scripts/bench/linear_cross_entropy.py --tiny
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch
from _bench import Recorder, argument_parser, best_of, extra_memory, is_right, measure, relative_error

from tuning.kernels.linear_cross_entropy import Tiling, linear_cross_entropy

_FLOOR_ROWS = 4096
# logits, their gradient and the product are rounded to bf16, whoever computes
_ALLOWED = 3 * 2.0**-8
_CHUNK = 1024

Work = Callable[[], Sequence[torch.Tensor]]


def exact(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Return mean loss and both gradients in fp64, in chunks of rows."""
    wide, head = hidden.detach().double(), weight.detach().double()
    index = (labels != -100).nonzero()[:, 0]
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    dhidden, dweight = torch.zeros_like(wide), torch.zeros_like(head)
    for rows in index.split(_CHUNK):
        logits = wide[rows] @ head.t()
        loss += torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum")
        logits = logits.softmax(-1)
        logits[torch.arange(len(rows), device=hidden.device), labels[rows]] -= 1
        logits /= index.numel()
        dhidden[rows] = logits @ head
        dweight.addmm_(logits.t(), wide[rows])
    return [loss / index.numel(), dhidden, dweight]


def products(hidden: torch.Tensor, weight: torch.Tensor) -> Callable[[], None]:
    """Return the three products alone."""
    x, w = hidden.detach(), weight.detach()

    def work() -> None:
        for rows in x.split(_FLOOR_ROWS):
            logits = rows @ w.t()
            torch.mm(logits, w)
            torch.mm(logits.t(), rows)

    return work


def contenders(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, index: torch.Tensor | None, *, tiling: Tiling
) -> dict[str, Work]:
    """Return name to a function that gives the mean loss and both gradients."""
    count = (labels != -100).sum()
    scale = 1.0 / count.float()

    def gradients(loss: torch.Tensor) -> Sequence[torch.Tensor]:
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    def ours(*, known: bool, statistics: bool) -> Work:
        def work() -> Sequence[torch.Tensor]:
            out = linear_cross_entropy(
                hidden,
                weight,
                labels,
                supervised_index=index,
                grad_scale=scale if known else None,
                statistics=statistics,
                tiling=tiling,
            )
            return gradients(out.loss_sum * scale)

        return work

    def plain() -> Sequence[torch.Tensor]:
        return gradients(torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels))

    found: dict[str, Work] = {
        "ours": ours(known=True, statistics=True),
        "ours, factor unknown": ours(known=False, statistics=True),
        "plain": plain,
    }
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger() -> Sequence[torch.Tensor]:
            loss = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)
            return gradients(loss[0] if isinstance(loss, tuple) else loss)

        found["liger"] = liger
    return found


def run(
    recorder: Recorder,
    case: str,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    share: float,
    whole: float | None,
    tiny: bool,
) -> float:
    """Check, measure and record one shape; return our milliseconds.

    Args:
        recorder: Gets the numbers.
        case: Name of the shape.
        inputs: Hidden states, weight, labels.
        share: Part of the rows that is supervised.
        whole: Our milliseconds with all rows supervised; None if this is that run.
        tiny: Few repetitions.
    """
    hidden, weight, labels = inputs
    index = None if share == 1 else (labels != -100).nonzero()[:, 0]
    expected = exact(hidden, weight, labels)
    floor = measure(products(hidden, weight), tiny=tiny, repetitions=20)
    recorder.add_timing(f"{case} products", floor)
    outputs = sum(x.numel() * x.element_size() for x in (hidden, weight))
    times = {}
    for name, work in contenders(hidden, weight, labels, index, tiling=Tiling()).items():
        results = work()
        for what, out, ref in zip(("loss", "hidden", "weight"), results, expected, strict=True):
            recorder.add(f"{case} {name}", f"error_{what}", relative_error([out], [ref]), "relative")
        error = relative_error(results, expected)
        del results
        if not is_right(recorder, f"{case} {name}", error, _ALLOWED):
            continue
        memory = extra_memory(work, outputs)
        recorder.add(f"{case} {name}", "extra_memory", memory / 2**30, "GiB")
        times[name] = measure(work, tiny=tiny, repetitions=20)
        recorder.add_timing(f"{case} {name}", times[name])
        recorder.add(f"{case} {name}", "over_products", times[name].p50 / floor.p50, "x")
    if whole is not None and "ours" in times:
        recorder.add(f"{case} ours", "over_all_rows", times["ours"].p50 / whole, "x")
    return times["ours"].p50 if "ours" in times else float("nan")


def sweep(
    recorder: Recorder, case: str, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, tiny: bool
) -> None:
    """Time tiles of several heights and both ways to sum."""
    recorder.add_timing(f"{case} products", measure(products(*inputs[:2]), tiny=tiny, repetitions=20))
    heights = (8, 16) if tiny else (768, 1024, 1280, 1408, 1536, 1664, 2048, 4096, 8192)
    variants = {
        f"rows {rows} {'fp16' if half else 'fp32'} sum": contenders(*inputs, None, tiling=Tiling(rows, half))["ours"]
        for rows in heights
        for half in (True, False)
    }
    best_of(recorder, case, variants, tiny=tiny)


def main() -> None:
    """Run all shapes."""
    options = argument_parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recorder = Recorder("linear_cross_entropy", csv_path=options.csv, commit=options.commit)
    tokens, width, vocabs = (24, 16, (70,)) if options.tiny else (8192, 4096, (32000, 151936))
    for vocab in vocabs:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=device).to(torch.bfloat16).requires_grad_()
        weight = (0.02 * torch.randn(vocab, width, device=device)).to(torch.bfloat16).requires_grad_()
        all_labels = torch.randint(0, vocab, (tokens,), device=device)
        case = f"{tokens} x {width} x {vocab} bf16"
        if options.sweep:
            sweep(recorder, case, (hidden, weight, all_labels), tiny=options.tiny)
            continue
        whole: float | None = None
        for share in (1.0, 0.1):
            labels = torch.where(torch.rand(tokens, device=device) < share, all_labels, -100)
            name = f"{case} {share:.0%} supervised"
            ours = run(recorder, name, (hidden, weight, labels), share=share, whole=whole, tiny=options.tiny)
            whole = ours if whole is None else whole


if __name__ == "__main__":
    main()
