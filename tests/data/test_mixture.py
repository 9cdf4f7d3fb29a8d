"""The mixture file: what is read, what is refused by name, and how rows are drawn."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.data import mixture
from tuning.data.mixture import DatasetEntry, Mixture
from tuning.errors import DataError

YAML = """
dataprocessor:
  type: default
  sampling_stopping_strategy: first_exhausted
  seed: 7
datasets:
  - name: a
    data_paths: [a.jsonl, b.jsonl]
    sampling: 0.25
    rename_columns: {question: input}
    split: {train: 0.9, validation: 0.1}
  - data_paths: c.jsonl
    sampling: 3
"""


def test_yaml_and_json_mean_the_same(write):
    import yaml

    expected = Mixture(
        datasets=(
            DatasetEntry(
                name="a",
                data_paths=("a.jsonl", "b.jsonl"),
                sampling=0.25,
                rename_columns={"question": "input"},
                validation=0.1,
            ),
            DatasetEntry(name="datasets[1]", data_paths=("c.jsonl",), sampling=3.0, rename_columns={}, validation=0.0),
        ),
        stop_at_first=True,
        seed=7,
    )
    assert mixture.load(Path(write(YAML, "mix.yaml"))) == expected
    assert mixture.load(Path(write(json.dumps(yaml.safe_load(YAML)), "mix.json"))) == expected


ONE = "datasets: [{data_paths: [a.jsonl]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "--data_config_path {path} is neither JSON nor YAML: while parsing a flow node expected the node "
         'content, but found \'<stream end>\' in "<unicode string>", line 1, column 5: a: [ ^'),
        ("- 1", "--data_config_path {path} is [1]; it must be a mapping with the keys datasets, dataprocessor"),
        ("", "--data_config_path {path} is None; it must be a mapping with the keys datasets, dataprocessor"),
        ("dataset: []", "--data_config_path {path} has the key 'dataset', which is not known; did you mean datasets?"),
        ("datasets: []", "--data_config_path {path} lists no data set; datasets must be a list of one or more"),
        ("datasets: {a: 1}", "--data_config_path {path} lists no data set; datasets must be a list of one or more"),
        (ONE + ", data_handlers: []}]", "--data_config_path {path}: datasets[0] has the key 'data_handlers', which is "
         "not known; use the flags that name columns and templates, listed in docs/data.md"),
        (ONE + ", samplng: 1}]",
         "--data_config_path {path}: datasets[0] has the key 'samplng', which is not known; did you mean sampling?"),
        (ONE + ", zzz: 1}]", "--data_config_path {path}: datasets[0] has the key 'zzz', which is not known; known are "
         "name, data_paths, sampling, rename_columns, split"),
        (ONE + "}]\ndataprocessor: {streaming: true}", "--data_config_path {path}: dataprocessor has the key "
         "'streaming', which is not known; use --streaming"),
        (ONE + "}]\ndataprocessor: {type: odm}", "--data_config_path {path}: dataprocessor.type is 'odm'; it must be "
         "default"),
        (ONE + "}]\ndataprocessor: {sampling_stopping_strategy: all}", "--data_config_path {path}: "
         "dataprocessor.sampling_stopping_strategy is 'all'; it must be all_exhausted or first_exhausted"),
        (ONE + "}]\ndataprocessor: {seed: true}", "--data_config_path {path}: dataprocessor.seed is True; it must be "
         "an integer from 0"),
        ("datasets: [{name: a}]", "--data_config_path {path}: datasets[0].data_paths is None; it must be a list of "
         "files, folders or hub names"),
        ("datasets: [a.jsonl]", "--data_config_path {path}: datasets[0] is 'a.jsonl'; it must be a mapping with the "
         "keys name, data_paths, sampling, rename_columns, split"),
        (ONE + ", sampling: 0}]",
         "--data_config_path {path}: datasets[0].sampling is 0; it must be a number above 0"),
        (ONE + ", sampling: 1}, {data_paths: [b], name: other}]", "--data_config_path {path} gives sampling to some "
         "data sets but not to 'other'; give it to all or to none"),
        (ONE + ", rename_columns: [a]}]", "--data_config_path {path}: datasets[0].rename_columns is ['a']; it must map "
         "old column names to new ones"),
        (ONE + ", split: {train: 0.5, validation: 0.6}}]", "--data_config_path {path}: datasets[0].split is "
         "{{'train': 0.5, 'validation': 0.6}}; train and validation must be shares that add up to 1, train above 0"),
        (ONE + ", split: {validation: 1}}]", "--data_config_path {path}: datasets[0].split is {{'validation': 1}}; "
         "train and validation must be shares that add up to 1, train above 0"),
        (b"\xff\xfe\x00", "--data_config_path {path} is not UTF-8 text; give a JSON or YAML file"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(write, content, message):
    path = write(content, "mix.yaml")
    with pytest.raises(DataError) as caught:
        mixture.load(Path(path))
    assert str(caught.value) == message.format(path=path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError) as caught:
        mixture.load(tmp_path / "no.yaml")
    assert str(caught.value) == (
        f"--data_config_path {tmp_path / 'no.yaml'} cannot be read: No such file or directory; give a JSON or YAML file"
    )


def test_validation_share_alone_is_enough(write):
    path = Path(write("datasets: [{data_paths: [a], split: {validation: 0.25}}]", "mix.yaml"))
    assert mixture.load(path).datasets[0].validation == 0.25


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 5)), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 5),
)
def test_draws_use_up_the_sets(sets, stop_at_first, seed):
    sizes, shares = [size for size, _ in sets], [share for _, share in sets]
    rows = mixture.draw(sizes, shares, stop_at_first=stop_at_first, seed=seed)
    assert rows.tolist() == mixture.draw(sizes, shares, stop_at_first=stop_at_first, seed=seed).tolist()
    starts = np.cumsum([0, *sizes])
    used_up = []
    for start, end in itertools.pairwise(starts):
        drawn = rows[(rows >= start) & (rows < end)].tolist()
        counts = [drawn.count(row) for row in range(start, end)]
        # a set starts over only when all its rows have been drawn
        assert max(counts) - min(counts) <= 1
        used_up.append(min(counts) >= 1)
    assert any(used_up) if stop_at_first else all(used_up)


def test_draws_follow_the_shares_and_the_seed():
    rows = mixture.draw([2000, 2000], [0.8, 0.2], stop_at_first=True, seed=1)
    # 4 to 1; the first set ends it after about 2,500 draws
    assert 2400 < len(rows) < 2600
    assert abs((rows < 2000).mean() - 0.8) < 0.03
    assert rows.tolist() != mixture.draw([2000, 2000], [0.8, 0.2], stop_at_first=True, seed=2).tolist()
