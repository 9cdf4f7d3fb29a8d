"""The framework: which plugins a run has, what it refuses and in which words, and what it seats."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.acceleration.test_plugin import facts
from tuning.acceleration.framework import (
    ENTRY_POINT_GROUP,
    AccelerationFramework,
    all_plugins,
    render_table,
    third_party_plugins,
)
from tuning.acceleration.patching import Applied
from tuning.acceleration.plugin import AccelerationPlugin, Patch
from tuning.acceleration.plugins import BUILTIN
from tuning.errors import ConfigError, ModelError, PluginError, UnsupportedError

HERE = "tests.acceleration.test_framework"


@dataclasses.dataclass(frozen=True)
class Options:
    size: int = 4
    rate: float = 0.5
    quick: bool = False
    mode: str = dataclasses.field(default="exact", metadata={"choices": ["exact", "rough"]})


class _Fake(AccelerationPlugin[Options]):
    config_type = Options


class Alpha(_Fake):
    name = "alpha"

    def patches(self, model, facts):
        @contextmanager
        def doubled(module):
            own = module.forward
            module.forward = lambda x: own(x) * 2
            try:
                yield
            finally:
                del module.__dict__["forward"]

        return [Patch(name="alpha.double", target=name, apply=doubled) for name in ("0", "1")]

    def collator(self, inner, facts):
        return lambda samples: ["alpha", *inner(samples)]

    def batch_sampler(self, lengths, facts):
        return [[index] for index in range(len(lengths))]

    def loss(self, facts):
        return None

    def callbacks(self):
        return ["alpha callback"]

    def check(self, facts):
        raise UnsupportedError("alpha cannot do this")


class Beta(_Fake):
    name = "beta"
    requires = frozenset({"alpha"})
    stable = False

    def collator(self, inner, facts):
        return lambda samples: ["beta", *inner(samples)]

    def batch_sampler(self, lengths, facts):
        return [[0]]

    def load_model(self, facts):
        return "beta's model"

    def loss(self, facts):
        return "beta's loss"

    def check(self, facts):
        raise ConfigError(["beta says no", "and no again"])


class Gamma(_Fake):
    name = "gamma"
    conflicts = frozenset({"alpha"})

    def load_model(self, facts):
        pytest.fail("a model was loaded although two plugins load it")

    def loss(self, facts):
        return "gamma's loss"


class Delta(_Fake):
    """Conflicts with gamma, which does not know it; patches nothing."""

    name = "delta"
    conflicts = frozenset({"gamma"})

    def patches(self, model, facts):
        return []


class Auto(Delta):
    name = "auto"

    def may_do_nothing(self):
        return True


class NeedsPackages(_Fake):
    name = "needs"
    packages = ("torch", "no-such-package", "nor-this-one")


class Wrong(_Fake):
    name = "wrong"

    def check(self, facts):
        raise ValueError("a bug of the plugin's")


class NoPlugin:
    name = "noplugin"


PLUGINS = {
    name: f"{HERE}:{cls}"
    for name, cls in {
        "alpha": "Alpha",
        "beta": "Beta",
        "gamma": "Gamma",
        "delta": "Delta",
        "auto": "Auto",
        "needs": "NeedsPackages",
        "wrong": "Wrong",
        "noplugin": "NoPlugin",
        "absent": "Absent",
        "misnamed": "Alpha",
        "gone": "NoSuchClass",
    }.items()
} | {"unimportable": "tests.acceleration.no_such_module:Plugin"}


def build(*names: str, **values) -> AccelerationFramework:
    flags = {**dict.fromkeys(names, Options()), **values}
    return AccelerationFramework(flags, plugins=PLUGINS)


def refusal(*names: str, **values) -> str:
    with pytest.raises((ConfigError, PluginError)) as caught:
        build(*names, **values)
    return str(caught.value)


# ---- choosing ----


def test_no_flag_no_plugin():
    framework = build()
    assert framework.plugins == ()
    assert framework.active == frozenset()
    seats = framework.seats([1, 2], "inner", facts())
    assert (seats.collator, seats.batch_sampler, seats.loss, seats.callbacks) == ("inner", None, None, ())
    assert framework.load_model(facts()) is None
    model = nn.Linear(1, 1)
    before = dict(model.__dict__)
    with framework.patched(model, facts()) as applied:
        assert applied.targets == {}
        assert model.__dict__ == before


def test_order_is_that_of_the_table_not_of_the_flags():
    assert [plugin.name for plugin in build("beta", "alpha").plugins] == ["alpha", "beta"]
    assert build("beta", "alpha").active == {"alpha", "beta"}


def test_unknown_flags():
    assert refusal("epsilon", "alpha", "zeta") == (
        "--epsilon was asked for, but no plugin of that name is installed; drop the flag\n"
        "--zeta was asked for, but no plugin of that name is installed; drop the flag"
    )


def test_a_missing_requirement_names_both_flags():
    assert refusal("beta") == "--beta needs --alpha, which is off; add --alpha or drop --beta"


def test_a_conflict_is_told_once_whoever_knows_of_it():
    assert refusal("gamma", "alpha") == "--alpha and --gamma cannot be used together; keep one"
    assert refusal("gamma", "delta") == "--delta and --gamma cannot be used together; keep one"


def test_broken_combinations_are_collected():
    assert refusal("beta", "gamma", "delta") == (
        "--beta needs --alpha, which is off; add --alpha or drop --beta\n"
        "--delta and --gamma cannot be used together; keep one"
    )


def test_missing_packages():
    assert refusal("needs") == (
        "--needs was asked for, but it needs no-such-package, nor-this-one, not installed; "
        "pip install no-such-package nor-this-one"
    )


def test_a_plugin_that_cannot_be_imported_is_named():
    assert refusal("unimportable") == (
        "--unimportable was asked for, but its plugin tests.acceleration.no_such_module:Plugin cannot be imported "
        "(No module named 'tests.acceleration.no_such_module'); install what it needs or drop the flag"
    )
    assert refusal("gone") == (
        f"--gone was asked for, but its plugin {HERE}:NoSuchClass cannot be imported (module '{HERE}' has no attribute "
        "'NoSuchClass'); install what it needs or drop the flag"
    )


def test_a_plugin_that_raises_anything_at_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "exploding_plugin.py").write_text("raise RuntimeError('wrong compiler')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError) as caught:
        AccelerationFramework({"boom": Options()}, plugins={"boom": "exploding_plugin:Boom"})
    assert str(caught.value) == (
        "--boom was asked for, but its plugin exploding_plugin:Boom cannot be imported (wrong compiler); install what "
        "it needs or drop the flag"
    )


def test_a_plugin_that_cannot_be_imported_takes_nothing_else_down():
    assert build("alpha").active == {"alpha"}  # with the broken ones in the table


def test_what_is_no_plugin():
    assert refusal("noplugin") == (
        f"--noplugin was asked for, but {HERE}:NoPlugin is no AccelerationPlugin; report this to its authors"
    )
    assert refusal("misnamed") == (
        f"--misnamed was asked for, but its plugin {HERE}:Alpha calls itself alpha; report this to its authors"
    )


def test_experimental_plugins_say_so(caplog):
    with caplog.at_level(logging.INFO, logger="tuning"):
        build("alpha", "beta")
    assert caplog.messages == ["--beta is experimental: its options and results may change between versions"]


def test_builtin_flags_are_not_imported_before_they_are_asked_for():
    code = (
        "import sys; from tuning.acceleration.framework import AccelerationFramework;"
        "from tuning.acceleration.plugins import BUILTIN; AccelerationFramework({}, plugins=BUILTIN);"
        "print([m for m in sys.modules if m.startswith('tuning.acceleration.plugins.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert all(":" in where for where in BUILTIN.values())


# ---- third parties ----


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
    """Install a distribution that registers two plugins, one of which cannot be imported."""
    info = tmp_path / "thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\nthird = thirdparty_plugin:Third\nbroken = thirdparty_broken:Broken\n"
    )
    (tmp_path / "thirdparty_plugin.py").write_text(
        "from dataclasses import dataclass\n"
        "from tuning.acceleration.plugin import AccelerationPlugin\n"
        "@dataclass\nclass Config:\n    depth: int = 1\n    share: float = 0.0\n    wide: bool = False\n"
        "class Third(AccelerationPlugin[Config]):\n    name = 'third'\n    config_type = Config\n"
    )
    (tmp_path / "thirdparty_broken.py").write_text("import no_such_package_of_theirs\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("thirdparty_plugin", None)


def test_third_parties_come_by_entry_point_and_are_not_imported(entry_point):
    found = third_party_plugins()
    assert found["third"] == "thirdparty_plugin:Third"
    assert found["broken"] == "thirdparty_broken:Broken"
    assert "thirdparty_plugin" not in sys.modules


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([], (1, 0.0, False)),
        (["3"], (3, 0.0, False)),
        ("3", (3, 0.0, False)),
        (["share=1e-1", "depth=2"], (2, 0.1, False)),
        (["2", "0.25", "true"], (2, 0.25, True)),
        ({"wide": "false", "depth": 5}, (5, 0.0, False)),
    ],
)
def test_raw_values_of_a_third_party_flag_become_its_typed_config(entry_point, raw, expected):
    framework = AccelerationFramework({"third": raw}, plugins={**BUILTIN, **third_party_plugins()})
    config = framework.plugins[0].config
    got = (config.depth, config.share, config.wide)
    assert got == expected
    assert [type(value) for value in got] == [int, float, bool]


def test_wrong_values_of_a_third_party_flag(entry_point):
    with pytest.raises(ConfigError) as caught:
        AccelerationFramework({"third": ["depht=2", "share=much"]}, plugins=third_party_plugins())
    assert caught.value.problems == (
        "--third has no option depht; did you mean depth?",
        '--third was given share "much", but it takes a number; correct the value',
    )


def test_a_broken_third_party_names_itself_and_leaves_the_others(entry_point):
    plugins = {**PLUGINS, **third_party_plugins()}
    assert AccelerationFramework({"third": [], "alpha": Options()}, plugins=plugins).active == {"third", "alpha"}
    with pytest.raises(PluginError) as caught:
        AccelerationFramework({"broken": []}, plugins=plugins)
    assert str(caught.value) == (
        "--broken was asked for, but its plugin thirdparty_broken:Broken cannot be imported (No module named "
        "'no_such_package_of_theirs'); install what it needs or drop the flag"
    )


def test_a_config_object_passes_through_as_it_is():
    config = Options(size=9)
    assert build(alpha=config).plugins[0].config is config


# ---- checking ----


def test_checks_of_all_plugins_are_collected():
    framework = AccelerationFramework(
        {"alpha": Options(), "beta": Options()},
        plugins={"alpha": PLUGINS["alpha"], "beta": PLUGINS["beta"]},
    )
    with pytest.raises(ConfigError) as caught:
        framework.check(facts())
    assert caught.value.problems == (
        "--alpha and --beta both replace the batch_sampler; keep one",
        "alpha cannot do this",
        "beta says no",
        "and no again",
    )


def test_a_fault_of_a_plugin_is_not_told_as_the_users_mistake():
    with pytest.raises(ValueError, match="a bug of the plugin's") as caught:
        build("wrong").check(facts())
    assert type(caught.value) is ValueError


def test_check_model_stops_at_the_first_refusal():
    class Picky(_Fake):
        name = "picky"

        def check_model(self, model, facts):
            raise ModelError(f"{type(model).__name__} will not do")

    framework = build()
    framework.plugins = (Picky(Options()),)
    with pytest.raises(ModelError, match=r"^Linear will not do$"):
        framework.check_model(nn.Linear(1, 1), facts())


# ---- seats ----


def test_collators_wrap_in_table_order():
    framework = build("alpha", "beta")
    framework._takers_all = lambda seat: []  # their samplers collide, which is another test
    assert framework.seats([1], lambda samples: ["inner"], facts()).collator([]) == ["beta", "alpha", "inner"]


def test_two_takers_of_the_sampler():
    with pytest.raises(ConfigError) as caught:
        build("alpha", "beta").seats([1, 2], "inner", facts())
    assert str(caught.value) == "--alpha and --beta both replace the batch_sampler; keep one"


def test_two_takers_of_the_loader_load_nothing():
    framework = AccelerationFramework(
        {"beta": Options(), "gamma": Options()},
        plugins={"beta": f"{HERE}:Loader", "gamma": PLUGINS["gamma"]},
    )
    with pytest.raises(ConfigError) as caught:
        framework.load_model(facts())
    assert str(caught.value) == "--beta and --gamma both replace the load_model; keep one"


class Loader(_Fake):
    name = "beta"

    def load_model(self, facts):
        return "a model"

    def loss(self, facts):
        return "beta's loss"


def test_two_takers_of_the_loss():
    framework = AccelerationFramework(
        {"beta": Options(), "gamma": Options()},
        plugins={"beta": f"{HERE}:Loader", "gamma": PLUGINS["gamma"]},
    )
    with pytest.raises(ConfigError) as caught:
        framework.seats([1], "inner", facts())
    assert str(caught.value) == "--beta and --gamma both replace the loss; keep one"


def test_a_loss_may_be_declined():
    seats = AccelerationFramework(
        {"alpha": Options(), "gamma": Options()},
        plugins={"alpha": PLUGINS["alpha"], "gamma": f"{HERE}:GammaAlone"},
    ).seats([7, 8], lambda samples: [], facts())
    assert seats.loss == "gamma's loss"
    assert seats.batch_sampler == [[0], [1]]
    assert seats.callbacks == ("alpha callback",)


class GammaAlone(Gamma):
    conflicts = frozenset()


def test_one_loader_is_used():
    assert (
        AccelerationFramework({"beta": Options()}, plugins={"beta": f"{HERE}:Loader"}).load_model(facts()) == "a model"
    )


# ---- patching ----


def build_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))


def test_patched_undoes_and_patches_again_bit_for_bit(caplog):
    model, x = build_model(), torch.tensor([[1.0, -2.0]])
    framework = build("alpha", "auto")
    plain = model(x)
    outputs = []
    for _ in range(2):
        with caplog.at_level(logging.INFO, logger="tuning"), framework.patched(model, facts()) as applied:
            assert applied.count("alpha.double") == 2
            outputs.append(model(x))
        assert torch.equal(model(x), plain)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], plain)
    assert caplog.messages == ["patched for this run:\npatch         modules  first\nalpha.double  2        0    "] * 2


def test_patched_undoes_when_training_raises():
    model, x = build_model(), torch.tensor([[1.0, -2.0]])
    plain = model(x)
    with pytest.raises(KeyError), build("alpha").patched(model, facts()):
        raise KeyError
    assert torch.equal(model(x), plain)


def test_asked_for_but_nothing_to_patch():
    model = build_model()
    with pytest.raises(PluginError) as caught, build("alpha", "delta").patched(model, facts()):
        pytest.fail("the body must not run")
    assert str(caught.value) == (
        "--delta was asked for, but nothing in Sequential could be patched; drop the flag or use a model it knows"
    )
    assert "forward" not in model[0].__dict__


def test_nothing_to_patch_is_fine_where_the_plugin_says_so_or_patches_nothing_by_nature():
    with build("auto").patched(build_model(), facts()) as applied:
        assert applied.targets == {}
    with AccelerationFramework({"beta": Options()}, plugins={"beta": f"{HERE}:Loader"}).patched(
        build_model(), facts()
    ) as applied:
        assert applied.targets == {}


def test_table():
    applied = Applied(targets={"fast.norm": ("layers.0.norm", "layers.1.norm"), "attention": ("",)})
    lines = [line.rstrip() for line in render_table(applied).splitlines()]
    assert lines == [
        "patch      modules  first",
        "fast.norm  2        layers.0.norm",
        "attention  1        (model)",
    ]


def test_self_test_reaches_every_plugin():
    seen = []

    class Tester(_Fake):
        name = "tester"

        def self_test(self, model, batch):
            seen.append((type(model).__name__, batch))

    framework = build()
    framework.plugins = (Tester(Options()), Tester(Options()))
    framework.self_test(nn.Linear(1, 1), {"input_ids": 1})
    assert seen == [("Linear", {"input_ids": 1})] * 2


def test_two_frameworks_share_nothing():
    first, second = build("alpha"), build("auto")
    assert (first.active, second.active) == ({"alpha"}, {"auto"})


def test_an_installed_plugin_may_not_take_a_built_in_flag(monkeypatch):
    monkeypatch.setattr("tuning.acceleration.framework.third_party_plugins", lambda: {"padding_free": "other:Plugin"})
    with pytest.raises(ConfigError) as error:
        all_plugins({"padding_free": "ours:Plugin"})
    assert str(error.value) == (
        "The installed plugin other:Plugin registers --padding_free, a flag of packtune's own; uninstall it or ask "
        "its authors for another name"
    )
    assert list(all_plugins({"multipack": "ours:Pack"})) == ["multipack", "padding_free"]
