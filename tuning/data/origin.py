"""Where the rows of a data set are from, so that a message can name file and row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

__all__ = ["Origin"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The files behind the rows of a data set.

    Attributes:
        files: Name and number of rows of each file, in the order in which they were read.
        picks: For each row of the data set its number among all rows of ``files``; None: they are the same.
        fingerprint: Changes with the content of the files, their order and the picks.
    """

    files: tuple[tuple[str, int], ...]
    picks: np.ndarray[Any, Any] | None = None
    fingerprint: str

    def name(self, row: int) -> str:
        """Return ``"row 1 of data.jsonl"`` for row ``row`` of the data set; rows count from 0 within their file."""
        position = row if self.picks is None else int(self.picks[row])
        ends = list(accumulate(count for _, count in self.files))
        # a streamed set does not know its size: whatever is beyond the known rows is in the last file
        file = min(bisect_right(ends, position), len(ends) - 1)
        start = ends[file] - self.files[file][1]
        return f"row {position - start} of {self.files[file][0]}"

    def names(self, rows: Sequence[int]) -> str:
        """Return the rows of one message, such as ``"row 1 of a.jsonl, row 7 of a.jsonl"``."""
        return ", ".join(self.name(row) for row in rows)

    @property
    def title(self) -> str:
        """The file names, at most three of them."""
        names = [name for name, _ in self.files]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
