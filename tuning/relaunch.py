"""Start the CPU processes that ``accelerate launch --cpu --num_processes N`` asks for and does not start.

accelerate starts several CPU processes through mpirun alone. Without a host file it starts one, sets the address and
port where the others would meet it, and says nothing: a run of two ranks becomes a run of one, with half the batch.
The number that was asked for is in no variable; it is on the launcher's own command line, which is our parent's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuning.errors import UnsupportedError

__all__ = ["find_missing_processes", "relaunch"]

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
_FLAGS = ("--num_processes", "--num-processes")


def find_missing_processes(environ: Mapping[str, str] | None = None, parent: Sequence[str] | None = None) -> int | None:
    """Return how many processes were asked for where accelerate started this one alone; None if it is as asked.

    Args:
        environ: Environment variables; default: those of the process.
        parent: Command line of the parent process; default: read from the system.

    Raises:
        UnsupportedError: If several were asked for and their number cannot be found out.
    """
    values = os.environ if environ is None else environ
    is_cpu_launch = values.get("ACCELERATE_USE_CPU", "false").lower() in {"1", "true", "yes"}
    if not is_cpu_launch or "MASTER_ADDR" not in values or any(name in values for name in _RANK_VARIABLES):
        return None
    words = _parent_command() if parent is None else list(parent)
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in _FLAGS:
            number = value or next(iter(words[index + 1 :]), "")
            if number.isdecimal():
                return int(number) if int(number) > 1 else None
    raise UnsupportedError(
        "accelerate was asked for several CPU processes and started one, because it starts more through mpirun only; "
        "use torchrun --nproc_per_node N -m tuning.sft_trainer ... instead"
    )


def _parent_command() -> list[str]:
    path = Path(f"/proc/{os.getppid()}/cmdline")
    if not path.is_file():
        return []
    return path.read_bytes().decode(errors="replace").split("\0")


def relaunch(num_processes: int, argv: Sequence[str]) -> None:
    """Replace this process by a launcher of ``num_processes`` CPU ranks of the same command; does not return.

    Args:
        num_processes: Ranks to start on this machine.
        argv: Tokens after the program's name.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    os.execv(sys.executable, [*command, "-m", "tuning.sft_trainer", *argv])
