"""Multipack's plans: seconds, fill, balance, and what they save beside padded batches and other packers.

Every plan is first checked: each sample once, as many batches for every rank. A plan that fails shows no number.
Lengths are made (log-normal like instruction data, or like reasoning data), or read from a JSON list of numbers.
Costs are those of a model of seven billion parameters, all trained, unless a case says tokens.

    python scripts/bench/packing.py
    python scripts/bench/packing.py --lengths lengths.json --csv scripts/bench/results.csv
    python scripts/bench/packing.py --tiny
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from _bench import Recorder, argument_parser
from _packers import PACKERS, Batches, available

from tuning.data.cost import TOKENS, Cost, from_shape
from tuning.data.packing import PackingSpec, Plan, mean_tokens, plan
from tuning.data.simulation import simulate

SEVEN_BILLION = from_shape(
    {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336, "vocab": 32000}
)


def instruction_lengths(num_samples: int) -> np.ndarray:
    """Median 175, mean near 270, longest 4,820."""
    drawn = np.random.default_rng(0).lognormal(np.log(175), 0.95, num_samples)
    return np.clip(drawn, 8, 4820).astype(np.int64)


def reasoning_lengths(num_samples: int) -> np.ndarray:
    """Median 3,000, cut at 16,000."""
    drawn = np.random.default_rng(0).lognormal(np.log(3000), 0.8, num_samples)
    return np.clip(drawn, 16, 16_000).astype(np.int64)


def spec(lengths: np.ndarray, mode: str, *, ranks: int, batch: int, accumulation: int = 1, cost: Cost) -> PackingSpec:
    """Return the spec of a run with the default budget."""
    return PackingSpec(
        mode=mode,
        num_ranks=ranks,
        batch_size=batch,
        accumulation=accumulation,
        seed=0,
        cost=cost,
        max_tokens=mean_tokens(lengths, batch) if mode == "budget" else None,
    )


def is_right(case: str, made: Plan, num_samples: int) -> bool:
    """Say whether each sample has one seat; batches of ranks are equal in number by their form."""
    counts = np.bincount(made.order, minlength=num_samples)
    if len(made.order) == num_samples == len(counts) and (counts == 1).all():
        return True
    print(f"{case}: a sample is missing or twice; no number is shown", file=sys.stderr)
    return False


def bench_speed(recorder: Recorder, sizes: list[int]) -> None:
    """Time plans of growing data sets: the first epoch, and one whose number of steps is known."""
    for mode, accumulation in (("exact", 1), ("exact", 4), ("budget", 1)):
        for size in sizes:
            lengths = instruction_lengths(size)
            asked = spec(lengths, mode, ranks=8, batch=8, accumulation=accumulation, cost=SEVEN_BILLION)
            case = f"{mode} 8 ranks x 8 x {accumulation}, {size} lengths"
            number: int | None = None
            for epoch, metric in enumerate(("first_epoch", "later_epoch")):
                wall, cpu = time.perf_counter(), time.process_time()
                made = plan(lengths, asked, epoch=epoch, num_micro_steps=number)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                number = made.num_micro_steps
                if is_right(case, made, size):
                    recorder.add(case, metric, wall, "s")
                    recorder.add(case, f"{metric}_cpu", cpu, "s")


def bench_quality(recorder: Recorder, name: str, lengths: np.ndarray) -> None:
    """Record fill and balance of both modes."""
    for mode, ranks, batch, accumulation in (
        ("budget", 8, 8, 1), ("budget", 8, 4, 1), ("budget", 64, 8, 1), ("budget", 64, 4, 1),
        ("exact", 8, 8, 4), ("exact", 8, 4, 4), ("exact", 8, 8, 1), ("exact", 8, 4, 1),
    ):  # fmt: skip
        asked = spec(lengths, mode, ranks=ranks, batch=batch, accumulation=accumulation, cost=SEVEN_BILLION)
        case = f"{name} {mode} {ranks} ranks x {batch} x {accumulation}"
        made = plan(lengths, asked)
        if not is_right(case, made, len(lengths)):
            continue
        stats = made.stats()
        if stats.fill is not None:
            recorder.add(case, "fill", stats.fill, "ratio")
        recorder.add(case, "cost_balance", stats.cost_balance, "ratio")
        recorder.add(case, "cost_balance_over_bound", stats.cost_balance / stats.bound, "ratio")
        recorder.add(case, "token_balance", stats.token_balance, "ratio")
        recorder.add(case, "steps", stats.num_steps, "steps")


def bench_simulated_speed(recorder: Recorder, name: str, lengths: np.ndarray) -> None:
    """Record how many times as fast as padded batches an epoch is, in tokens; the mean of five shuffles."""
    for batch in (4, 8):
        for ranks in (2, 4, 8):
            for mode, accumulation in (("budget", 1), ("exact", 1), ("exact", 4)):
                asked = spec(lengths, mode, ranks=ranks, batch=batch, accumulation=accumulation, cost=TOKENS)
                found = [simulate(lengths, asked, epoch=epoch) for epoch in range(5)]
                case = f"{name} {mode} {ranks} ranks x {batch} x {accumulation}, tokens"
                for metric, values in (
                    ("speed_over_padded", [one.over_padded for one in found]),
                    ("speed_over_padding_free", [one.over_padding_free for one in found]),
                    ("most_over_padded", [one.padded / one.ideal for one in found]),
                ):
                    recorder.add(case, metric, float(np.mean(values)), "x")


def bench_packers(recorder: Recorder, name: str, lengths: np.ndarray, batch: int) -> None:
    """Record others beside our budget mode at 8 ranks: seconds, samples lost, fill and balance."""
    capacity = mean_tokens(lengths, batch)
    contenders = [packer for packer in PACKERS if available(packer)]
    for packer in ["multipack", *contenders]:
        if packer == "multipack":
            asked = spec(lengths, "budget", ranks=8, batch=batch, cost=SEVEN_BILLION)
            started = time.perf_counter()
            made = plan(lengths, asked)
            seconds = time.perf_counter() - started
            if not is_right(f"{name} multipack", made, len(lengths)):
                continue
            batches: Batches = [[made.seat(step, rank).tolist() for rank in range(8)] for step in
                                range(made.num_micro_steps)]  # fmt: skip
        else:
            batches, seconds = PACKERS[packer][1](lengths, capacity, 8, batch)
        # TRL cuts longer samples off
        held = np.minimum(lengths, capacity) if packer == "trl_bfd" else lengths
        record_batches(recorder, f"{name} {packer} 8 ranks x {batch}", batches, held, capacity)
        recorder.add(f"{name} {packer} 8 ranks x {batch}", "cut_samples", int((held < lengths).sum()), "samples")
        recorder.add(f"{name} {packer} 8 ranks x {batch}", "seconds", seconds, "s")


def record_batches(recorder: Recorder, case: str, batches: Batches, lengths: np.ndarray, capacity: int) -> None:
    """Record what any packer's batches are worth."""
    costs = SEVEN_BILLION.of(lengths).astype(float)
    samples = [sample for step in batches for seat in step for sample in seat]
    tokens = np.array([[lengths[seat].sum() for seat in step] for step in batches], dtype=float)
    work = np.array([[costs[seat].sum() for seat in step] for step in batches])
    ordinary = tokens[tokens <= capacity]
    recorder.add(case, "lost_samples", len(lengths) - len(set(samples)), "samples")
    recorder.add(case, "fill", ordinary.sum() / (len(ordinary) * capacity), "ratio")
    recorder.add(case, "cost_balance", work.mean(axis=1).sum() / work.max(axis=1).sum(), "ratio")
    recorder.add(case, "micro_steps", len(batches), "micro-steps")


def main() -> None:
    """Run all of it."""
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=Path, help="JSON list of lengths, or an object with a list `lengths`")
    parser.add_argument("--no-packers", action="store_true", help="leave out other projects' packers")
    asked = parser.parse_args()
    recorder = Recorder("packing", csv_path=asked.csv, commit=asked.commit)
    size = 2_000 if asked.tiny else 100_000
    sets = {"instruction": instruction_lengths(size), "reasoning": reasoning_lengths(size // 5)}
    if asked.lengths is not None:
        read = json.loads(asked.lengths.read_text(encoding="utf-8"))
        sets[asked.lengths.stem] = np.array(read["lengths"] if isinstance(read, dict) else read, dtype=np.int64)
    bench_speed(recorder, [1_000, 8_000] if asked.tiny else [125_000, 1_000_000, 10_000_000])
    for name, lengths in sets.items():
        bench_quality(recorder, name, lengths)
        bench_simulated_speed(recorder, name, lengths)
    if not asked.no_packers:
        for name in ("instruction", "reasoning"):
            for batch in (8, 4):
                bench_packers(recorder, name, sets[name], batch)


if __name__ == "__main__":
    main()
