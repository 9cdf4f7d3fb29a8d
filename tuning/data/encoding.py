"""A batch of rows to samples as flat arrays: render, tokenize in one call, label, limit, count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tuning.config.configs import DataArguments
from tuning.data import limits, pretokenized, tables
from tuning.data.collators import IGNORE_INDEX
from tuning.data.limits import Flat
from tuning.data.masking import Rendered, RowError, token_spans
from tuning.data.origin import Origin
from tuning.data.report import Counts, Dropped
from tuning.data.rows import choose
from tuning.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encoder"]

Ids = npt.NDArray[np.int32]


class Encoder:
    """Makes samples of the rows of one data set.

    A text gets the BOS that the tokenizer puts before plain texts, unless it begins with it, and the EOS, unless it
    ends with it. What a chat template wrote is left as it is.

    Args:
        columns: Columns of the data set.
        config: Which of them, templates and policies.
        tokenizer: A fast one where only a part of a text is trained on.
        max_seq_length: Longest sample in tokens.
        vocab_size: Ids of rows that are tokens already must be below.

    Attributes:
        kind: What the rows are.
        used: Every column that such rows may use.
        columns: Those of them that the data set has.

    Raises:
        DataError: If the rows are of no known kind.
    """

    def __init__(
        self,
        columns: Sequence[str],
        config: DataArguments,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_seq_length: int,
        vocab_size: int,
    ) -> None:
        self.kind = choose(columns, config, tokenizer)
        self.used = pretokenized.COLUMNS if self.kind.render is None else (*self.kind.columns, *self.kind.optional)
        self.columns = [name for name in self.used if name in columns]
        self._tokenizer = tokenizer
        self._config = config
        self._max_seq_length = max_seq_length
        self._vocab_size = vocab_size
        self._prefix, self._eos = _added_ids(tokenizer)

    def encode(self, table: pa.Table, *, start: int, origin: Origin) -> tuple[Flat, Counts]:
        """Make the samples of some rows.

        Args:
            table: Rows with the columns that are used.
            start: Number of its first row in the data set.
            origin: Names rows.

        Raises:
            DataError: If a row cannot be used, naming it.
        """
        if self.kind.render is None:
            flat, num_padding = pretokenized.read(
                table,
                start=start,
                vocab_size=self._vocab_size,
                train_on_all=self._config.train_on_input,
                name_row=origin.name,
            )
            unusable = Counts(padding=num_padding)
        else:
            rendered = self._render(table, start, origin)
            flat = self._tokenize({row: text for row, text in rendered.items() if text.dropped is None})
            reasons: dict[str, list[int]] = {}
            for row, text in rendered.items():
                if text.dropped is not None:
                    reasons.setdefault(text.dropped, []).append(row)
            dropped = {reason: Dropped.of(rows) for reason, rows in reasons.items()}
            unusable = Counts(read=sum(rows.count for rows in dropped.values()), dropped=dropped)
        kept, counts = limits.apply(
            flat,
            max_seq_length=self._max_seq_length,
            policy=self._config.max_seq_length_policy,
            name_row=origin.name,
        )
        return kept, unusable + counts

    def find_missing(self, row: Mapping[str, Any]) -> str | None:
        """Say which columns of its kind a row lacks and which it has, or None if it lacks none."""
        missing = [name for name in self.kind.columns if row[name] is None]
        if not missing:
            return None
        present = [name for name, value in row.items() if value is not None]
        return (
            f"there is nothing (absent or null) in {', '.join(missing)}, which other rows have; it has "
            f"{', '.join(present) or 'nothing that counts'}; all rows must be of one kind"
        )

    def _render(self, table: pa.Table, start: int, origin: Origin) -> dict[int, Rendered]:
        """Return the text of each row, by the number of the row in the data set."""
        render = self.kind.render
        assert render is not None
        columns = {name: tables.values(table.column(name)) for name in table.column_names}
        rendered = {}
        for index in range(table.num_rows):
            row = {name: values[index] for name, values in columns.items()}
            try:
                fault = self.find_missing(row)
                if fault is not None:
                    raise RowError(fault)
                rendered[start + index] = render(row)
            except RowError as error:
                raise DataError(f"{origin.name(start + index)}: {error}") from error
        return rendered

    def _tokenize(self, texts: dict[int, Rendered]) -> Flat:
        ids: list[Ids] = []
        labels: list[Ids] = []
        if texts:
            encoded = self._tokenizer(
                [rendered.text for rendered in texts.values()],
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for index, rendered in enumerate(texts.values()):
                sample = np.asarray(encoded["input_ids"][index], dtype=np.int32)
                spans = _token_spans(encoded, index, rendered, len(sample))
                sample_ids, sample_labels = self._label(sample, spans, rendered)
                ids.append(sample_ids)
                labels.append(sample_labels)
        none = np.zeros(0, dtype=np.int32)
        return Flat(
            ids=np.concatenate([*ids, none]),
            labels=np.concatenate([*labels, none]),
            lengths=np.fromiter(map(len, ids), dtype=np.int64, count=len(ids)),
            rows=np.fromiter(texts, dtype=np.int64, count=len(ids)),
        )

    def _label(self, ids: Ids, spans: Sequence[tuple[int, int]], rendered: Rendered) -> tuple[Ids, Ids]:
        """Add BOS and EOS where they are missing, and make the labels."""
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
        for first, last in spans:
            labels[first:last] = ids[first:last]
        if rendered.is_complete:
            return ids, labels
        prefix = self._prefix if not np.array_equal(ids[: len(self._prefix)], self._prefix) else self._prefix[:0]
        eos = self._eos if not len(ids) or ids[-1] != self._eos else self._eos[:0]
        # an answer that ends the text ends with the EOS
        has_final_answer = bool(rendered.spans) and rendered.spans[-1][1] == len(rendered.text)
        ends = eos if has_final_answer else np.full(len(eos), IGNORE_INDEX, dtype=np.int32)
        return (
            np.concatenate([prefix, ids, eos]),
            np.concatenate([np.full(len(prefix), IGNORE_INDEX, dtype=np.int32), labels, ends]),
        )


def _added_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[Ids, Ids]:
    """Return the ids that plain tokenization puts before a text, and the EOS, as arrays that may be empty."""
    bare = list(tokenizer("a", add_special_tokens=False).input_ids)
    full = list(tokenizer("a").input_ids)
    starts = [start for start in range(len(full) - len(bare) + 1) if full[start : start + len(bare)] == bare]
    prefix = full[: starts[0]] if starts else []
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.asarray(prefix, dtype=np.int32), np.asarray(eos, dtype=np.int32)


def _token_spans(encoded: Any, index: int, rendered: Rendered, count: int) -> Sequence[tuple[int, int]]:  # noqa: ANN401
    if rendered.spans == ((0, len(rendered.text)),):
        return [(0, count)]
    if encoded.encodings is None:
        raise DataError(
            "Only a part of each row is to be trained on, but the tokenizer does not say which characters its tokens "
            "are; use a fast tokenizer (tokenizer.json), or give --train_on_input true"
        )
    return token_spans(encoded.encodings[index], rendered.spans)
