"""Check that commit titles follow Conventional Commits, with the rooms of this house.

    python scripts/check_commit_msg.py .git/COMMIT_EDITMSG   # as a commit-msg hook
    python scripts/check_commit_msg.py --history             # every commit that HEAD is made of

A title is ``type(room): sentence``. The type is one of those below, with ``!`` for a change that breaks something.
The room is a folder or file of the repository (``data``, ``multipack``, ``bench``), or one of a few names for what has
no folder of its own. A commit that changes what users get (``feat``, ``fix``, ``perf`` below ``tuning/``) brings a
fragment in ``changelog/``; one that needs none says ``Changelog: none`` on a line of its own.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

__all__ = ["check_fragment", "check_title", "find_rooms", "read_history"]

ROOT = Path(__file__).parents[1]
TYPES = ("build", "chore", "ci", "docs", "feat", "fix", "perf", "refactor", "revert", "style", "test")
# what has no folder or file of its own
EXTRA_ROOMS = frozenset({"ci", "cli", "deps", "house", "release", "repo"})
# types whose commits change what users get
TOLD_TYPES = frozenset({"feat", "fix", "perf"})
NO_FRAGMENT = "Changelog: none"
_TITLE = re.compile(r"(?P<type>[a-z]+)(\((?P<room>[a-z0-9_.-]+)\))?(?P<breaks>!)?: (?P<sentence>\S.*)")
# titles that git writes itself
_WRITTEN_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def find_rooms(paths: Iterable[str]) -> frozenset[str]:
    """Return the names a commit may use as its room: every folder and file stem of ``paths``, and a few more."""
    rooms = set(EXTRA_ROOMS)
    for path in map(PurePosixPath, paths):
        rooms.update(part.lstrip(".") for part in path.parent.parts)
        rooms.add(path.name.lstrip(".").partition(".")[0].lower())
    return frozenset(rooms)


def check_title(title: str, rooms: frozenset[str]) -> str | None:
    """Return what is wrong with a commit's title, or None.

    Args:
        title: First line of the message.
        rooms: From :func:`find_rooms`.
    """
    if title.startswith(_WRITTEN_BY_GIT):
        return None
    match = _TITLE.fullmatch(title)
    if match is None:
        return f"{title!r} is no 'type(room): sentence'; such as 'fix(data): a BOM is no part of the first key'"
    if match["type"] not in TYPES:
        return f"{title!r}: {match['type']} is no type; use one of {', '.join(TYPES)}"
    if match["room"] is not None and match["room"] not in rooms:
        return f"{title!r}: {match['room']} is no room; name a folder or file of the repository"
    if match["sentence"].endswith("."):
        return f"{title!r} ends with a full stop; a title has none"
    return None


def check_fragment(message: str, paths: Iterable[str]) -> str | None:
    """Return what is wrong where a change that users see comes without a changelog fragment, or None.

    Args:
        message: The whole commit message.
        paths: Files the commit touches.
    """
    paths = list(paths)
    match = _TITLE.match(message)
    is_told = match is not None and match["type"] in TOLD_TYPES and any(path.startswith("tuning/") for path in paths)
    has_fragment = any(path.startswith("changelog/") for path in paths)
    if not is_told or has_fragment or NO_FRAGMENT in message.splitlines():
        return None
    return (
        "this commit changes what users get but adds no changelog fragment; write one sentence into "
        f"changelog/<topic>.<kind>.md, or put a line '{NO_FRAGMENT}' into the message"
    )


def _git(*argv: str) -> list[str]:
    done = subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def read_history() -> tuple[list[str], frozenset[str]]:
    """Return the titles of all commits, and the rooms of every file that ever was.

    Raises:
        subprocess.CalledProcessError: If this is no git repository.
    """
    titles = _git("log", "--no-merges", "--format=%s")
    return titles, find_rooms({path for path in _git("log", "--format=", "--name-only", "--diff-filter=A") if path})


def _strip_comments(message: str) -> str:
    return "\n".join(line for line in message.splitlines() if not line.startswith("#")).strip()


def main(argv: list[str] | None = None) -> int:
    """Print what is wrong; return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("message", nargs="?", help="file with one commit message")
    parser.add_argument("--history", action="store_true", help="check the titles of all commits instead")
    parsed = parser.parse_args(argv)
    if parsed.history == (parsed.message is not None):
        parser.error("name a file with a commit message, or give --history")
    if parsed.history:
        titles, rooms = read_history()
        problems = [check_title(title, rooms) for title in titles]
    else:
        message = _strip_comments(Path(parsed.message).read_text(encoding="utf-8"))
        staged = _git("diff", "--cached", "--name-only")
        rooms = find_rooms((*_git("ls-files"), *staged))
        problems = [check_title(message.partition("\n")[0], rooms), check_fragment(message, staged)]
    found = [problem for problem in problems if problem is not None]
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
