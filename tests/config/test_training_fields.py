import dataclasses
import typing

import pytest

from tuning.config import training_fields
from tuning.config.training_fields import CHAIN, read_training_fields
from tuning.config.values import UNSET, Kind, kind_of_hint
from tuning.errors import UnsupportedError


@pytest.fixture(scope="module")
def real():
    """The real fields: name to (kind, default, help), from the imported class."""
    from tuning.config.configs import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    result = {}
    for item in dataclasses.fields(TrainingArguments):
        if not item.init:
            continue
        choices = item.metadata.get("choices")
        kind = kind_of_hint(hints[item.name], None if choices is None else tuple(choices))
        if item.metadata.get("const") is True:
            kind = dataclasses.replace(kind, bases=tuple(sorted({*kind.bases, "bool"})))
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        result[item.name] = (kind, default, item.metadata.get("help", "").replace("%%", "%"))
    return result


def test_source_and_class_agree_on_every_field(real):
    found = {item.name: (item.kind, item.default, item.help) for item in read_training_fields()}
    assert found == real
    assert len(found) > 120


def test_a_wrong_reading_is_noticed(real, monkeypatch):
    monkeypatch.setattr(training_fields, "_keys", lambda node, module: None)
    found = {item.name: item.kind for item in read_training_fields()}
    assert {name for name, kind in found.items() if kind != real[name][0]} == {"log_level", "log_level_replica"}


def test_owner_is_the_most_derived_package():
    owners = {item.name: item.owner for item in read_training_fields()}
    assert owners["max_steps"] == "transformers"
    assert owners["learning_rate"] == "trl"
    assert owners["max_length"] == "tuning"


def test_fields_that_are_no_flag_are_left_out():
    names = {item.name for item in read_training_fields()}
    assert "padding_free" not in names
    assert "dataset_text_field" not in names


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one's own in place of all four; returns a function that writes its files."""
    monkeypatch.setattr(training_fields, "CHAIN", (("pkg", "args.py", "Args"),))
    monkeypatch.setattr(training_fields, "_package_root", lambda name: tmp_path)

    def write(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return {item.name: item for item in read_training_fields()}

    return write


def test_what_the_source_does_not_tell_is_left_open(package):
    fields = package(
        args="class Args:\n"
        "    a: int = field(default=compute(), metadata={'help': compute()})\n"
        "    b: Strange = field(default=None, metadata={'choices': compute()})\n"
        "    c: list[str] = field(default_factory=make)\n"
    )
    assert (fields["a"].kind, fields["a"].default, fields["a"].help) == (Kind(bases=("int",)), UNSET, "")
    assert fields["b"].kind == Kind(bases=("other",))
    assert fields["c"].default is UNSET


def test_names_strings_and_enums_are_followed(package):
    fields = package(
        args="from .colors import Color\n"
        "from typing import Optional, Union\n"
        "LIMIT = -3\n"
        "TEXT = f'at most {LIMIT}' + ', or less'\n"
        "class Args:\n"
        "    first = 'x'\n"
        "    if newer():\n"
        "        first = 'y'\n"
        "    a: int = field(default=LIMIT, metadata={'help': TEXT})\n"
        "    b: str = first\n"
        "    c: Optional[Color] = None\n"
        "    d: Union[float, None] = field(default=0.5)\n"
        "    e: float = field(default=1.0, init=False)\n",
        colors="class Color(ExplicitEnum):\n    '''Doc.'''\n    RED = 'red'\n    BLUE = 'blue'\n",
    )
    assert (fields["a"].default, fields["a"].help) == (-3, "at most -3, or less")
    assert fields["b"].default == "y"
    assert fields["c"].kind == Kind(bases=("str",), optional=True, choices=("red", "blue"))
    assert fields["d"].kind == Kind(bases=("float",), optional=True)
    assert "e" not in fields


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(training_fields, "CHAIN", (("no_such_package", "x.py", "X"),))
    with pytest.raises(UnsupportedError) as error:
        read_training_fields()
    assert str(error.value) == "packtune needs no_such_package, which is not installed; pip install no_such_package"


@pytest.mark.parametrize(
    ("path", "name", "what"),
    [
        ("training_args.py", "Gone", "training_args.py declares no class Gone as it did"),
        ("gone.py", "X", "gone.py: [Errno 2] No such file or directory: "),
    ],
)
def test_an_unknown_layout_is_refused_by_version(monkeypatch, path, name, what):
    monkeypatch.setattr(training_fields, "CHAIN", (("transformers", path, name),))
    with pytest.raises(UnsupportedError) as error:
        read_training_fields()
    text = str(error.value)
    assert text.startswith("the training arguments of the installed transformers ")
    assert f" cannot be read ({what}" in text
    assert text.endswith("); install the versions that constraints.txt lists")


def test_another_base_class_is_refused(monkeypatch):
    chain = (CHAIN[0], ("trl", "trainer/sft_config.py", "SFTConfig"), ("trl", "trainer/base_config.py", "Other"))
    monkeypatch.setattr(training_fields, "CHAIN", chain)
    with pytest.raises(UnsupportedError, match=r"declares no class Other as it did"):
        read_training_fields()
