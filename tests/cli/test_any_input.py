"""Whatever the user types, the answer is a config or an error with advice, never another exception."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.config.inputs import launch
from tuning.config import parsing
from tuning.config.catalog import list_flags
from tuning.config.old_names import ALWAYS, REFUSED, RENAMED
from tuning.config.parsing import parse, parse_mapping
from tuning.config.validation import check, resolve
from tuning.errors import ConfigError

NAMES = sorted({*list_flags(), *ALWAYS, *REFUSED, *RENAMED, "bitsandbytes", "max_step"} - {"config"})
WORDS = st.sampled_from([
    "", "true", "false", "none", "null", "1", "-1", "0", "2.5", "nan", "inf", "auto", "huggingface", "nf4", "lora",
    "pt", "a\0b", "rope", "True", "x=1", "mode=budget", "=", "[", "{", "[]", "{}", '["a"]', '{"a": 1}', "[PAD]",
    "a b", "--", "-x", "ü", "~nobody/x", "no", "auto_gptq", "float16", "torch.bfloat16", "1e400", "9" * 400,
])  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["method", "mode", "a", ""]), inner),
    max_leaves=6,
)


@pytest.fixture(autouse=True, scope="module")
def _read_sources_once():
    flags = list_flags()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "list_flags", lambda: flags)
        yield


FIXED = {"model_name_or_path": "org/model", "training_data_path": "org/data", "output_dir": "out"}


def judge(make) -> None:
    problems: tuple[str, ...] = ()
    try:
        config = resolve(make(), launch())
        check(config, launch())
    except ConfigError as error:
        problems = error.problems or ("",)
    assert all(problem and "\n" not in problem for problem in problems)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_any_mapping(values):
    judge(lambda: parse_mapping({**FIXED, **values}))


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.lists(WORDS, max_size=4)), max_size=4))
def test_any_command_line(flags):
    argv = [token for name, words in flags for token in (f"--{name}", *words)]
    judge(lambda: parse([f"--{name}={value}" for name, value in FIXED.items()] + argv, launch()))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=40) | VALUES.map(json.dumps), st.sampled_from(["run.json", "run.yaml"]))
def test_any_file(tmp_path_factory, text, name):
    path = tmp_path_factory.getbasetemp() / name
    path.write_text(text, encoding="utf-8")
    judge(lambda: parse([str(path)], launch()))
