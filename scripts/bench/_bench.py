"""What the benches share: timing, the correctness gate, and one row format.

A bench first shows that every contender computes the right thing; a wrong one gets no speed. Times are of the device:
work is queued behind a pause, so that the host is ahead and its launch overhead is not in them, the caches are flushed
before each repetition, and warm-up is dropped. The host's own time to queue the work is a metric of its own. Every
number is printed as a JSON line and, with ``--csv``, appended to a file whose columns never change.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

__all__ = [
    "COLUMNS", "Recorder", "Timing", "argument_parser", "best_of", "compare", "copy_bandwidth", "extra_memory",
    "is_right", "measure", "relative_error",
]  # fmt: skip

_VERSIONS = ("torch", "triton", "transformers", "trl", "liger-kernel")
COLUMNS = ("date", "commit", "bench", "case", "metric", "value", "unit", "hardware", "python", *_VERSIONS)
_FLUSH_BYTES = 256 * 2**20
# clock cycles that the device waits before the timed work, about 1 ms: longer than the host needs to queue it
_PAUSE_CYCLES = 2_000_000


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the device at three quantiles, and of the host to queue the work (median)."""

    p20: float
    p50: float
    p80: float
    host: float


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benches share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes and few repetitions, to try the script")
    parser.add_argument("--sweep", action="store_true", help="time launch parameters instead of contenders")
    parser.add_argument("--csv", help="file that rows are appended to, such as scripts/bench/results.csv")
    parser.add_argument("--commit", help="commit that is measured; default: ask git")
    return parser


def _commit() -> str:
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return answer.stdout.strip() or "unknown"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


class Recorder:
    """Print each number as a JSON line and append it to a CSV file.

    Args:
        bench: Name of the script, without its suffix.
        csv_path: File to append to, made with a header where it does not exist; None prints only.
        commit: Commit that is measured; None asks git.
    """

    def __init__(self, bench: str, *, csv_path: str | Path | None = None, commit: str | None = None) -> None:
        self.csv_path = None if csv_path is None else Path(csv_path)
        self.common = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit or _commit(),
            "bench": bench,
            "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: _version(name) for name in _VERSIONS},
        }

    def add(self, case: str, metric: str, value: float, unit: str) -> None:
        """Record one number."""
        row = {**self.common, "case": case, "metric": metric, "value": float(f"{value:.5g}"), "unit": unit}
        row = {column: row[column] for column in COLUMNS}
        print(json.dumps(row), flush=True)
        if self.csv_path is None:
            return
        new = not self.csv_path.exists()
        with self.csv_path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)

    def add_timing(self, case: str, timing: Timing) -> None:
        """Record the quantiles and the host's time."""
        self.add(case, "time_p50", timing.p50, "ms")
        self.add(case, "time_p20", timing.p20, "ms")
        self.add(case, "time_p80", timing.p80, "ms")
        self.add(case, "host", timing.host, "ms")


def measure(work: Callable[[], object], *, tiny: bool = False, repetitions: int = 50) -> Timing:
    """Time ``work`` on the device; without a GPU, on the host's clock."""
    on_gpu = torch.cuda.is_available()
    repetitions = 3 if tiny else repetitions
    for _ in range(1 if tiny else 5):
        work()
    device_ms: list[float] = []
    host_ms: list[float] = []
    if on_gpu:
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for i in range(repetitions):
        if on_gpu:
            torch.cuda.synchronize()
            flush.zero_()
            torch.cuda._sleep(_PAUSE_CYCLES)
            events[i][0].record()
        start = time.perf_counter()
        work()
        host_ms.append((time.perf_counter() - start) * 1e3)
        if on_gpu:
            events[i][1].record()
    if on_gpu:
        torch.cuda.synchronize()
        device_ms = [start.elapsed_time(end) for start, end in events]
    low, middle, high = _quantiles(device_ms or host_ms)
    return Timing(low, middle, high, statistics.median(host_ms))


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return tuple(ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.5, 0.8))  # type: ignore[return-value]


def copy_bandwidth(num_elements: int, *, tiny: bool = False) -> float:
    """Return the bandwidth of a device-to-device bf16 copy in TB/s, bytes read plus bytes written."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.randn(num_elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    timing = measure(lambda: target.copy_(source), tiny=tiny)
    return 2 * source.numel() * source.element_size() / timing.p50 / 1e9


def extra_memory(work: Callable[[], object], outputs: int) -> int:
    """Return the peak bytes that ``work`` allocates above what was there, less ``outputs``; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - outputs


def relative_error(outs: Sequence[torch.Tensor], refs: Sequence[torch.Tensor]) -> float:
    """Return the largest norm of a difference over the norm of its reference; NaN if there is one."""
    errors = [
        float((out.detach().double() - ref.double()).norm() / ref.double().norm())
        for out, ref in zip(outs, refs, strict=True)
    ]
    return float("nan") if any(math.isnan(error) for error in errors) else max(errors)


def is_right(recorder: Recorder, case: str, error: float, allowed: float) -> bool:
    """Record the error of a contender and say whether its speed may be shown."""
    recorder.add(case, "error", error, "relative")
    if error <= allowed:
        return True
    print(f"{case}: error {error:.2e} above {allowed:.2e}; no speed is shown", file=sys.stderr)
    return False


def compare(
    recorder: Recorder,
    case: str,
    contenders: dict[str, Callable[[], Sequence[torch.Tensor]]],
    expected: Sequence[torch.Tensor],
    *,
    allowed: float,
    tiny: bool,
) -> dict[str, Timing]:
    """Check every contender against ``expected``, then time those that are right.

    Args:
        recorder: Gets errors, times and ratios.
        case: Shape and dtype; the contender's name is added.
        contenders: Name to work that returns what ``expected`` holds; the first is ours.
        expected: fp64 results and gradients.
        allowed: Largest relative error.
        tiny: Few repetitions.

    Returns:
        Times of the contenders that are right.
    """
    times: dict[str, Timing] = {}
    for name, work in contenders.items():
        if not is_right(recorder, f"{case} {name}", relative_error(work(), expected), allowed):
            continue
        times[name] = measure(work, tiny=tiny)
        recorder.add_timing(f"{case} {name}", times[name])
    ours = next(iter(contenders))
    for name, timing in times.items():
        if name != ours and ours in times:
            recorder.add(f"{case} {ours}", f"speed_over_{name}", timing.p50 / times[ours].p50, "x")
    return times


def best_of(recorder: Recorder, case: str, variants: dict[str, Callable[[], object]], *, tiny: bool) -> None:
    """Time launch parameters and print them, fastest first; one that does not fit the device says so."""
    timings: list[tuple[float, str]] = []
    for name, work in variants.items():
        try:
            timings.append((measure(work, tiny=tiny, repetitions=20).p50, name))
        except (RuntimeError, ValueError) as error:
            print(f"{case} {name}: {str(error)[:160]}", file=sys.stderr)
    for milliseconds, name in sorted(timings):
        recorder.add(f"{case} {name}", "sweep_p50", milliseconds, "ms")
