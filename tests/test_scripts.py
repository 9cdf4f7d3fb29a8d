"""The scripts that keep the repository: sizes, commit titles, changelog, demo, and the wheel."""

import datetime
import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests import tiny
from tests.repository import ROOT, load_script
from tuning import __version__

# ---- sizes ----


def test_a_long_function_is_seen_and_a_triton_body_is_not(tmp_path):
    body = "\n".join(f"    x = {i}" for i in range(80))
    (tmp_path / "long.py").write_text(f"def f():\n{body}\n\n\n@triton.jit\ndef kernel():\n{body}\n")
    sizes = load_script("sizes")
    files, functions = sizes.measure(tmp_path, root=tmp_path)
    assert [(size.name, size.lines, size.budget) for size in functions] == [
        ("long.py:f", 81, 80), ("long.py:kernel", 81, None),
    ]  # fmt: skip
    assert sizes.find_broken(files, functions)[0] == "long.py:f has 81 lines and may have 80; split it"


@pytest.mark.parametrize(("folder", "budget"), [("data", 400), ("kernels", 500)])
def test_a_long_file_is_seen(tmp_path, folder, budget):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.py").write_text("\n" * (budget + 1))
    (tmp_path / "small.py").write_text("")
    (tmp_path / "smaller.py").write_text("")
    sizes = load_script("sizes")
    assert sizes.find_broken(*sizes.measure(tmp_path, root=tmp_path)) == [
        f"{folder}/a.py has {budget + 1} lines and may have {budget}; split it"
    ]


def test_many_longish_files_and_functions_are_seen(tmp_path):
    for name in "abc":
        text = "def f():\n" + "    pass\n" * 60
        (tmp_path / f"{name}.py").write_text(text + "\n" * 200)
    sizes = load_script("sizes")
    assert sizes.find_broken(*sizes.measure(tmp_path, root=tmp_path)) == [
        "the median file has 261 lines and may have 200",
        "one function in twenty has more than 61 lines; 50 is the most",
    ]


def test_sizes_are_printed(capsys):
    assert load_script("sizes").main([]) == 0
    out = capsys.readouterr().out
    assert "files: " in out
    assert "lines in all: " in out


# ---- commit titles ----

ROOMS = frozenset({"data", "multipack"})


@pytest.mark.parametrize(
    "title",
    ["feat(data): a sentence", "fix: without a room", "perf(multipack)!: it breaks something", "Merge branch 'x'",
     "test(data): one; feat(data): two"],
)  # fmt: skip
def test_titles_that_are_right(title):
    assert load_script("check_commit_msg").check_title(title, ROOMS) is None


@pytest.mark.parametrize(
    ("title", "problem"),
    [
        ("Update files", "'Update files' is no 'type(room): sentence'; such as 'fix(data): a BOM is no part of the "
         "first key'"),
        ("feat(data):none", "'feat(data):none' is no 'type(room): sentence'; such as 'fix(data): a BOM is no part of "
         "the first key'"),
        ("new(data): x", "'new(data): x': new is no type; use one of build, chore, ci, docs, feat, fix, perf, "
         "refactor, revert, style, test"),
        ("fix(kitchen): x", "'fix(kitchen): x': kitchen is no room; name a folder or file of the repository"),
        ("fix(data): x.", "'fix(data): x.' ends with a full stop; a title has none"),
    ],
)  # fmt: skip
def test_titles_that_are_wrong(title, problem):
    assert load_script("check_commit_msg").check_title(title, ROOMS) == problem


def test_rooms_are_folders_and_files():
    rooms = load_script("check_commit_msg").find_rooms(["tuning/data/packing.py", ".ci/run", "README.md"])
    assert {"tuning", "data", "packing", "ci", "run", "readme", "deps"} <= rooms


@pytest.mark.parametrize(
    ("message", "paths", "is_right"),
    [
        ("feat(data): x", ["tuning/data/a.py"], False),
        ("feat(data): x", ["tuning/data/a.py", "changelog/a.feature.md"], True),
        ("feat(data): x\n\nChangelog: none", ["tuning/data/a.py"], True),
        ("refactor(data): x", ["tuning/data/a.py"], True),
        ("fix(demo): x", ["scripts/demo.py"], True),
    ],
)
def test_a_change_that_users_get_needs_a_fragment(message, paths, is_right):
    problem = load_script("check_commit_msg").check_fragment(message, paths)
    assert problem == (
        None if is_right else
        "this commit changes what users get but adds no changelog fragment; write one sentence into "
        "changelog/<topic>.<kind>.md, or put a line 'Changelog: none' into the message"
    )  # fmt: skip


def test_the_hook_reads_a_message_without_its_comments(tmp_path, capsys, monkeypatch):
    check = load_script("check_commit_msg")
    monkeypatch.setattr(check, "_git", lambda *argv: ["tuning/data/a.py"])
    path = tmp_path / "message"
    path.write_text("# Please enter the commit message\ndocs(data): a page\n\n# Changes\n")
    assert check.main([str(path)]) == 0
    path.write_text("docs(nowhere): a page\n")
    assert check.main([str(path)]) == 1
    assert capsys.readouterr().err == (
        "'docs(nowhere): a page': nowhere is no room; name a folder or file of the repository\n"
    )


# ---- changelog ----


