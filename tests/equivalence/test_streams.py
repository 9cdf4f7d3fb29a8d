"""Rows that are read as training goes: padded and padding-free steps are alike, and no pass over them ends a step."""

from __future__ import annotations

import itertools
import math

import pytest

from tests import tiny
from tests.equivalence.product import run_product, write_rows
from tests.trainers.test_fit import StopAt, same, weights
from tuning.errors import DataError

# 7 rows in batches of 3 and windows of 2: no pass over them ends where a window does
ROWS = [[10 + i, 40, 41, 42, 43][: 2 + i % 4] for i in range(7)]
FIRST = [row[0] for row in ROWS]
VALUES = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "data_values": {"streaming": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("streams")
    tiny.save(path / "bigram", model=tiny.build_bigram(vocab_size=tiny.VOCAB_SIZE))
    tiny.save(path / "model")
    write_rows(path / "rows.jsonl", ROWS)
    return path


@pytest.mark.parametrize("flags", [{}, {"padding_free": True}], ids=["padded", "padding_free"])
def test_every_step_is_a_full_one_and_its_loss_exact(folder, tmp_path, flags):
    run = run_product(
        str(folder / "bigram"), str(folder / "rows.jsonl"), str(tmp_path), flags=flags, max_steps=5, learning_rate=0.0,
        **VALUES,
    )  # fmt: skip
    assert [i for _, ids in run.first_ids() for i in ids] == (FIRST * 5)[:30]
    assert [step for step, _ in run.first_ids()] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    good, bad = tiny.bigram_losses(vocab_size=tiny.VOCAB_SIZE)
    for step, loss in enumerate(run.logged("loss")):
        rows = (ROWS * 5)[6 * step : 6 * step + 6]
        costs = [good if b == a + 1 else bad for row in rows for a, b in itertools.pairwise(row)]
        assert loss == pytest.approx(math.fsum(costs) / len(costs), abs=1e-5)


def test_a_resume_goes_on_inside_the_second_pass(folder, tmp_path):
    values = {**VALUES, "max_steps": 5, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.05}
    paths = str(folder / "model"), str(folder / "rows.jsonl")
    flags = {"padding_free": True}
    whole = run_product(*paths, str(tmp_path / "whole"), flags=flags, **values)
    run_product(*paths, str(tmp_path / "broken"), flags=flags, callbacks=[StopAt(3)], **values)
    rest = run_product(*paths, str(tmp_path / "broken"), flags=flags, **{**values, "resume_from_checkpoint": "true"})
    assert rest.first_ids() == [entry for entry in whole.first_ids() if entry[0] >= 3]
    assert same(weights(whole.trainer.model), weights(rest.trainer.model))


def test_rows_without_a_token_to_train_on(folder, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [[10], [11]])
    with pytest.raises(DataError, match="--streaming found no sample to train on"):
        run_product(str(folder / "model"), rows, str(tmp_path / "out"), max_steps=1, **VALUES)
