"""Whether the weights in a folder are all there, known from file sizes and headers alone.

A download or a job that was stopped leaves files that are too short. Reading them fails minutes later, or never; the
header of a safetensors file says how long it must be, and torch's files are zip archives, which end in a directory.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

__all__ = ["find_weights_fault", "is_whole"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LEGACY_START = b"\x80\x02"  # a bare pickle, as torch wrote before 1.6
_SINGLE = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")


def find_weights_fault(folder: Path) -> str | None:
    """Return why the weights in ``folder`` are not complete, or None if they are.

    Args:
        folder: Of a model or an adapter, sharded or not.
    """
    names = [name for name in _SINGLE if (folder / name).is_file()]
    for index in _INDEXES:
        if (folder / index).is_file():
            try:
                names += sorted(set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()))
            except OSError as error:
                return f"{index} cannot be read ({error.strerror})"
            except (ValueError, KeyError, TypeError, AttributeError):
                return f"{index} is cut short"
    if not names:
        return "its weights are missing"
    for name in names:
        if not (folder / name).is_file():
            return f"{name} is missing"
        try:
            if not is_whole(folder / name):
                return f"{name} is cut short"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def is_whole(path: Path) -> bool:
    """Say whether a file has its end: a safetensors file as its header says, another one that of a zip archive.

    Torch's oldest files are bare pickles, which cannot be told; they pass.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if path.suffix != ".safetensors":
            return start.startswith(_LEGACY_START) or zipfile.is_zipfile(path)
        if len(start) < 8:
            return False
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > size:
            return False
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            return False
    return bool(size == 8 + header_bytes + max(ends, default=0))
