"""Help and argument errors come at once, and nothing heavy is imported for them."""

import pytest

from tests.cli.commands import run
from tests.config.inputs import argv_of, valid_flags

HEAVY = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "yaml")
IMPORTED = f"""
import sys
from tuning.sft_trainer import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print("imported:", *[name for name in {HEAVY} if name in sys.modules])
sys.exit(code)
"""


def imported(argv) -> tuple[int, list[str]]:
    ended = run(argv, code=IMPORTED)
    return ended.code, ended.out.splitlines()[-1].split()[1:]


def test_help_imports_nothing_heavy():
    assert imported(["--help"]) == (0, [])


def test_a_parse_error_imports_nothing_heavy():
    assert imported(["--max_step", "3"]) == (1, [])


def test_a_broken_rule_imports_nothing_heavy(tmp_path):
    assert imported([*argv_of(valid_flags(tmp_path)), "--multipack", "16"]) == (1, [])


def test_the_probe_sees_what_is_imported(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("max_step: 3\n")
    assert imported([path]) == (1, ["yaml"])


@pytest.mark.parametrize(
    ("argv", "code", "limit"),
    [
        (["--help"], 0, 1.5),
        (["--max_step", "3"], 1, 2.0),
        (["--learning_rate", "x", "--multipack", "mode=y"], 1, 2.0),
        (["--model_name_or_path", "a/b", "--training_data_path", "a/b", "--output_dir", "out", "--multipack"], 1, 2.0),
    ],
)  # fmt: skip
def test_seconds(argv, code, limit):
    # the better of two: another process may hold the machine
    ended = min((run(argv) for _ in range(2)), key=lambda item: item.seconds)
    assert ended.code == code
    assert ended.seconds < limit


def test_help_goes_to_stdout_and_holds_every_flag():
    from tuning.config.catalog import list_flags

    ended = run(["--help"])
    assert ended.err == ""
    assert [name for name in list_flags() if f"--{name}" not in ended.out] == []


def test_a_read_only_home_does_no_harm(tmp_path):
    assert run(["--help"], HOME=str(tmp_path / "gone"), XDG_CACHE_HOME=str(tmp_path / "gone")).code == 0
    assert not (tmp_path / "gone").exists()
