"""Rows to tokens and labels. What is trained on is decided here, once per sample, before any collator.

A batch of rows becomes texts (:mod:`tuning.data.rows`), the texts become tokens in one call of the tokenizer, which
uses all cores for it, and answers become labels by the tokenizer's offsets. From there on samples are flat arrays:
length policy, counting and storing are a few numpy and Arrow calls a batch. Rendering chat templates is Python, so
larger sets are also spread over processes.

The result is cached under a key of the rows' content, the tokenizer, the settings and this package's code, and mapped
from disk: ranks of one machine share it, and a second run with the same data starts at once.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
import transformers
from datasets import Dataset, Features, IterableDataset, List, Value

from tuning.config.configs import DataArguments
from tuning.data import cache, tables, workers
from tuning.data.encoding import Encoder
from tuning.data.limits import Flat
from tuning.data.origin import Origin
from tuning.data.report import Counts, Report
from tuning.data.sources import RawData
from tuning.errors import DataError
from tuning.logs import logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenizedData", "sample_lengths", "tokenize"]

_log = logger(__name__)
_FEATURES = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
_COUNTS_KEY = b"packtune.counts"
_BATCH_ROWS = 1_000
_STREAMED_ROWS = 64
# below either, forking gains nothing: the tokenizer's own threads keep the cores busy (2 cores, 30,000 rows: 4.7 s by
# two processes, 5.2 s by one)
_MIN_ROWS_TO_FORK = 10_000
_MIN_CORES_TO_FORK = 4
_MAX_WORKERS = 16
# flags that change samples; paths do not, the rows' own fingerprint stands for them
_SETTINGS = (
    "data_formatter_template",
    "dataset_conversation_field",
    "dataset_text_field",
    "instruction_template",
    "max_seq_length_policy",
    "response_template",
    "train_on_input",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedData:
    """Samples to train and evaluate on.

    Attributes:
        train: ``input_ids`` and ``labels``, equally long lists of int32; -100 where a token is not trained on.
            Iterable when streaming was asked for.
        eval: The same to evaluate on, or None.
        lengths: Tokens of each sample of ``train``, int64; empty when streaming.
        report: What became of the rows; ``str`` of it is a table.
    """

    train: Dataset | IterableDataset
    eval: Dataset | None
    lengths: npt.NDArray[np.int64]
    report: Report


def tokenize(
    raw: RawData,
    tokenizer: PreTrainedTokenizerBase,
    config: DataArguments,
    *,
    max_seq_length: int,
    vocab_size: int | None = None,
    cache_dir: str | None = None,
    main_first: AbstractContextManager[object] | None = None,
) -> TokenizedData:
    """Make samples of rows.

    Args:
        raw: From :func:`tuning.data.sources.read`.
        tokenizer: With the chat template to use.
        config: Which columns, templates and policies.
        max_seq_length: Longest sample in tokens.
        vocab_size: Ids of rows that are tokens already must be below; None: that of the tokenizer.
        cache_dir: Folder of the cache; None: that of ``datasets``.
        main_first: Entered while samples are made; lets one rank of a machine go first, so that the others read its
            cache. It must let the others go on when that rank fails.

    Returns:
        The samples. Those that cannot be trained on are dropped and counted in the report.

    Raises:
        DataError: If a row cannot be used, naming it, or none is left.
    """
    begin = time.perf_counter()
    maker = _Maker(
        tokenizer=tokenizer,
        config=config,
        max_seq_length=max_seq_length,
        vocab_size=vocab_size or len(tokenizer),
        cache_dir=cache_dir,
    )
    notes: list[str] = []
    origins: dict[str, Origin] = {}
    counts: dict[str, Counts] = {}
    samples: dict[str, Dataset] = {}
    encoder = maker.encoder(_columns(raw.train, raw.train_origin))
    with main_first or nullcontext():
        for name, rows, origin in (
            ("train", raw.train, raw.train_origin),
            ("eval", raw.eval, raw.eval_origin),
        ):
            if rows is None or origin is None or isinstance(rows, IterableDataset):
                continue
            one = encoder if name == "train" else maker.encoder(_columns(rows, origin))
            origins[name] = origin
            samples[name], counts[name], is_cached = maker.make(rows, origin, one)
            if is_cached:
                notes.append(f"{name}: read from the cache")
    if isinstance(raw.train, IterableDataset):
        notes.append("train is streamed: what is dropped of it is logged as training goes")
        train: Dataset | IterableDataset = maker.stream(raw.train, raw.train_origin, encoder)
    else:
        train = samples["train"]
        unused = [name for name in raw.train.column_names if name not in encoder.columns]
        notes += [f"columns not used: {', '.join(unused)}"] if unused else []
    report = Report(
        kind=encoder.kind.title,
        counts=counts,
        origins=origins,
        max_seq_length=max_seq_length,
        notes=tuple(notes),
        seconds=time.perf_counter() - begin,
    )
    return TokenizedData(
        train=train,
        eval=samples.get("eval"),
        lengths=sample_lengths(train) if isinstance(train, Dataset) else np.zeros(0, dtype=np.int64),
        report=report,
    )


def sample_lengths(samples: Dataset) -> npt.NDArray[np.int64]:
    """Return the tokens of each sample, int64, read from Arrow's offsets without touching the tokens."""
    column = samples.with_format("arrow")[:].column("input_ids")
    lengths = [np.diff(chunk.offsets.to_numpy()).astype(np.int64) for chunk in column.chunks]
    return np.concatenate([*lengths, np.zeros(0, dtype=np.int64)])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """Makes samples with one tokenizer and one set of flags."""

    tokenizer: PreTrainedTokenizerBase
    config: DataArguments
    max_seq_length: int
    vocab_size: int
    cache_dir: str | None

    def encoder(self, columns: list[str]) -> Encoder:
        return Encoder(
            columns,
            self.config,
            self.tokenizer,
            max_seq_length=self.max_seq_length,
            vocab_size=self.vocab_size,
        )

    def make(self, rows: Dataset, origin: Origin, encoder: Encoder) -> tuple[Dataset, Counts, bool]:
        """Return all samples, the counts, and whether they were in the cache."""
        path = cache.folder(self.cache_dir) / f"tokens-{self._key(origin)}.arrow"
        found = cache.find(path)
        if found is not None:
            return found, Counts.from_json(cache.metadata(path)[_COUNTS_KEY]), True
        _check_complete(rows, origin, encoder)
        arrow = rows.select_columns(encoder.columns).with_format("arrow")

        def work(start: int) -> tuple[Flat, Counts]:
            return encoder.encode(arrow[start : start + _BATCH_ROWS], start=start, origin=origin)

        starts = range(0, len(rows), _BATCH_ROWS)
        batches, counts = [], Counts()
        for flat, counts_of_batch in workers.map_ordered(work, starts, num_workers=self._num_workers(len(rows))):
            batches.append(_record_batch(flat))
            counts += counts_of_batch
        if not counts.kept:
            raise DataError(_nothing_left(origin, counts))
        schema = _FEATURES.arrow_schema
        schema = schema.with_metadata({**schema.metadata, _COUNTS_KEY: counts.to_json()})
        return cache.store(path, schema, batches), counts, False

    def stream(self, rows: IterableDataset, origin: Origin, encoder: Encoder) -> IterableDataset:
        """Return samples that are made as they are asked for; what is dropped is logged."""

        def work(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[list[int]]]:
            picked = [{name: row.get(name) for name in encoder.used} for row in batch["row"]]
            table = tables.build([picked], name_row=lambda row: origin.name(numbers[row]))
            # a column that neither the first row nor these have is absent; one that only some have is told by the row
            absent = [name for name in encoder.used if pa.types.is_null(table.schema.field(name).type)]
            table = table.drop_columns([name for name in absent if name not in encoder.columns])
            flat, counts = encoder.encode(table, start=numbers[0], origin=origin)
            for reason, dropped in counts.dropped.items():
                _log.warning("%d row(s) dropped, %s: %s", dropped.count, reason, origin.names(dropped.rows))
            return dict(pa.Table.from_batches([_record_batch(flat)]).to_pydict())

        return rows.map(
            work,
            batched=True,
            with_indices=True,
            batch_size=_STREAMED_ROWS,
            remove_columns=["row"],
            features=_FEATURES,
        )

    def _num_workers(self, num_rows: int) -> int:
        if self.config.preprocessing_num_workers is not None:
            return self.config.preprocessing_num_workers
        num_cores = workers.num_cores()
        is_worth_it = num_rows >= _MIN_ROWS_TO_FORK and num_cores >= _MIN_CORES_TO_FORK
        return min(num_cores, _MAX_WORKERS) if is_worth_it else 1

    def _key(self, origin: Origin) -> str:
        """Return a key that changes with all that the samples depend on."""
        tokenizer = self.tokenizer
        backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
        template = json.dumps(tokenizer.chat_template)
        return cache.key(
            origin.fingerprint,
            cache.code_version(),
            f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
            type(tokenizer).__name__,
            backend,
            json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}),
            template,
            date.today().isoformat() if "strftime_now" in template else "",
            json.dumps([getattr(self.config, name) for name in _SETTINGS]),
            json.dumps([self.max_seq_length, self.vocab_size]),
        )


