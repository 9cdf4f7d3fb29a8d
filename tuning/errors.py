"""Typed errors and the exit codes that go with them.

A :class:`UserError` is a mistake the user can mend: its text says what was asked, why it cannot be, and what to do.
It ends the process with :data:`USER_ERROR_EXIT` and no traceback. Everything else is our fault and ends with
:data:`INTERNAL_ERROR_EXIT`. The two numbers are those of fms-hf-tuning, so that job controllers need no change.
"""

from collections.abc import Sequence

__all__ = [
    "INTERNAL_ERROR_EXIT",
    "USER_ERROR_EXIT",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ModelError",
    "PluginError",
    "UnsupportedError",
    "UserError",
]

USER_ERROR_EXIT = 1
INTERNAL_ERROR_EXIT = 203


class UserError(ValueError):
    """A mistake of the user's, told so that they can mend it."""


class ConfigError(UserError):
    """Flags or configuration keys that cannot be read or contradict each other.

    Args:
        problems: One complete sentence a broken rule. All of them are in the message, one a line.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(UserError):
    """Training or validation data that cannot be read or used; names file and row where there is one."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded."""


class PluginError(UserError):
    """An acceleration plugin that was asked for and cannot do its work."""


class UnsupportedError(UserError):
    """Something this device, model class or installed version cannot do."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or resumed from."""
