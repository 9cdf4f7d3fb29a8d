"""Stable sorting of whole numbers, the same on every machine.

numpy's default sort picks an algorithm by the processor's instruction set and orders equal keys accordingly, so that
two ranks on different processors would disagree. A stable sort does not; of 16-bit keys numpy's is a radix sort, which
is ten times as fast as comparing, and larger keys are sorted by their halves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["stable_order"]

_HALF = 16


def stable_order(keys: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Return the positions of ``keys`` in ascending order, equal keys in their own order.

    Args:
        keys: One dimension, each 0 to below 2**32.
    """
    if len(keys) == 0 or int(keys.max()) < 1 << _HALF:
        return np.argsort(keys.astype(np.uint16), kind="stable")
    by_low = np.argsort((keys & ((1 << _HALF) - 1)).astype(np.uint16), kind="stable")
    by_high = np.argsort((keys[by_low] >> _HALF).astype(np.uint16), kind="stable")
    return by_low[by_high]