@pytest.fixture
def changes(tmp_path):
    (tmp_path / "changelog").mkdir()
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nIntroduction.\n\n## 0.0.1 (2026-01-01)\n\n- first\n")
    (tmp_path / "changelog" / "README.md").write_text("how")
    (tmp_path / "changelog" / "rope.fix.md").write_text("Positions are\nread.\n")
    (tmp_path / "changelog" / "demo.feature.md").write_text("A demo.\n")
    return tmp_path


def test_fragments_become_the_newest_version(changes):
    assert load_script("collect_changes").main(["0.2.0", "--root", str(changes)]) == 0
    today = datetime.datetime.now(tz=datetime.UTC).date()
    assert (changes / "CHANGELOG.md").read_text() == (
        f"# Changelog\n\nIntroduction.\n\n## 0.2.0 ({today})\n\n### Added\n\n- A demo.\n\n### Fixed\n\n"
        "- Positions are read.\n\n## 0.0.1 (2026-01-01)\n\n- first\n"
    )
    assert [path.name for path in (changes / "changelog").iterdir()] == ["README.md"]


def test_a_draft_changes_nothing(changes, capsys):
    before = (changes / "CHANGELOG.md").read_text()
    assert load_script("collect_changes").main(["0.2.0", "--draft", "--root", str(changes)]) == 0
    assert "### Fixed\n\n- Positions are read." in capsys.readouterr().out
    assert (changes / "CHANGELOG.md").read_text() == before
    assert len(list((changes / "changelog").iterdir())) == 3


def test_a_first_version_goes_to_the_end():
    assert load_script("collect_changes").insert("# Changelog\n", "## 0.1.0\n\n- x\n\n") == (
        "# Changelog\n\n## 0.1.0\n\n- x\n"
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("rope.bug.md", "x", "rope.bug.md is no fragment; name it <topic>.<kind>.md, kind one of feature, perf, fix, "
         "removal, doc"),
        ("notes.txt", "x", "notes.txt is no fragment; name it <topic>.<kind>.md, kind one of feature, perf, fix, "
         "removal, doc"),
        ("a.fix.md", " \n", "a.fix.md is empty; write what users get in one sentence"),
    ],
)  # fmt: skip
def test_a_fragment_that_is_none(changes, capsys, name, text, problem):
    (changes / "changelog" / name).write_text(text)
    assert load_script("collect_changes").main(["0.2.0", "--root", str(changes)]) == 1
    assert capsys.readouterr().err == problem + "\n"


def test_nothing_to_release(tmp_path, capsys):
    (tmp_path / "changelog").mkdir()
    assert load_script("collect_changes").main(["0.2.0", "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "changelog/ holds no fragment, so there is nothing to release\n"


# ---- demo ----


def test_the_rows_are_those_of_their_script():
    for name, rows in zip(("train", "held_out"), load_script("write_demo_rows").build_rows(), strict=True):
        lines = (ROOT / "demo" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows


def test_no_row_is_there_twice():
    train, held_out = load_script("write_demo_rows").build_rows()
    assert (len(train), len(held_out)) == (280, 40)
    assert len({row["input"] for row in (*train, *held_out)}) == 320


def test_sums_in_the_rows_are_right():
    train, _ = load_script("write_demo_rows").build_rows()
    bills = [row["output"] for row in train if "The bill is" in row["output"]]
    assert len(bills) > 20
    for bill in bills:
        product, total = bill.split("; ")
        assert eval(product.split(" = ")[0].replace("x", "*")) == int(product.split(" = ")[1])  # noqa: S307 - our own text
        parts, result = total.split(". ")[0].split(" = ")
        assert sum(map(int, parts.split(" + "))) == int(result)


def test_slots_are_those_of_padded_batches():
    assert load_script("demo").count_slots([3, 5, 2, 7, 4], 2) == 2 * 5 + 2 * 7 + 4


def test_a_missing_model_is_told(monkeypatch):
    demo = load_script("demo")
    monkeypatch.setattr(demo, "MODEL_PACKAGE", "packtune-no-such-package")
    with pytest.raises(SystemExit) as ended:
        demo.find_model()
    assert ended.value.code == (
        "the demo's model comes with the package packtune-no-such-package, which is not installed; run `make demo`"
    )


@pytest.mark.slow
def test_the_demo_runs_on_a_small_model(tmp_path):
    model, out = tiny.save(tmp_path / "model"), tmp_path / "out"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", "--model", model, "--output_dir", out],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line and not line.startswith(" "))
    before, _, after, *_ = shown["loss on held-out rows"].split()
    assert float(after) < float(before)
    assert shown["padding saved"].strip().endswith("%)")
    assert shown["checkpoint"].strip() == str(out)
    assert (out / "model.safetensors").is_file()


# ---- the package ----


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_installs(tmp_path):
    # a copy: a build leaves folders beside its source, whose files would be in the next wheel
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tuning", source / "tuning", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("packtune-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        texts = [archive.read(name).decode() for name in names if name.endswith(("METADATA", "entry_points.txt"))]
    folders = {name.split("/")[0] for name in names}
    assert folders == {"tuning", f"packtune-{__version__}.dist-info"}
    assert "tuning/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    on_disk = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tuning").rglob("*.py")}
    assert on_disk <= set(names)
    assert any("packtune = tuning.sft_trainer:main" in text for text in texts)
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel], check=True
    )
    done = subprocess.run(
        [sys.executable, target / "bin" / "packtune", "--max_step", "3"],
        env={**os.environ, "PYTHONPATH": str(target)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "did you mean" in done.stderr
