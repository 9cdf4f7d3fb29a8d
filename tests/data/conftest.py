"""Files of rows, and the way from a file to batches, for the tests of the data room."""

import json

import pytest

from tests import tiny
from tuning.config.configs import DataArguments
from tuning.data import sources, tokenization
from tuning.data.collators import FlattenedCollator, PaddedCollator


@pytest.fixture
def write(tmp_path):
    """Write rows as JSON lines, or text or bytes as they are, and return the path."""

    def write_(content, name="rows.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
        return str(path)

    return write_


@pytest.fixture
def prepare(write, tmp_path):
    """Take rows (or the path of a file) all the way to samples."""

    def prepare_(rows, tokenizer=None, *, max_seq_length=256, vocab_size=None, **flags):
        path = rows if isinstance(rows, str) else write(rows)
        config = DataArguments(training_data_path=path, **flags)
        return tokenization.tokenize(
            sources.read(config, seed=0, cache_dir=str(tmp_path / "cache")),
            tokenizer or tiny.build_tokenizer(),
            config,
            max_seq_length=max_seq_length,
            vocab_size=vocab_size,
            cache_dir=str(tmp_path / "cache"),
        )

    return prepare_


@pytest.fixture(params=["padded", "flattened"])
def collate(request):
    """One collator, then the other: every case is run with both."""
    return PaddedCollator(tiny.PAD) if request.param == "padded" else FlattenedCollator()