def _columns(rows: Dataset | IterableDataset, origin: Origin) -> list[str]:
    """Return the columns that hold anything; those of the first row where rows are streamed."""
    if isinstance(rows, Dataset):
        return [name for name, feature in rows.features.items() if feature != Value("null")]
    first = next(iter(rows), None)
    if first is None:
        raise DataError(f"{origin.title} holds no rows; it must hold one or more")
    return [name for name, value in first["row"].items() if value is not None]


def _check_complete(rows: Dataset, origin: Origin, encoder: Encoder) -> None:
    """Refuse a row that lacks a column of its kind; before all else, as the whole row can be shown here."""
    for name in encoder.kind.columns:
        if rows.data.column(name).null_count:
            column = rows.select_columns([name]).with_format("arrow")[:].column(name)
            missing = np.flatnonzero(pc.is_null(column).to_numpy())
            if len(missing):
                row = int(missing[0])
                raise DataError(f"{origin.name(row)}: {encoder.find_missing(rows[row])}")


def _record_batch(flat: Flat) -> pa.RecordBatch:
    offsets = pa.array(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(flat.lengths)]).astype(np.int32))
    columns = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in (flat.ids, flat.labels)]
    return pa.RecordBatch.from_arrays(columns, names=list(_FEATURES))


def _nothing_left(origin: Origin, counts: Counts) -> str:
    reasons = ", ".join(f"{rows.count:,} for {reason}" for reason, rows in counts.dropped.items())
    return (
        f"No row of {origin.title} can be trained on: {counts.read:,} read, all dropped ({reasons}); look at "
        f"{origin.name(0)}, at --response_template and --max_seq_length"
    )
