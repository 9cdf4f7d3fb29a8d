"""Whether weights are all there, from file sizes and headers alone."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import build_model
from tuning.models.weights import find_weights_fault, is_whole


@pytest.fixture
def folder(tmp_path):
    build_model().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def shards(tmp_path):
    build_model().save_pretrained(tmp_path, max_shard_size="40KB")
    return sorted(tmp_path.glob("model-*.safetensors"))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def test_complete_weights(folder, shards):
    assert find_weights_fault(folder) is None
    assert len(shards) > 1
    assert find_weights_fault(shards[0].parent) is None


def test_no_weights(tmp_path):
    assert find_weights_fault(tmp_path) == "its weights are missing"


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_a_file_that_is_too_short(folder, size):
    cut(folder / "model.safetensors", size)
    assert find_weights_fault(folder) == "model.safetensors is cut short"


def test_a_file_that_is_too_long(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    assert not is_whole(path)


@pytest.mark.parametrize(
    "header", [b"[1]", b'{"a": 1}', b'{"a": {"data_offsets": 3}}', b"{", b'{"a": {"data_offsets": []}}']
)
def test_a_header_that_is_none(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert find_weights_fault(folder) == "model.safetensors is cut short"


def test_shards(shards):
    folder = shards[0].parent
    cut(shards[1], 100)
    assert find_weights_fault(folder) == f"{shards[1].name} is cut short"
    shards[1].unlink()
    assert find_weights_fault(folder) == f"{shards[1].name} is missing"


@pytest.mark.parametrize("text", ['{"weight_map": {', "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_cannot_be_read(shards, text):
    folder = shards[0].parent
    (folder / "model.safetensors.index.json").write_text(text)
    assert find_weights_fault(folder) == "model.safetensors.index.json is cut short"


def test_torch_files(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(9)}, path)
    assert find_weights_fault(tmp_path) is None
    cut(path, 200)
    assert find_weights_fault(tmp_path) == "pytorch_model.bin is cut short"
    torch.save({"a": torch.zeros(9)}, path, _use_new_zipfile_serialization=False)
    assert find_weights_fault(tmp_path) is None


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    """Weights of another user's download are often readable by that user alone; root reads them all the same."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tuning.models.weights.is_whole", refuse)
    assert find_weights_fault(tmp_path) == "model.safetensors cannot be read (Permission denied)"
