"""Arrow tables on disk, mapped into memory by every rank that wants them.

A file is named by a key that changes with all that its content depends on, and is put in place whole, so that a
reader never sees half of one and two ranks may write the same. Nothing is written beside the user's data: the folder
is that of ``datasets`` (``HF_DATASETS_CACHE``) unless another is given.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import datasets
import pyarrow as pa
from datasets import Dataset

from tuning.logs import logger

__all__ = ["code_version", "find", "folder", "key", "metadata", "store"]

_log = logger(__name__)


def folder(cache_dir: str | None) -> Path:
    """Return the folder for cached tables; it need not exist."""
    return Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "packtune"


def key(*parts: str | bytes) -> str:
    """Return 32 hexadecimal digits that change with any of the parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        # the length keeps ("ab", "c") and ("a", "bc") apart
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def code_version() -> str:
    """Return a key of the code of this package: tables made by other code are not taken for its own."""
    return key(*(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))))


def find(path: Path) -> Dataset | None:
    """Return the table at ``path``, mapped from disk, or None if there is none or it cannot be read."""
    if not os.path.isfile(path):  # Path.is_file raises where a folder above may not be looked into
        return None
    try:
        return Dataset.from_file(str(path))
    except (OSError, pa.ArrowInvalid) as error:
        _log.warning("the cached data %s cannot be read and is made anew: %s", path, error)
        return None


def metadata(path: Path) -> dict[bytes, bytes]:
    """Return what the schema of the table at ``path`` was given as metadata; ``datasets`` keeps only its own part."""
    with pa.memory_map(str(path)) as source:
        return dict(pa.ipc.open_stream(source).schema.metadata or {})


def store(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Dataset:
    """Write a table to ``path`` and return it mapped from disk; kept in memory, with a warning, if that fails.

    Args:
        path: File; its folder is made.
        schema: Of every batch.
        batches: Rows.
    """
    kept = list(batches)
    part: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        with os.fdopen(handle, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for batch in kept:
                writer.write_batch(batch)
        os.replace(part, path)
        return Dataset.from_file(str(path))
    except OSError as error:
        _log.warning("prepared data cannot be cached in %s (%s); every rank prepares it", path.parent, error.strerror)
        if part is not None:
            Path(part).unlink(missing_ok=True)
        return Dataset(pa.Table.from_batches(kept, schema))
