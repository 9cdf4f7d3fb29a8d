"""The house keeps its own laws: layout, names, imports, budgets, documents, commits."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.repository import ROOT, commands_in, documents, load_script, modules, tracked_files
from tuning.config.arguments import read_arguments
from tuning.config.catalog import list_flags
from tuning.config.old_names import ALWAYS, REFUSED, RENAMED
from tuning.config.synonyms import SYNONYMS

# module -> why it has no test of its own name
WITHOUT_TEST: dict[str, str] = {}
# flag in a document -> whose it is
FOREIGN_FLAGS = {
    "cpu": "accelerate launch",
    "exclude_editable": "pip freeze",
    "no_deps": "pip install",
    "nproc_per_node": "torchrun",
    "num_processes": "accelerate launch",
    "answer": "a value that begins with dashes",
    "flag": "a word of the syntax",
    "no_flag": "a word of the syntax",
    "strict": "mypy",
}
# who may look at the process's environment, and why
READS_ENVIRONMENT = {
    "tuning/environment.py": "the one place that asks the machine",
    "tuning/relaunch.py": "starts ranks that the launcher left out, before anything else is known",
    "tuning/data/workers.py": "sets one variable in processes of its own",
}
UPSTREAM = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "numpy", "triton")


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- layout ----


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_has_a_test_of_its_name(path):
    inside = path.relative_to(ROOT / "tuning")
    test = ROOT / "tests" / inside.parent / f"test_{inside.name}"
    assert test.is_file() != (name_of(path) in WITHOUT_TEST)


def test_every_room_says_what_it_is():
    for path in (ROOT / "tuning").rglob("__init__.py"):
        assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no docstring"


def test_file_names_are_not_vague():
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base2"}
    assert [name_of(path) for path in modules() if path.stem.strip("_") in vague] == []


def test_files_and_functions_keep_their_budgets():
    sizes = load_script("sizes")
    assert sizes.find_broken(*sizes.measure(ROOT / "tuning")) == []


def test_no_file_is_large():
    # 512 kB: a clone stays small for ever
    assert [name_of(path) for path in tracked_files() if path.stat().st_size > 512 * 1024] == []


# ---- imports ----

PROBE = """
import importlib, logging, os, sys, warnings
for name in {first!r}:
    importlib.import_module(name)
def state():
    torch = sys.modules.get("torch")
    return (
        dict(os.environ), list(warnings.filters), list(logging.getLogger().handlers), logging.getLogger().level,
        torch and (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.cuda.is_initialized()),
    )
before = state()
for name in {modules!r}:
    importlib.import_module(name)
print("same:", state() == before)
print("loaded:", *[name for name in {upstream!r} if name in sys.modules])
"""  # noqa: E501 - a program


def probe(first, names) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(first=first, modules=names, upstream=UPSTREAM)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-2:]


def module_names(*, below="") -> list[str]:
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "tuning" / below).rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


def test_importing_config_loads_nothing_heavy_and_changes_nothing():
    light = ["tuning", "tuning.sft_trainer", *module_names(below="config")]
    # this one hands out the parser of transformers
    light.remove("tuning.config.hf_parser")
    assert probe([], light) == ["same: True", "loaded:"]


def test_importing_everything_changes_nothing():
    names = [name for name in module_names() if name != "tuning.acceleration.fms_bridge"]
    # what upstream does at import is upstream's: it comes first
    first = ["torch", "transformers", "trl", "peft", "accelerate", "datasets", "torch.utils.tensorboard"][:-1]
    same, _ = probe([*first, "trl.trainer.sft_trainer", "triton", "torch.distributed"], names)
    assert same == "same: True"


def test_the_probe_sees_a_change(tmp_path):
    (tmp_path / "rude.py").write_text("import os, numpy\nos.environ['RUDE'] = '1'\n")
    assert probe(["sys"], ["sys"]) == ["same: True", "loaded:"]
    code = PROBE.format(first=[], modules=["rude"], upstream=UPSTREAM)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["same: False", "loaded: numpy"]


def test_fms_acceleration_is_imported_by_the_bridge_alone():
    importers = [
        name_of(path) for path in modules() if re.search(r"^\s*(from|import) fms_acceleration", path.read_text(), re.M)
    ]
    assert [name for name in importers if name != "tuning/acceleration/fms_bridge.py"] == []


# ---- what is never done ----


def forbidden_calls(tree: ast.AST) -> list[str]:
    """Calls that patch by text or swallow what they run."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"exec", "eval", "compile", "__import__"} or called.endswith(
                (".getsource", "importlib.reload")
            ):
                found.append(called)
            if called == "reload":
                found.append(called)
    return found


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_is_patched_by_source_text(path):
    assert forbidden_calls(tree_of(path)) == []


