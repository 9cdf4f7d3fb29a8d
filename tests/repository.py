"""The repository as the tests of the house see it: its files, its scripts, its documents."""

import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
_NOT_OURS = {".git", ".tox", ".venv", ".venv-tox", "build", "dist", "demo_output", "output", "__pycache__"}


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files that git tracks, or where there is no git, all that is not made by tools."""
    if (ROOT / ".git").exists():
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / name for name in done.stdout.split("\0") if name]
        return tuple(path for path in paths if path.is_file())
    return tuple(
        path
        for path in sorted(ROOT.rglob("*"))
        if path.is_file()
        and not any(part in _NOT_OURS or part.endswith(("_cache", ".egg-info")) for part in path.parts)
    )


def modules() -> list[Path]:
    """Python files of the package, without ``__init__.py``."""
    return [path for path in sorted((ROOT / "tuning").rglob("*.py")) if path.name != "__init__.py"]


def documents() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".md" and "changelog" not in path.parts]


@cache
def load_script(name: str) -> ModuleType:
    """Import ``scripts/<name>.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def commands_in(text: str) -> list[list[str]]:
    """Return what documented commands hand to the command line, in blocks of code and indented ones."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        match = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?P<start>(?:accelerate|torchrun|python|packtune)\b.*)", line)
        if match is None or line.startswith("|"):
            continue
        tokens = [token for token in shlex.split(match["start"], comments=True) if token != "..."]
        if "tuning.sft_trainer" in tokens:
            found.append(tokens[tokens.index("tuning.sft_trainer") + 1 :])
        elif tokens[0] == "packtune" and len(tokens) > 1 and tokens[1].startswith("-"):
            found.append(tokens[1:])
    return found
