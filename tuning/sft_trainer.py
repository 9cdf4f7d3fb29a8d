"""The command line: ``python -m tuning.sft_trainer``.

Parsing and validation import neither torch nor transformers nor trl, so help and errors come at once. A mistake of
the user's ends with one message on stderr and exit code 1, anything else with a traceback and 203.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuning.config import validation
from tuning.config.parsing import parse
from tuning.environment import Launch, detect_launch
from tuning.errors import INTERNAL_ERROR_EXIT, USER_ERROR_EXIT, UserError
from tuning.logs import logger, set_up
from tuning.relaunch import find_missing_processes, relaunch

if TYPE_CHECKING:
    from tuning.config.hf_parser import get_parser, parse_arguments
    from tuning.run import train

__all__ = ["get_parser", "main", "parse_arguments", "train"]

_INTERRUPTED_EXIT = 130  # 128 + SIGINT, as shells have it
_log = logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune as the command line says.

    Args:
        argv: Tokens after the program's name; default: those of the process.

    Returns:
        The exit code: 0, 1 for the user's mistakes, 130 when interrupted, 203 for internal errors.

    Raises:
        SystemExit: After ``--help``, with 0.
    """
    tokens = sys.argv[1:] if argv is None else argv
    try:
        launch = detect_launch()
    except UserError as error:
        _report(str(error), None)
        return USER_ERROR_EXIT
    set_up(rank=launch.rank)
    is_started = False
    try:
        config = parse(tokens, launch)
        set_up(level=_log_level(config.train.get("log_level")), rank=launch.rank)
        config = validation.resolve(config, launch)
        validation.check(config, launch)
        num_missing = find_missing_processes()
        if num_missing is not None:
            relaunch(num_missing, tokens)
        for note in config.notes:
            _log.info(note)
        from tuning.run import run  # noqa: PLC0415 - imports torch, after every argument error

        is_started = True
        run(config, launch)
    except UserError as error:
        # before the start every rank finds the same, and one message is enough
        if launch.rank == 0 or is_started:
            _report(str(error), launch)
        return USER_ERROR_EXIT
    except KeyboardInterrupt:
        _report("interrupted", launch)
        return _INTERRUPTED_EXIT
    except Exception:  # noqa: BLE001 - the outermost frame: reported in full, with its own exit code
        _report(traceback.format_exc().rstrip(), launch)
        return INTERNAL_ERROR_EXIT
    return 0


def _log_level(asked: str | None) -> str:
    """Return the level of our own log: as asked by ``--log_level``, else info."""
    return {None: "info", "passive": "info", "detail": "debug"}.get(asked, str(asked))


def _report(message: str, launch: Launch | None) -> None:
    """Write the last error to stderr and, where a job controller asks for it, to its file."""
    prefix = f"[rank {launch.rank}] " if launch is not None and launch.rank > 0 else ""
    print(prefix + message, file=sys.stderr, flush=True)  # noqa: T201 - the message alone, without a log line's head
    if launch is None or launch.termination_log is None:
        return
    try:
        with open(launch.termination_log, "w", encoding="utf-8") as file:
            file.write(prefix + message + "\n")
    except OSError as error:
        print(f"TERMINATION_LOG_FILE {launch.termination_log} cannot be written: {error}", file=sys.stderr)  # noqa: T201


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562 returns whatever the name stands for
    """Resolve the names that need transformers at first use."""
    if name == "train":
        return importlib.import_module("tuning.run").train
    if name in ("get_parser", "parse_arguments"):
        return getattr(importlib.import_module("tuning.config.hf_parser"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(main())
