"""README and the tables in the documents say what is there."""

import re

import pytest

from tests import tiny
from tests.config.inputs import launch
from tests.repository import ROOT, load_script, tracked_files
from tuning.acceleration.framework import AccelerationFramework
from tuning.acceleration.patching import applied_patches
from tuning.config.parsing import parse_mapping
from tuning.config.validation import resolve

README = (ROOT / "README.md").read_text(encoding="utf-8")


def tree() -> list[str]:
    """Return the paths that the README's layout shows; folders end with a slash."""
    block = re.search(r"```tree\n(.*?)```", README, re.DOTALL)[1]
    paths, folders = [], []
    for line in block.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        paths.append("".join(folders))
    return paths


def test_the_layout_exists():
    assert len(tree()) > 15
    for path in tree():
        assert (ROOT / path).is_dir() == path.endswith("/"), path
        assert (ROOT / path).exists(), path


def test_the_layout_leaves_nothing_of_the_package_out():
    shown = {path.split("/")[1] for path in tree() if path.startswith("tuning/") and path != "tuning/"}
    on_disk = {
        path.relative_to(ROOT / "tuning").parts[0] for path in tracked_files() if path.is_relative_to(ROOT / "tuning")
    }
    assert on_disk - shown - {"__init__.py", "py.typed"} == set()


def test_the_layout_shows_every_folder_at_the_top():
    shown = {path.split("/")[0] for path in tree()}
    folders = {path.relative_to(ROOT).parts[0] for path in tracked_files() if path.parent != ROOT}
    assert {name for name in folders if not name.startswith(".")} == shown


def test_the_file_in_the_readme_is_a_configuration():
    import json

    (text,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    config = resolve(parse_mapping(json.loads(text)), launch())
    assert config.peft_method == "lora"
    assert config.train["learning_rate"] == 2e-4


def test_the_commands_of_the_makefile_exist():
    makefile = (ROOT / "Makefile").read_text()
    pages = README + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z ]+):", makefile, re.M))
    known = {name for target in targets for name in target.split()}
    named = set(re.findall(r"`?\bmake ([a-z]+)`", pages)) | set(re.findall(r"^make ([a-z]+)$", pages, re.M))
    assert len(named) > 8
    assert named - known == set()


def test_every_environment_of_tox_that_make_names_exists():
    makefile, tox = (ROOT / "Makefile").read_text(), (ROOT / "tox.ini").read_text()
    line = re.search(r"^(lint [a-z ]+):.*\n\t.*tox -e \$@", makefile, re.M)[1]
    assert set(line.split()) == set(re.findall(r"^\[testenv:(\w+)\]", tox, re.M))


def test_ci_runs_what_a_developer_runs():
    run = ROOT / ".ci" / "run"
    assert run.read_text().splitlines()[-1] == "exec make test"
    assert run.stat().st_mode & 0o111


def test_the_plugin_in_the_documents_works(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(), re.DOTALL)
    (tmp_path / "quiet_package.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    framework = AccelerationFramework(
        {"quiet_heads": {"share": 0.5}}, plugins={"quiet_heads": "quiet_package:QuietPlugin"}
    )
    import quiet_package

    plugin = quiet_package.QuietPlugin(quiet_package.QuietConfig(share=0.5))
    assert framework.active == {"quiet_heads"}
    model = tiny.build_model(num_layers=2)
    before = [layer.self_attn.scaling for layer in model.model.layers]
    with applied_patches(model, plugin.patches(model, None)) as applied:
        assert applied.count("quiet_heads.attention") == 2
        assert [layer.self_attn.scaling for layer in model.model.layers] == [value / 2 for value in before]
    assert [layer.self_attn.scaling for layer in model.model.layers] == before


# ---- tables ----


def test_tables_are_those_of_the_results():
    write_tables = load_script("write_tables")
    results = write_tables.read_results()
    for path in write_tables.find_documents():
        text = path.read_text(encoding="utf-8")
        assert write_tables.fill(text, results) == text, f"{path.name}: run python scripts/write_tables.py"


def row(case, metric, value, unit="x", *, bench="norm", hardware="card", commit="abc"):
    return {
        "bench": bench, "case": case, "metric": metric, "value": value, "unit": unit, "hardware": hardware,
        "date": "2026-12-01", "commit": commit, "torch": "2.13", "triton": "", "trl": "1.16",
    }  # fmt: skip


def test_a_table_holds_the_newest_figure_of_each_case():
    results = [
        row("a", "speed", "1234.5", "tokens/s"),
        row("a", "ratio", "1.0"),
        row("b", "ratio", "2.0", commit="old"),
        row("b", "ratio", "3.25", commit="new"),
        row("b", "memory", "1", "GiB"),
        row("c", "ratio", "9", bench="other"),
    ]
    assert load_script("write_tables").render(results, "bench=norm metrics=speed,ratio") == (
        "| case | speed | ratio |\n"
        "|---|---|---|\n"
        "| a | 1,234 tokens/s | 1x |\n"
        "| b |  | 3.25x |\n"
        "\n"
        "<sub>card; torch 2.13, trl 1.16; 2026-12-01; commit abc, new</sub>\n"
    )


def test_cases_and_hardware_can_be_chosen():
    render = load_script("write_tables").render
    results = [row("a 1", "ratio", "1"), row("a 2", "ratio", "2"), row("a 1", "ratio", "5", hardware="other")]
    assert "| a 2 |" not in render(results, "bench=norm metrics=ratio cases=1$")
    assert "5x" not in render(results, "bench=norm metrics=ratio hardware=^card")
    assert render(results, "bench=norm metrics=ratio").count("<sub>") == 2


def test_what_was_not_measured_says_how_to():
    assert load_script("write_tables").render([], "bench=norm metrics=ratio") == (
        "Not measured yet: `python scripts/bench/norm.py --csv scripts/bench/results.csv`.\n"
    )


def test_a_table_that_asks_for_nothing_is_an_error():
    with pytest.raises(ValueError, match="needs bench") as error:
        load_script("write_tables").render([], "bench=norm")
    assert str(error.value) == (
        "<!-- table bench=norm --> needs bench= and metrics=, and may have cases= and hardware="
    )


def test_only_what_is_between_the_comments_changes():
    text = "before\n<!-- table bench=norm metrics=ratio -->\nstale\n<!-- end of table -->\nafter\n"
    filled = load_script("write_tables").fill(text, [row("a", "ratio", "2")])
    assert "stale" not in filled
    assert filled.startswith("before\n<!-- table bench=norm metrics=ratio -->\n| case | ratio |")
    assert filled.endswith("<!-- end of table -->\nafter\n")
    assert load_script("write_tables").fill(filled, [row("a", "ratio", "2")]) == filled


def test_tables_name_benches_that_exist():
    write_tables = load_script("write_tables")
    for path in write_tables.find_documents():
        for bench in re.findall(r"<!-- table bench=(\w+)", path.read_text(encoding="utf-8")):
            assert (ROOT / "scripts" / "bench" / f"{bench}.py").is_file(), bench
