"""Rows are named by file and number, from 0, however they were drawn."""

import numpy as np

from tuning.data.origin import Origin

FILES = (("a.jsonl", 2), ("b.jsonl", 3))


def test_rows_are_numbered_within_their_file():
    origin = Origin(files=FILES, fingerprint="")
    assert [origin.name(row) for row in range(5)] == [
        "row 0 of a.jsonl",
        "row 1 of a.jsonl",
        "row 0 of b.jsonl",
        "row 1 of b.jsonl",
        "row 2 of b.jsonl",
    ]


def test_picked_rows_keep_their_name():
    origin = Origin(files=FILES, picks=np.array([4, 0]), fingerprint="")
    assert [origin.name(row) for row in range(2)] == ["row 2 of b.jsonl", "row 0 of a.jsonl"]


def test_a_streamed_file_does_not_know_its_size():
    assert Origin(files=(("a.jsonl", 0),), fingerprint="").name(700) == "row 700 of a.jsonl"


def test_title_is_short():
    assert Origin(files=FILES, fingerprint="").title == "a.jsonl, b.jsonl"
    assert Origin(files=(*FILES, *FILES), fingerprint="").title == "a.jsonl, b.jsonl, a.jsonl and 1 more"
