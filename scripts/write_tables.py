"""Write the tables of measured figures into README.md and docs/, from scripts/bench/results.csv and nothing else.

    python scripts/write_tables.py           # write
    python scripts/write_tables.py --check   # exit 1 where a document differs

A document says where a table goes and what is in it:

    <!-- table bench=padding_free metrics=real_tokens_per_second,ratio cases=mistral-7b -->
    <!-- end of table -->

``cases`` is a regular expression that a case must hold, ``hardware`` likewise; both may be left out. The newest figure
of a case counts. There is one table for each hardware, and a line below it with versions, dates and commits.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["fill", "find_documents", "read_results", "render"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "bench" / "results.csv"
_BLOCK = re.compile(
    r"(?P<head><!-- table (?P<spec>[^\n]*?) -->\n)(?P<body>.*?)(?P<end><!-- end of table -->)", re.DOTALL
)
_VERSIONS = ("torch", "triton", "transformers", "trl", "liger-kernel")
_KEYS = {"bench", "metrics", "cases", "hardware"}


def read_results(path: Path = RESULTS) -> list[dict[str, str]]:
    """Return the rows of the CSV file, oldest first; none if there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def find_documents(root: Path = ROOT) -> list[Path]:
    """Return the documents that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def _read_spec(text: str) -> dict[str, str]:
    spec = dict(word.partition("=")[::2] for word in text.split())
    unknown = spec.keys() - _KEYS
    if unknown or not {"bench", "metrics"} <= spec.keys():
        raise ValueError(f"<!-- table {text} --> needs bench= and metrics=, and may have cases= and hardware=")
    return spec


def _format(value: str, unit: str) -> str:
    number = float(value)
    if abs(number) >= 1000:
        text = f"{number:,.0f}"
    elif number == int(number):
        text = f"{number:.0f}"
    else:
        text = f"{number:.4g}"
    return text if unit in ("ratio", "share", "relative") else f"{text}x" if unit == "x" else f"{text} {unit}"


def _caption(hardware: str, rows: Sequence[Mapping[str, str]]) -> str:
    def told(column: str) -> str:
        return ", ".join(sorted({row[column] for row in rows if row.get(column)}))

    versions = ", ".join(f"{name} {told(name)}" for name in _VERSIONS if told(name))
    return f"{hardware}; {versions}; {told('date')}; commit {told('commit')}"


def render(results: Sequence[Mapping[str, str]], spec_text: str) -> str:
    """Return the Markdown that belongs between the two comments of a table.

    Args:
        results: From :func:`read_results`.
        spec_text: What the first comment says after ``table``.

    Raises:
        ValueError: If it does not say ``bench`` and ``metrics``, or says something else.
    """
    spec = _read_spec(spec_text)
    metrics = spec["metrics"].split(",")
    chosen: dict[str, dict[str, dict[str, Mapping[str, str]]]] = {}
    for row in results:
        is_asked = row["bench"] == spec["bench"] and row["metric"] in metrics
        is_case = re.search(spec.get("cases", ""), row["case"]) and re.search(spec.get("hardware", ""), row["hardware"])
        if is_asked and is_case:
            chosen.setdefault(row["hardware"], {}).setdefault(row["case"], {})[row["metric"]] = row
    if not chosen:
        return f"Not measured yet: `python scripts/bench/{spec['bench']}.py --csv scripts/bench/results.csv`.\n"
    return "\n".join(_table(hardware, cases, metrics) for hardware, cases in sorted(chosen.items()))


def _table(hardware: str, cases: Mapping[str, Mapping[str, Mapping[str, str]]], metrics: Sequence[str]) -> str:
    lines = [
        f"| case | {' | '.join(metric.replace('_', ' ') for metric in metrics)} |",
        "|---" * (len(metrics) + 1) + "|",
    ]
    for case, found in cases.items():
        values = [_format(found[name]["value"], found[name]["unit"]) if name in found else "" for name in metrics]
        lines.append(f"| {case} | {' | '.join(values)} |")
    rows = [row for found in cases.values() for row in found.values()]
    return "\n".join([*lines, "", f"<sub>{_caption(hardware, rows)}</sub>", ""])


def fill(document: str, results: Sequence[Mapping[str, str]]) -> str:
    """Return ``document`` with every table made anew."""
    return _BLOCK.sub(lambda block: f"{block['head']}{render(results, block['spec'])}{block['end']}", document)


def main(argv: list[str] | None = None) -> int:
    """Write the tables, or check them; return 1 if a document differed under ``--check``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a document differs")
    parsed = parser.parse_args(argv)
    results = read_results()
    differing = []
    for path in find_documents():
        before = path.read_text(encoding="utf-8")
        after = fill(before, results)
        if before != after:
            differing.append(path.relative_to(ROOT).as_posix())
            if not parsed.check:
                path.write_text(after, encoding="utf-8")
    if parsed.check and differing:
        print(f"tables differ from scripts/bench/results.csv in {', '.join(differing)}; run scripts/write_tables.py",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
