"""Print the sizes of files and functions, and fail where one is over its budget.

    python scripts/sizes.py            # the largest ones and the totals
    python scripts/sizes.py --all      # every file

A file that is read in one go, and a function that fits on one screen, are worth more than the line that breaks them up.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Size", "find_broken", "measure"]

ROOT = Path(__file__).parents[1]
# lines; a file that cannot be taken apart without losing its thread (one kernel with its backward) gets more
FILE_LINES, KERNEL_FILE_LINES = 400, 500
FUNCTION_LINES = 80
# the middle file, and the function that 95 in 100 stay below
MEDIAN_FILE_LINES, P95_FUNCTION_LINES = 200, 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Lines of a file or function.

    Attributes:
        name: Path from the root; for a function with ``:`` and its name.
        lines: Physical lines, docstring and comments included.
        budget: Most lines it may have; None for a function without one.
    """

    name: str
    lines: int
    budget: int | None


def measure(folder: Path, *, root: Path = ROOT) -> tuple[list[Size], list[Size]]:
    """Return the sizes of the files and of the functions below ``folder``.

    Args:
        folder: Where Python files are looked for.
        root: What names are relative to.
    """
    files, functions = [], []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        is_kernel = "kernels" in path.relative_to(root).parent.parts
        files.append(
            Size(name=name, lines=len(text.splitlines()), budget=KERNEL_FILE_LINES if is_kernel else FILE_LINES)
        )
        functions += [
            Size(name=f"{name}:{function.name}", lines=_count_lines(function),
                 budget=None if _is_triton(function) else FUNCTION_LINES)
            for function in _iter_functions(ast.parse(text))
        ]  # fmt: skip
    return files, functions


def _iter_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator is of triton: a kernel body is one piece by nature."""
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def find_broken(files: list[Size], functions: list[Size]) -> list[str]:
    """Return one sentence for each budget that is broken."""
    broken = [
        f"{size.name} has {size.lines} lines and may have {size.budget}; split it"
        for size in (*files, *functions)
        if size.budget is not None and size.lines > size.budget
    ]
    median = statistics.median(size.lines for size in files)
    if median > MEDIAN_FILE_LINES:
        broken.append(f"the median file has {median:.0f} lines and may have {MEDIAN_FILE_LINES}")
    p95 = _quantile([size.lines for size in functions if size.budget is not None], 0.95)
    if p95 > P95_FUNCTION_LINES:
        broken.append(f"one function in twenty has more than {p95} lines; {P95_FUNCTION_LINES} is the most")
    return broken


def _quantile(values: list[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0


def main(argv: list[str] | None = None) -> int:
    """Print the sizes; return 1 if a budget is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(ROOT / "tuning"), help="default: tuning")
    parser.add_argument("--all", action="store_true", help="every file and function, not the ten largest")
    parsed = parser.parse_args(argv)
    folder = Path(parsed.folder).resolve()
    files, functions = measure(folder, root=ROOT if folder.is_relative_to(ROOT) else folder)
    for title, sizes in (("files", files), ("functions", functions)):
        ordered = sorted(sizes, key=lambda size: -size.lines)
        print(f"{title}: {len(sizes)}, median {statistics.median(size.lines for size in sizes):.0f} lines")
        for size in ordered if parsed.all else ordered[:10]:
            print(f"{size.lines:5}  {size.name}")
    print(f"lines in all: {sum(size.lines for size in files):,}")
    broken = find_broken(files, functions)
    for sentence in broken:
        print(sentence, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
