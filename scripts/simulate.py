"""Say what multipack would be worth for a data set, from its lengths alone.

    python scripts/simulate.py lengths.json
    python scripts/simulate.py lengths.json --ranks 8 --batch 8 --accumulation 4 --mode exact
    python scripts/simulate.py lengths.json --ranks 8 --batch 4 --max-tokens 4096 --ratio 2.15e-5

The file is a JSON list of tokens a sample, or an object with such a list under ``lengths``. Speed-ups count tokens, or
with ``--ratio`` also attention; launches, optimizer and network are not in them, so that real ones are smaller.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuning.data.cost import Cost
from tuning.data.packing import PackingSpec, mean_tokens
from tuning.data.simulation import Simulation, simulate
from tuning.errors import USER_ERROR_EXIT, DataError

__all__ = ["main", "read_lengths"]

_HEAD = (
    "mode", "ranks", "batch", "acc", "steps", "plain", "fill", "tokens", "cost", "bound", "x padded", "x padding-free",
)  # fmt: skip


def read_lengths(path: Path) -> np.ndarray:
    """Return the lengths in a file.

    Raises:
        DataError: If the file is none of the two forms, or holds no positive whole numbers.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a JSON list of tokens a sample") from error
    values = read.get("lengths") if isinstance(read, dict) else read
    if not isinstance(values, list) or not values or not all(type(value) is int and value > 0 for value in values):
        raise DataError(f"{path} holds no list of tokens a sample; give a JSON list of whole numbers from 1 on")
    return np.array(values, dtype=np.int64)


def row(asked: PackingSpec, found: Simulation) -> tuple[str, ...]:
    """Return the cells of one line."""
    stats = found.stats
    numbers = (asked.num_ranks, asked.batch_size, asked.accumulation, stats.num_steps, found.plain_steps)
    shares = (stats.token_balance, stats.cost_balance, stats.bound)
    return (
        asked.mode,
        *map(str, numbers),
        "-" if stats.fill is None else f"{stats.fill:.3f}",
        *(f"{share:.3f}" for share in shares),
        f"{found.over_padded:.2f}",
        f"{found.over_padding_free:.2f}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", type=Path, help="JSON file of tokens a sample")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="data-parallel ranks")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 8], help="samples a rank a micro-step")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1], help="micro-steps an optimizer step")
    parser.add_argument("--mode", nargs="+", default=["exact", "budget"], choices=["exact", "budget"])
    parser.add_argument("--max-tokens", type=int, help="tokens of a seat; default: batch x mean length in budget mode")
    parser.add_argument("--ratio", type=float, default=0.0, help="quadratic over linear work of a token; 0: tokens")
    parser.add_argument("--seed", type=int, default=42)
    asked = parser.parse_args(argv)
    try:
        lengths = read_lengths(asked.lengths)
        lines = [_HEAD]
        for mode, batch, ranks, accumulation in itertools.product(
            asked.mode, asked.batch, asked.ranks, asked.accumulation
        ):
            spec = PackingSpec(
                mode=mode,
                num_ranks=ranks,
                batch_size=batch,
                accumulation=accumulation,
                seed=asked.seed,
                cost=Cost(ratio=asked.ratio),
                max_tokens=asked.max_tokens or (mean_tokens(lengths, batch) if mode == "budget" else None),
            )
            lines.append(row(spec, simulate(lengths, spec)))
    except DataError as error:
        print(error, file=sys.stderr)
        return USER_ERROR_EXIT
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    print(f"{len(lengths)} samples, {int(lengths.sum())} tokens, longest {int(lengths.max())}")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
