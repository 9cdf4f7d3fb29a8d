"""Move the changelog fragments into CHANGELOG.md under a new version.

    python scripts/collect_changes.py 0.2.0          # write, and delete the fragments
    python scripts/collect_changes.py 0.2.0 --draft  # print only

A fragment is ``changelog/<topic>.<kind>.md``: one sentence for users, in a file of its own, so that two changes never
meet in one line.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path

__all__ = ["KINDS", "insert", "read_fragments", "render"]

ROOT = Path(__file__).parents[1]
# kind of a fragment -> its heading, in the order of the page
KINDS = {
    "feature": "Added",
    "perf": "Faster",
    "fix": "Fixed",
    "removal": "Removed",
    "doc": "Documentation",
}
_NAME = re.compile(r"(?P<topic>[a-z0-9_]+)\.(?P<kind>[a-z]+)\.md")
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
_FIRST_VERSION = re.compile(r"^## ", re.MULTILINE)


def read_fragments(folder: Path) -> dict[str, list[str]]:
    """Return the sentences of each kind, by topic.

    Args:
        folder: ``changelog/``; its README is no fragment.

    Raises:
        ValueError: If a file has another name than ``<topic>.<kind>.md`` with a known kind, or is empty.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        if path.name == "README.md":
            continue
        match = _NAME.fullmatch(path.name)
        if match is None or match["kind"] not in KINDS:
            raise ValueError(f"{path.name} is no fragment; name it <topic>.<kind>.md, kind one of {', '.join(KINDS)}")
        text = " ".join(path.read_text(encoding="utf-8").split())
        if not text:
            raise ValueError(f"{path.name} is empty; write what users get in one sentence")
        found.setdefault(match["kind"], []).append(text)
    return found


def render(version: str, date: datetime.date, fragments: dict[str, list[str]]) -> str:
    """Return the section of one version."""
    lines = [f"## {version} ({date.isoformat()})", ""]
    for kind, heading in KINDS.items():
        if kind in fragments:
            lines += [f"### {heading}", "", *(f"- {text}" for text in fragments[kind]), ""]
    return "\n".join(lines) + "\n"


def insert(page: str, section: str) -> str:
    """Return ``page`` with ``section`` above its newest version, or at its end if it has none."""
    match = _FIRST_VERSION.search(page)
    if match is None:
        return page.rstrip("\n") + "\n\n" + section.rstrip("\n") + "\n"
    return page[: match.start()] + section + page[match.start() :]


def main(argv: list[str] | None = None) -> int:
    """Collect the fragments; return 1 if there is nothing to collect or a name is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="as in tuning/__init__.py")
    parser.add_argument("--draft", action="store_true", help="print the section, change nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    if not _VERSION.fullmatch(parsed.version):
        parser.error(f"{parsed.version} is no version such as 0.2.0")
    folder, page = parsed.root / "changelog", parsed.root / "CHANGELOG.md"
    try:
        fragments = read_fragments(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not fragments:
        print("changelog/ holds no fragment, so there is nothing to release", file=sys.stderr)
        return 1
    section = render(parsed.version, datetime.datetime.now(tz=datetime.UTC).date(), fragments)
    print(section, end="")
    if not parsed.draft:
        page.write_text(insert(page.read_text(encoding="utf-8"), section), encoding="utf-8")
        for path in folder.iterdir():
            if path.name != "README.md":
                path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
