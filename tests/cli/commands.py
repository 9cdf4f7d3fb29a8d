"""Run the command line in a process of its own."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float


def run(argv, *, code: str | None = None, **environ) -> Ended:
    """Run ``python -m tuning.sft_trainer`` with ``argv``, or ``code`` with it as ``sys.argv[1:]``."""
    start = ["-c", code] if code else ["-m", "tuning.sft_trainer"]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *start, *map(str, argv)],
        env={**clean, "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr, seconds=time.perf_counter() - began)
