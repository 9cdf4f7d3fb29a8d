"""The fields of ``TrainingArguments``, read from source.

Importing transformers and TRL takes seconds; ``--help`` and errors must not wait for it. So the four files that
declare the fields are read with :mod:`ast`, which takes some 20 ms, and nothing of them runs. Nothing is copied by
hand, and a test compares the result with the real classes field by field. A default or a list of choices that is no
plain literal is looked up in the same package; where that fails the field stays, without it.
"""

from __future__ import annotations

import ast
import importlib.util
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tuning.config.values import UNSET, Kind
from tuning.environment import installed_version
from tuning.errors import UnsupportedError

__all__ = ["CHAIN", "TrainingField", "read_training_fields"]

# class -> its base, each with the file that declares it
CHAIN = (
    ("tuning", "trainers/arguments.py", "TrainingArguments"),
    ("trl", "trainer/sft_config.py", "SFTConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
_PLAIN: Final[Mapping[str, str]] = types.MappingProxyType(
    {"bool": "bool", "int": "int", "float": "float", "str": "str", "dict": "dict", "list": "list", "tuple": "list"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingField:
    """One field as its source declares it.

    Attributes:
        name: Of the field.
        kind: What it takes.
        default: Its default, or ``UNSET`` where the source does not tell.
        help: Its help text, ``""`` where the source does not tell.
        const: What the flag alone means, or ``UNSET``.
        owner: Package that declares it, the most derived class winning.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    const: Any
    owner: str


class _UnreadableError(Exception):
    """An expression whose value the source does not tell."""


def read_training_fields() -> tuple[TrainingField, ...]:
    """Read the fields of ``TrainingArguments`` that its constructor takes, in the order of the dataclass.

    Raises:
        UnsupportedError: If a package is missing, or its source is not where supported versions have it.
    """
    found: dict[str, TrainingField | None] = {}
    bases = [name for _, _, name in CHAIN[1:]] + [None]
    for (package, path, name), base in reversed(list(zip(CHAIN, bases, strict=True))):
        module = _Module(_package_root(package), path)
        node = module.find_class(name)
        if node is None or (base is not None and base not in {getattr(item, "id", None) for item in node.bases}):
            raise UnsupportedError(_unsupported(package, f"{path} declares no class {name} as it did"))
        for item in _iter_fields(module, node):
            found[item.name] = item if item.kind.bases else None
    return tuple(item for item in found.values() if item is not None)


def _package_root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(f"packtune needs {package}, which is not installed; pip install {package}")
    return Path(next(iter(spec.submodule_search_locations)))


def _unsupported(package: str, what: str) -> str:
    version = installed_version(package) or "of unknown version"
    return (
        f"the training arguments of the installed {package} {version} cannot be read ({what}); "
        "install the versions that constraints.txt lists"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scope:
    """Names a class body can see: its own plain assignments, then the module's."""

    module: _Module
    names: dict[str, ast.expr] = field(default_factory=dict)


class _Module:
    """The parsed source of one module, and its neighbours on demand.

    Args:
        root: Folder of the package.
        path: File below it.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.root = root
        self.path = path
        try:
            self.tree = ast.parse((root / path).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise UnsupportedError(_unsupported(root.name, f"{path}: {error}")) from error

    def find_class(self, name: str) -> ast.ClassDef | None:
        """Return a class of the top level."""
        return next((node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)

    def find_function(self, name: str) -> ast.FunctionDef | None:
        """Return a function of the top level."""
        return next((node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)

    def find_value(self, name: str) -> ast.expr | None:
        """Return what the top level assigns to ``name``."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and any(getattr(item, "id", None) == name for item in node.targets):
                return node.value
        return None

    def follow(self, name: str) -> _Module | None:
        """Return the module of this package that ``name`` is imported from, or that ``name`` is."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.level and name in {item.name for item in node.names}:
                folder = (self.root / self.path).parents[node.level - 1].relative_to(self.root)
                below = folder.joinpath(*(node.module or "").split("."))
                for candidate in (below / f"{name}.py", below.with_suffix(".py"), below / "__init__.py"):
                    if (self.root / candidate).is_file():
                        return _Module(self.root, candidate.as_posix())
        return None


def _iter_fields(module: _Module, node: ast.ClassDef) -> Iterator[TrainingField]:
    """Yield the fields that a class body declares; one with ``init=False`` has a kind without bases."""
    scope = _Scope(module=module)
    for statement in _statements(node.body):
        if isinstance(statement, ast.Assign):
            scope.names.update({item.id: statement.value for item in statement.targets if isinstance(item, ast.Name)})
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield _read_field(statement.target.id, statement, scope)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements; of an ``if`` its body, since such a condition asks for a version that is our minimum."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _statements(statement.body)
        else:
            yield statement


def _read_field(name: str, statement: ast.AnnAssign, scope: _Scope) -> TrainingField:
    options: dict[str, ast.expr] = {}
    value = statement.value
    if isinstance(value, ast.Call):
        options = {item.arg: item.value for item in value.keywords if item.arg is not None}
    elif value is not None:
        options = {"default": value}
    metadata: dict[str, ast.expr] = {}
    if isinstance(node := options.get("metadata"), ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        metadata = {str(key.value): item for key, item in pairs if isinstance(key, ast.Constant)}
    if "default_factory" in options:
        factory = getattr(options["default_factory"], "id", None)
        default: Any = [] if factory == "list" else {} if factory == "dict" else UNSET
    else:
        default = _value_or(UNSET, options.get("default"), scope)
    init = _value_or(True, options.get("init"), scope)
    const = _value_or(UNSET, metadata.get("const"), scope)
    kind = _read_kind(statement.annotation, _read_choices(metadata.get("choices"), scope), scope)
    if const is True and "bool" not in kind.bases:
        kind = Kind(bases=tuple(sorted({*kind.bases, "bool"})), optional=kind.optional, choices=kind.choices)
    return TrainingField(
        name=name,
        kind=kind if init else Kind(bases=()),
        default=default,
        help=str(_value_or("", metadata.get("help"), scope)).replace("%%", "%"),
        const=const,
        owner=scope.module.root.name,
    )


def _value_or(fallback: object, node: ast.expr | None, scope: _Scope) -> Any:  # noqa: ANN401 - a literal of any type
    if node is None:
        return fallback
    try:
        return _value(node, scope)
    except _UnreadableError:
        return fallback


def _value(node: ast.expr, scope: _Scope) -> Any:  # noqa: ANN401 - a literal of any type
    """Return the value of an expression made of literals and of names for them."""
    if isinstance(node, ast.Name):
        target = scope.names.get(node.id) or scope.module.find_value(node.id)
        if target is None:
            raise _UnreadableError(node.id)
        return _value(target, scope)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _value(node.left, scope) + _value(node.right, scope)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_value(item, scope)) for item in node.values)
    if isinstance(node, ast.FormattedValue):
        return _value(node.value, scope)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError) as error:
        raise _UnreadableError(ast.dump(node)) from error


def _read_choices(node: ast.expr | None, scope: _Scope) -> tuple[str, ...] | None:
    if node is None:
        return None
    try:
        return tuple(_value(node, scope))
    except _UnreadableError:
        return _keys(node, scope.module)


def _keys(node: ast.expr | None, module: _Module) -> tuple[str, ...] | None:
    """Return the keys of a mapping that is a literal, a copy or an extension of one, or what a function returns."""
    if isinstance(node, ast.Dict):
        keys = tuple(key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        return keys if len(keys) == len(node.keys) else None
    if isinstance(node, ast.Name):
        return _keys(module.find_value(node.id), module)
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "dict":
        parts = [(item.arg,) if item.arg else _keys(item.value, module) for item in node.keywords]
        return None if None in parts else tuple(key for part in parts if part for key in part)
    if isinstance(node.func, ast.Attribute):
        if node.func.attr in ("keys", "copy"):
            return _keys(node.func.value, module)
        home = module.follow(node.func.value.id) if isinstance(node.func.value, ast.Name) else None
        function = home.find_function(node.func.attr) if home is not None else None
        if home is not None and function is not None and isinstance(function.body[-1], ast.Return):
            return _keys(function.body[-1].value, home)
    return None


def _read_kind(annotation: ast.expr, choices: tuple[str, ...] | None, scope: _Scope) -> Kind:
    bases: set[str] = set()
    optional = False
    for member in _members(annotation):
        name = getattr(member, "id", None)
        if isinstance(member, ast.Constant) and member.value is None:
            optional = True
        elif name in _PLAIN:
            bases.add(_PLAIN[str(name)])
        elif isinstance(member, ast.Subscript) and getattr(member.value, "id", None) in _PLAIN:
            bases.add(_PLAIN[member.value.id])  # type: ignore[attr-defined]
            choices = choices or _enum_values(member.slice, scope)
        elif isinstance(member, ast.Subscript) and getattr(member.value, "id", None) == "Literal":
            bases.add("false" if getattr(member.slice, "value", None) is False else "str")
        elif (values := _enum_values(member, scope)) is not None:
            bases.add("str")
            choices = choices or values
        else:
            bases.add("other")
    return Kind(bases=tuple(sorted(bases)), optional=optional, choices=choices)


def _members(annotation: ast.expr) -> Iterator[ast.expr]:
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        yield from _members(annotation.left)
        yield from _members(annotation.right)
    elif isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", None) == "Optional":
        yield from _members(annotation.slice)
        yield ast.Constant(value=None)
    elif isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", None) == "Union":
        for item in getattr(annotation.slice, "elts", [annotation.slice]):
            yield from _members(item)
    else:
        yield annotation


def _enum_values(node: ast.expr, scope: _Scope) -> tuple[str, ...] | None:
    """Return the values of an enum of this package, or None if ``node`` names none."""
    if not isinstance(node, ast.Name):
        return None
    module: _Module | None = scope.module
    found = scope.module.find_class(node.id)
    if found is None:
        module = scope.module.follow(node.id)
        found = module.find_class(node.id) if module is not None else None
    if found is None or not any("Enum" in getattr(base, "id", "") for base in found.bases):
        return None
    values = (getattr(item.value, "value", None) for item in found.body if isinstance(item, ast.Assign))
    return tuple(value for value in values if isinstance(value, str))