@pytest.mark.parametrize("code", ["exec('1')", "eval(x)", "inspect.getsource(f)", "importlib.reload(m)", "reload(m)"])
def test_forbidden_calls_are_seen(code):
    assert len(forbidden_calls(ast.parse(code))) == 1


def test_the_evaluation_mode_of_a_model_is_no_eval():
    assert forbidden_calls(ast.parse("model.eval()")) == []


def reads_environment(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {"environ", "getenv"} & {a.name for a in node.names}
        )
        for node in ast.walk(tree)
    )


def test_the_environment_is_read_in_few_places():
    readers = [name_of(path) for path in modules() if reads_environment(tree_of(path))]
    assert sorted(readers) == sorted(READS_ENVIRONMENT)


def test_every_variable_is_documented():
    page = (ROOT / "docs" / "env.md").read_text()
    for name in READS_ENVIRONMENT:
        for node in ast.walk(tree_of(ROOT / name)):
            is_name = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_name and re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+|RANK", node.value):
                assert f"`{node.value}`" in page, f"{node.value} of {name} is not in docs/env.md"


# in two pieces, so that this file does not hold what it looks for
MACHINE_WORDS = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/Us" + "ers/", "HOUSE" + ".md", "../sha" + "red",
                 "pypi." + "org", "index-" + "url", "download." + "pytorch"]  # fmt: skip


def test_no_path_of_one_machine_and_no_registry_is_named():
    found = []
    for path in tracked_files():
        if path.suffix in {".py", ".md", ".toml", ".ini", ".txt", ".yaml", ".yml", ".csv", ".jsonl", ""}:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{name_of(path)}: {word}" for word in MACHINE_WORDS if word in text]
    assert found == []


# ---- documents ----


def known_flags() -> set[str]:
    names = {*RENAMED, *ALWAYS, *REFUSED, *FOREIGN_FLAGS, "help", *(item.other for item in SYNONYMS)}
    for name, spec in list_flags().items():
        names |= {name, f"no_{name}", *spec.aliases}
    for path in (ROOT / "scripts").rglob("*.py"):
        names |= {name.replace("-", "_") for name in re.findall(r'add_argument\("--([a-z][\w-]*)"', path.read_text())}
    return names


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_flags_in_documents_exist(path):
    named = {name.replace("-", "_") for name in re.findall(r"(?<![\w<!-])--([a-z][\w-]*)", path.read_text())}
    assert sorted(named - known_flags()) == []


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_commands_in_documents_are_parsed(path):
    flags = list_flags()
    for tokens in commands_in(path.read_text()):
        read_arguments(tokens, flags)


def test_the_readme_shows_commands():
    assert len(commands_in((ROOT / "README.md").read_text())) >= 5


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert missing == []


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []


def test_fragments_of_the_changelog_are_named_right():
    load_script("collect_changes").read_fragments(ROOT / "changelog")


# ---- commits and packaging ----


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git history here")
def test_titles_of_commits_are_conventional():
    check = load_script("check_commit_msg")
    titles, rooms = check.read_history()
    assert titles
    assert [problem for title in titles if (problem := check.check_title(title, rooms))] == []


def requirements(names: list[str]) -> dict[str, str]:
    """Package -> first version in its range."""
    return {re.split(r"[><=]", line)[0]: re.search(r">=([\d.a-z]+)", line)[1] for line in names}


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_lower_bounds_are_what_the_oldest_environment_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = pins("constraints-oldest.txt")
    for package, version in requirements(project["dependencies"]).items():
        assert (oldest[package] + ".").startswith(version + ".") or oldest[package].startswith(version), package


def test_every_dependency_is_pinned_for_the_tests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["demo"],
    ]
    pinned = {name.lower().replace("_", "-") for name in pins("constraints.txt")} | {"triton", "setuptools"}
    assert sorted(requirements(names).keys() - pinned) == []


def test_extras_are_those_of_the_readme():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (ROOT / "README.md").read_text().split("| extra |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.M) == list(project["optional-dependencies"])
