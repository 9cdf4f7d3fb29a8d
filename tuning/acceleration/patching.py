"""Apply patches to one model, count them, and undo them in reverse, also when training raises.

A patch is a context manager, so undoing is the same code path whether a run ends well or not. Nothing is patched on
classes or modules of other libraries: a second model in the process stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuning.acceleration.plugin import Patch
from tuning.errors import PluginError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Applied", "applied_patches"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What was changed: patch name to the targets it was applied to, in order of application."""

    targets: dict[str, tuple[str, ...]]

    def count(self, name: str) -> int:
        """Return how many modules the patch ``name`` was applied to."""
        return len(self.targets.get(name, ()))


@contextmanager
def applied_patches(model: nn.Module, patches: Sequence[Patch]) -> Iterator[Applied]:
    """Change ``model`` by ``patches`` while the context lasts.

    Args:
        model: The model; changed in place and put back on exit.
        patches: Applied in order, undone in reverse.

    Yields:
        What was applied where.

    Raises:
        PluginError: If a target is no module of ``model``; what was applied before it is undone.
    """
    targets: dict[str, tuple[str, ...]] = {}
    with ExitStack() as stack:
        for patch in patches:
            try:
                module = model.get_submodule(patch.target)
            except AttributeError as error:
                raise PluginError(
                    f"Patch {patch.name} wants to change {patch.target!r}, but {type(model).__name__} has no such "
                    "module; this is a fault of the plugin, report it with the model's config.json"
                ) from error
            stack.enter_context(patch.apply(module))
            targets[patch.name] = (*targets.get(patch.name, ()), patch.target)
        yield Applied(targets=targets)
