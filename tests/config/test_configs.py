import dataclasses
import subprocess
import sys

import pytest

from tuning.config.configs import DataArguments


@pytest.mark.parametrize("name", ["response_template", "instruction_template", "data_formatter_template"])
def test_a_template_from_a_shell_has_its_line_breaks(name):
    given = {name: r"\n### Réponse:\t{{a}}\r"}
    assert getattr(DataArguments(**given), name) == "\n### Réponse:\t{{a}}\r"
    twice = dataclasses.replace(DataArguments(**given), max_seq_length=8)
    assert getattr(twice, name) == "\n### Réponse:\t{{a}}\r"


def test_training_arguments_are_resolved_late():
    code = (
        "import sys; from tuning.config import configs; assert 'trl' not in sys.modules; "
        "from tuning.config.configs import TrainingArguments; assert 'trl' in sys.modules; "
        "import dataclasses; assert dataclasses.is_dataclass(TrainingArguments); "
        "from tuning.trainers.arguments import TrainingArguments as same; assert same is TrainingArguments"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_names_are_no_attribute():
    from tuning.config import configs

    with pytest.raises(AttributeError, match=r"^module 'tuning.config.configs' has no attribute 'Gone'$"):
        configs.Gone  # noqa: B018 - the access is the test
