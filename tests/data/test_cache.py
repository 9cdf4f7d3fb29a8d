"""Cached tables: whole or not at all, found again by a key that changes with the content."""

import os

import pyarrow as pa

from tuning.data import cache

SCHEMA = pa.schema({"a": pa.int64()}, metadata={b"note": b"kept"})
BATCH = pa.RecordBatch.from_pydict({"a": [1, 2]}, schema=SCHEMA)


def test_what_is_stored_is_found(tmp_path):
    path = tmp_path / "new" / "x.arrow"
    assert cache.find(path) is None
    assert cache.store(path, SCHEMA, [BATCH])["a"][:] == [1, 2]
    assert cache.find(path)["a"][:] == [1, 2]
    assert cache.metadata(path)[b"note"] == b"kept"
    assert [file.name for file in path.parent.iterdir()] == ["x.arrow"]


def test_a_damaged_file_is_made_anew(tmp_path, caplog):
    path = tmp_path / "x.arrow"
    path.write_bytes(b"\xff\xff\xff\xffrubbish")
    assert cache.find(path) is None
    assert f"the cached data {path} cannot be read and is made anew" in caplog.text
    assert cache.store(path, SCHEMA, [BATCH])["a"][:] == [1, 2]


def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "x.arrow"
    assert cache.store(path, SCHEMA, [BATCH])["a"][:] == [1, 2]
    assert "prepared data cannot be cached in" in caplog.text


def test_a_folder_that_may_not_be_looked_into_costs_the_cache_only(tmp_path, monkeypatch):
    """A cache below another user's home: to ask whether the file is there is refused already."""
    real = os.stat

    def refuse(path, **options):
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert cache.find(tmp_path / "x.arrow") is None


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", fail)
    assert cache.store(tmp_path / "x.arrow", SCHEMA, [BATCH])["a"][:] == [1, 2]
    assert list(tmp_path.iterdir()) == []


def test_keys_tell_parts_apart():
    assert cache.key("ab", "c") != cache.key("a", "bc")
    assert cache.key("a") == cache.key(b"a")
    assert len(cache.key()) == 32


def test_the_folder_is_never_the_data_folder(tmp_path):
    import datasets

    assert cache.folder(str(tmp_path)) == tmp_path / "packtune"
    assert str(cache.folder(None)).startswith(str(datasets.config.HF_DATASETS_CACHE))


def test_the_code_has_a_version():
    assert cache.code_version() == cache.code_version()
