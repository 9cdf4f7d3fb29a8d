"""AccelerationFramework: picks the plugins of a run, seats what they hand out, and patches the model.

The framework is made for one run and owns nothing global, so a second run in the process starts from nothing. It is
the only caller of plugin hooks; the order of hooks is the order of the plugin table.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tuning.acceleration.patching import Applied, applied_patches
from tuning.acceleration.plugin import AccelerationPlugin, Facts, Lengths
from tuning.config.nested import build_config
from tuning.environment import installed_version
from tuning.errors import ConfigError, PluginError, UserError
from tuning.logs import logger
from tuning.seats import Collator, Seats

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ENTRY_POINT_GROUP", "AccelerationFramework", "all_plugins", "render_table", "third_party_plugins"]

ENTRY_POINT_GROUP = "tuning.plugins"
# a plugin that overrides one of these takes the seat in every run; the loss seat may be declined run by run
_REPLACING_SEATS = ("load_model", "batch_sampler")
_log = logger(__name__)


def third_party_plugins() -> dict[str, str]:
    """Return flag name to ``"module:Class"`` of every installed third-party plugin; imports none of them."""
    return {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def all_plugins(builtin: Mapping[str, str]) -> dict[str, str]:
    """Return built-in and installed plugins, flag name to ``"module:Class"``, in the order of hooks.

    Raises:
        ConfigError: If an installed plugin has the flag of a built-in one.
    """
    installed = third_party_plugins()
    clashes = sorted(set(installed) & set(builtin))
    if clashes:
        raise ConfigError(
            [
                f"The installed plugin {installed[name]} registers --{name}, a flag of packtune's own; uninstall it "
                "or ask its authors for another name"
                for name in clashes
            ]
        )
    return {**builtin, **installed}


class AccelerationFramework:
    """The plugins of one run.

    Args:
        flags: Flag name to config object of every flag that is on.
        plugins: Flag name to ``"module:Class"``; the order is the order of hooks.

    Raises:
        ConfigError: If a flag has no plugin, lacks a flag it requires, or conflicts with another.
        PluginError: If a plugin cannot be imported or a package it needs is not installed.
    """

    def __init__(self, flags: Mapping[str, Any], *, plugins: Mapping[str, str]) -> None:
        unknown = sorted(set(flags) - set(plugins))
        if unknown:
            raise ConfigError(
                [f"--{name} was asked for, but no plugin of that name is installed; drop the flag" for name in unknown]
            )
        classes = {name: _load_class(name, plugins[name]) for name in plugins if name in flags}
        _check_combination(classes)
        self.plugins: tuple[AccelerationPlugin[Any], ...] = tuple(
            cls(build_config(cls.config_type, flags[name], flag=name)) for name, cls in classes.items()
        )
        for plugin in self.plugins:
            if not plugin.stable:
                _log.info("--%s is experimental: its options and results may change between versions", plugin.name)

    @property
    def active(self) -> frozenset[str]:
        """Flag names of the plugins of this run."""
        return frozenset(plugin.name for plugin in self.plugins)

    def check(self, facts: Facts) -> None:
        """Let every plugin refuse before weights are loaded; all refusals, and seats with two takers, are told at once.

        Raises:
            ConfigError: With every refusal.
        """
        problems: list[str] = []
        for seat in _REPLACING_SEATS:
            takers = self._takers_all(seat)
            if len(takers) > 1:
                problems.append(_two_takers(takers, seat))
        for plugin in self.plugins:
            try:
                plugin.check(facts)
            except ConfigError as error:
                problems.extend(error.problems)
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(problems)

    def load_model(self, facts: Facts) -> nn.Module | None:
        """Return the model of the plugin that takes the loader seat, or None.

        Raises:
            ConfigError: If two plugins take the seat.
        """
        takers = self._takers("load_model")
        if not takers:
            return None
        return takers[0].load_model(facts)

    def check_model(self, model: nn.Module, facts: Facts) -> None:
        """Let every plugin refuse the model that was loaded.

        Raises:
            UserError: By the first plugin that refuses.
        """
        for plugin in self.plugins:
            plugin.check_model(model, facts)

    @contextmanager
    def patched(self, model: nn.Module, facts: Facts) -> Iterator[Applied]:
        """Change ``model`` as the plugins ask while the context lasts, and log the table of what was changed.

        Yields:
            What was applied where.

        Raises:
            PluginError: If a plugin that patches found nothing to patch.
        """
        patches = []
        for plugin in self.plugins:
            own = list(plugin.patches(model, facts))
            if not own and not plugin.may_do_nothing() and type(plugin).patches is not AccelerationPlugin.patches:
                raise PluginError(
                    f"--{plugin.name} was asked for, but nothing in {type(model).__name__} could be patched; "
                    "drop the flag or use a model it knows"
                )
            patches.extend(own)
        with applied_patches(model, patches) as applied:
            if applied.targets:
                _log.info("patched for this run:\n%s", render_table(applied))
            yield applied

    def self_test(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Let every plugin prove itself on the patched model and the first batch.

        Raises:
            UserError: By the first plugin whose promise does not hold.
        """
        for plugin in self.plugins:
            plugin.self_test(model, batch)

    def seats(self, lengths: Lengths, collator: Collator, facts: Facts) -> Seats:
        """Collect what goes into the trainer.

        Args:
            lengths: Tokens a training sample, in dataset order.
            collator: The trainer's own; plugins wrap it in order.
            facts: Of this run.

        Raises:
            ConfigError: If two plugins replace the same part of the trainer.
        """
        for plugin in self.plugins:
            collator = plugin.collator(collator, facts) or collator
        samplers = self._takers("batch_sampler")
        losses = [(plugin, loss) for plugin in self._takers_all("loss") if (loss := plugin.loss(facts)) is not None]
        if len(losses) > 1:
            raise ConfigError(_two_takers([plugin for plugin, _ in losses], "loss"))
        return Seats(
            collator=collator,
            batch_sampler=samplers[0].batch_sampler(lengths, facts) if samplers else None,
            loss=losses[0][1] if losses else None,
            callbacks=tuple(callback for plugin in self.plugins for callback in plugin.callbacks()),
        )

    def _takers_all(self, seat: str) -> list[AccelerationPlugin[Any]]:
        return [p for p in self.plugins if getattr(type(p), seat) is not getattr(AccelerationPlugin, seat)]

    def _takers(self, seat: str) -> list[AccelerationPlugin[Any]]:
        takers = self._takers_all(seat)
        if len(takers) > 1:
            raise ConfigError(_two_takers(takers, seat))
        return takers


