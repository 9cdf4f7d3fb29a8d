"""The flags of our own are frozen in a file: a new one is a conversation."""

from pathlib import Path

from tuning.config.catalog import FieldSpec, list_flags
from tuning.config.values import describe

FROZEN = Path(__file__).with_name("flags.txt")


def line_of(spec: FieldSpec) -> str:
    takes = "options" if "nested" in spec.kind.bases else describe(spec.kind)
    names = " ".join(f"--{name}" for name in (spec.name, *spec.aliases))
    return f"{names}: {takes}; default {spec.default}"


def test_our_flags_are_those_of_the_file():
    """On purpose? Then write the new lines into tests/cli/flags.txt, docs and changelog in the same change."""
    ours = [line_of(spec) for spec in list_flags().values() if spec.owner not in ("trl", "transformers", "plugin")]
    assert ours == FROZEN.read_text().splitlines()
