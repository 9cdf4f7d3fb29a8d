import os

import pytest

from tuning.config.files import read_config_file
from tuning.errors import ConfigError


def message_of(path) -> str:
    with pytest.raises(ConfigError) as error:
        read_config_file(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_json_with_types(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1, "b": null, "c": [true], "d": {"e": 1e-5}}')
    assert read_config_file(str(path)) == {"a": 1, "b": None, "c": [True], "d": {"e": 1e-5}}


def test_yaml_words_stay_words(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "eval_strategy: no\nisolation_check: off\nbf16: true\nlr: 1e-5\nwhen: 2020-01-01\nlist: [a, 1]\nn:\n"
    )
    assert read_config_file(str(path)) == {
        "eval_strategy": "no",
        "isolation_check": "off",
        "bf16": True,
        "lr": "1e-5",
        "when": "2020-01-01",
        "list": ["a", 1],
        "n": None,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; write a JSON or YAML object of flags into it"),
        (" \n", "is empty; write a JSON or YAML object of flags into it"),
        ("[1]", "holds a list at its top level, but flags need an object; write {...} around them"),
        ('"x"', "holds a text at its top level, but flags need an object; write {...} around them"),
        ("3", "holds a single value at its top level, but flags need an object; write {...} around them"),
        ("null", "holds nothing at its top level, but flags need an object; write {...} around them"),
        ('{"a": NaN}', "holds NaN, which is no JSON number; write a finite one"),
    ],
)
def test_json_without_a_place(tmp_path, text, message):
    path = tmp_path / "run.json"
    path.write_text(text)
    assert message_of(path) == f"{path} {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "a": 1,\n}', "line 2, column 8: trailing comma, which JSON does not allow; remove it"),
        ('{"a": [1, 2,]}', "line 1, column 12: trailing comma, which JSON does not allow; remove it"),
        ('{\n "a": 1\n "b": 2}', "line 3, column 2: no valid JSON (Expecting ',' delimiter); correct it"),
        ('{\n "a": 1,\n "b": 2,\n "a": 3}', "line 4, column 2: the key a is given a second time; keep one"),
        ('{"x": {"a": 1,\n "a": 1}}', "line 2, column 2: the key a is given a second time; keep one"),
        ('{"a": 1', "line 1, column 8: no valid JSON (Expecting ',' delimiter); correct it"),
    ],
)
def test_json_with_line_and_column(tmp_path, text, message):
    path = tmp_path / "run.json"
    path.write_text(text)
    assert message_of(path) == f"{path}, {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\nc: 2\n", ", line 3, column 2: no valid YAML (expected ',' or ']', but got ':'); correct it"),
        ("a: 1\nb: 2\na: 3\n", ", line 3, column 1: the key a is given a second time; keep one"),
        ("a: *x\n", ", line 1, column 4: no valid YAML (found undefined alias 'x'); correct it"),
        ("a: !!python/object:os.system x\n", ", line 1, column 4: no valid YAML (could not determine a constructor for "
         "the tag 'tag:yaml.org,2002:python/object:os.system'); correct it"),
        ("- 1\n", " holds a list at its top level, but flags need an object; write {...} around them"),
        ("# only this\n", " holds nothing at its top level, but flags need an object; write {...} around them"),
        ("1: 2\n", " has the key 1, but keys are names of flags; correct it"),
        ("a: 1\nb: \x00\n", ", line 2, column 4: no valid YAML (special characters are not allowed); correct it"),
    ],
)  # fmt: skip
def test_yaml(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert message_of(path) == f"{path}{message}"


def test_files_that_are_no_text(tmp_path):
    binary = tmp_path / "run.json"
    binary.write_bytes(b'{"a": "\xff\xfe"}')
    assert message_of(binary) == f"the configuration file {binary} is no UTF-8 text (byte 7); give a JSON or YAML file"
    assert message_of(tmp_path) == f"the configuration file {tmp_path} is a folder; name a file in it"
    assert message_of("a\0") == 'the configuration file "a\\u0000" cannot be a path; correct it'
    gone = tmp_path / "gone.json"
    assert message_of(gone) == f"the configuration file {gone} does not exist; correct the path"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("{}")
    path.chmod(0)
    assert message_of(path) == f"the configuration file {path} cannot be read: Permission denied; correct that"