def render_table(applied: Applied) -> str:
    """Return the table of patches: name, count, first target."""
    rows = [(name, str(len(targets)), targets[0] or "(model)") for name, targets in applied.targets.items()]
    rows.insert(0, ("patch", "modules", "first"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _load_class(name: str, where: str) -> type[AccelerationPlugin[Any]]:
    module_name, _, class_name = where.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a plugin runs code of its own when it is imported, and may raise anything
        raise PluginError(
            f"--{name} was asked for, but its plugin {where} cannot be imported ({error}); "
            "install what it needs or drop the flag"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, AccelerationPlugin)):
        raise PluginError(f"--{name} was asked for, but {where} is no AccelerationPlugin; report this to its authors")
    if getattr(cls, "name", None) != name:
        raise PluginError(
            f"--{name} was asked for, but its plugin {where} calls itself {getattr(cls, 'name', 'nothing')}; report "
            "this to its authors"
        )
    missing = [package for package in cls.packages if installed_version(package) is None]
    if missing:
        raise PluginError(
            f"--{name} was asked for, but it needs {', '.join(missing)}, not installed; pip install {' '.join(missing)}"
        )
    return cls


def _check_combination(classes: Mapping[str, type[AccelerationPlugin[Any]]]) -> None:
    problems = []
    for name, cls in classes.items():
        problems += [
            f"--{name} needs --{other}, which is off; add --{other} or drop --{name}"
            for other in sorted(cls.requires - set(classes))
        ]
        problems += [
            f"--{min(name, other)} and --{max(name, other)} cannot be used together; keep one"
            for other in sorted(cls.conflicts & set(classes))
        ]
    if problems:
        # two plugins may each name the other
        raise ConfigError(list(dict.fromkeys(problems)))


def _two_takers(takers: Sequence[AccelerationPlugin[Any]], seat: str) -> str:
    names = " and ".join(f"--{plugin.name}" for plugin in takers)
    return f"{names} both replace the {seat}; keep one"
