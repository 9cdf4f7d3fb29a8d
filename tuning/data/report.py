"""What became of the rows: read, kept, dropped and why, cut, and how many tokens are trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tuning.data.origin import Origin

__all__ = ["Counts", "Dropped", "Report"]

_NAMED_ROWS = 3  # of each reason; the count tells of the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """Rows that were dropped for one reason.

    Attributes:
        count: How many.
        rows: The first few of them, numbered from 0 in the data set.
    """

    count: int
    rows: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[int]) -> Dropped:
        """Make it of all row numbers, ascending."""
        return cls(count=len(rows), rows=tuple(int(row) for row in rows[:_NAMED_ROWS]))

    def __add__(self, other: Dropped) -> Dropped:
        """Return both together; ``other`` comes after."""
        return Dropped(count=self.count + other.count, rows=(self.rows + other.rows)[:_NAMED_ROWS])


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Rows and tokens of one data set.

    Attributes:
        read: Rows read.
        kept: Rows kept, truncated ones included.
        truncated: Rows kept of which the end was cut off.
        dropped: Reason to rows.
        padding: Tokens left out because the row's own attention mask has a 0 for them.
        tokens: Tokens kept.
        supervised: Tokens trained on; the first token of a row never is.
    """

    read: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: Mapping[str, Dropped] = field(default_factory=dict)
    padding: int = 0
    tokens: int = 0
    supervised: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of both together; ``other`` comes after."""
        dropped = dict(self.dropped)
        for reason, rows in other.dropped.items():
            dropped[reason] = dropped[reason] + rows if reason in dropped else rows
        return Counts(
            read=self.read + other.read,
            kept=self.kept + other.kept,
            truncated=self.truncated + other.truncated,
            dropped=dropped,
            padding=self.padding + other.padding,
            tokens=self.tokens + other.tokens,
            supervised=self.supervised + other.supervised,
        )

    def to_json(self) -> str:
        """Return the counts as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Counts:
        """Read what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        dropped = values.pop("dropped").items()
        return cls(
            **values,
            dropped={why: Dropped(count=rows["count"], rows=tuple(rows["rows"])) for why, rows in dropped},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The table printed before training; ``str`` of it.

    Attributes:
        kind: What the rows were taken for, and what of them is trained on.
        counts: ``"train"`` and, with evaluation, ``"eval"`` to counts.
        origins: The same names to where the rows are from.
        max_seq_length: Longest sample in tokens.
        notes: Further sentences.
        seconds: What preparation took.
    """

    kind: str
    counts: Mapping[str, Counts]
    origins: Mapping[str, Origin]
    max_seq_length: int
    notes: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """Return a table with a column a data set, and a sentence for each reason to drop rows."""
        head = ["", *self.counts]
        lines = [[name, *(cell(counts) for counts in self.counts.values())] for name, cell in self._cells()]
        widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
        table = [
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
                ]
            ).rstrip()
            for line in (head, *lines)
        ]
        seconds = f"prepared in {self.seconds:.1f} s"
        return "\n".join([f"rows are {self.kind}", *table, *self._sentences(), *self.notes, seconds])

    def _cells(self) -> list[tuple[str, Any]]:
        reasons = dict.fromkeys(reason for counts in self.counts.values() for reason in counts.dropped)
        cells: list[tuple[str, Any]] = [("rows read", lambda counts: f"{counts.read:,}")]
        for reason in reasons:
            cells.append((f"dropped: {reason}", lambda counts, why=reason: f"{_dropped(counts, why):,}"))
        cells += [
            ("rows kept", lambda counts: f"{counts.kept:,}"),
            (f"of these cut to {self.max_seq_length:,} tokens", lambda counts: f"{counts.truncated:,}"),
            ("tokens", lambda counts: f"{counts.tokens:,}"),
            ("supervised tokens", lambda counts: f"{counts.supervised:,}"),
            ("supervised share", lambda counts: f"{counts.supervised / max(counts.tokens, 1):.1%}"),
        ]
        if any(counts.padding for counts in self.counts.values()):
            cells.append(("padding left out", lambda counts: f"{counts.padding:,}"))
        return cells

    def _sentences(self) -> list[str]:
        sentences = []
        for name, counts in self.counts.items():
            for reason, rows in counts.dropped.items():
                named = self.origins[name].names(rows.rows)
                more = ", ..." if rows.count > len(rows.rows) else ""
                noun = "row" if rows.count == 1 else "rows"
                sentences.append(f"{name}: {rows.count:,} {noun} dropped, {reason}: {named}{more}")
        return sentences


def _dropped(counts: Counts, reason: str) -> int:
    return counts.dropped[reason].count if reason in counts.dropped else 0
