"""What transformers raises for a checkpoint it cannot read, and how it is said in one line.

A config is read by many classes, and each fails in its own way: a check of a field, a division by a number of heads
that is 0, an activation looked up by a name that is none. All of these are faults of the files, not of this program.
"""

from __future__ import annotations

import pickle
import struct
from typing import Final

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

__all__ = ["LOAD_ERRORS", "describe"]

LOAD_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError,
    SafetensorError, StrictDataclassError, TypeError, ValueError, pickle.UnpicklingError, struct.error,
)  # fmt: skip
# errors whose text says little without their name: KeyError: 'gelu2'
_NAMED = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError)
_MAX_CHARACTERS = 300


def describe(error: BaseException) -> str:
    """Return an error as part of a sentence: its first line, with its name where the text alone says little."""
    text = str(error).strip()
    if isinstance(error, StrictDataclassError):
        # the first line names the field, the second says what is wrong with it
        return " ".join(text.split())[:_MAX_CHARACTERS].rstrip(".")
    line = text.splitlines()[0].rstrip(".") if text else ""
    if isinstance(error, _NAMED) or not line:
        return f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line
