"""Give one module another forward, and one forward another function under a global name.

Both change an instance alone: classes and files of other libraries stay as they are, so a second model in the process
does too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["own_forward", "rebind"]


@contextmanager
def own_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give ``module`` a forward on the instance, bound to it, while the context lasts.

    What others wrap around it in the meantime is theirs to take off.
    """
    before = module.__dict__.get("forward")
    # a bound method follows its module through copy.deepcopy
    ours = types.MethodType(forward, module)
    module.__dict__["forward"] = ours
    try:
        yield
    finally:
        if module.__dict__.get("forward") is ours:
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before


def rebind(function: Callable[..., Any], name: str, value: object) -> Callable[..., Any]:
    """Return ``function`` with the global ``name`` bound to ``value``; the function and its file stay as they are.

    Args:
        function: A Python function that reads ``name`` among its globals, or a chain of wrappers around one.
        name: Name of the global.
        value: What the new function finds under that name.

    Raises:
        ValueError: If neither the function nor what it wraps reads ``name``.
    """
    code, cells = function.__code__, list(function.__closure__ or ())
    scope = function.__globals__
    if name in code.co_names and name in scope:
        # without its name: torch.compile would look names up in the file that bears it, and find the old one
        scope = {key: item for key, item in scope.items() if key != "__name__"} | {name: value}
    else:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is None:
            raise ValueError(f"{function} reads no global {name}")
        inner = rebind(wrapped, name, value)
        cells = [types.CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells]
    new = types.FunctionType(code, scope, function.__name__, function.__defaults__, tuple(cells) or None)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__.update(function.__dict__)
    return new
