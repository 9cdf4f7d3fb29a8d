"""Logging: one format, one line per rank-0 message, and once-only warnings.

Only ``tuning.*`` loggers are touched; the user's own logging set-up stays as it is.
"""

import logging
import sys

__all__ = ["MainRankFilter", "logger", "set_up", "warn_once"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class MainRankFilter(logging.Filter):
    """Let a record pass on rank 0, and everywhere from ERROR on or when marked ``extra={"all_ranks": True}``.

    Args:
        rank: Rank of this process, from 0.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether ``record`` is written by this rank."""
        return self.rank == 0 or record.levelno >= logging.ERROR or getattr(record, "all_ranks", False)


def logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def set_up(*, level: str = "info", rank: int = 0) -> None:
    """Send ``tuning`` log records to stderr, once however often it is called.

    Args:
        level: Name of a logging level, any case.
        rank: Rank of this process; ranks above 0 write errors only.
    """
    root = logging.getLogger("tuning")
    root.setLevel(level.upper())
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    handler.addFilter(MainRankFilter(rank))
    root.addHandler(handler)
    root.propagate = False


def warn_once(log: logging.Logger, message: str, seen: set[str]) -> None:
    """Warn with ``message`` unless it is in ``seen``, and add it there.

    Args:
        log: Logger that writes it.
        message: Full text.
        seen: Messages written so far; owned by the caller, so that two runs in one process both warn.
    """
    if message not in seen:
        seen.add(message)
        log.warning(message)
