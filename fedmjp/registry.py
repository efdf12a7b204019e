"""Names to objects, loaded when asked for: listing attacks must not import them all, which takes seconds."""

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib.abc import InspectLoader
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedmjp.errors import PluginError, UnknownNameError

T = TypeVar("T")
_CLASS = re.compile(r"class (\w+)")
_NAME = re.compile(r'    name(?:: [^=]+)? = "([^"]+)"$')


class Registry(Generic[T]):
    """Names of a ``kind``, each pointing to ``"module:attribute"``: our own, and those that other packages add.

    Args:
        kind: What the names are of, for error messages.
        targets: Our own, or a function that finds them when the first name is asked for.
        entry_points: The group through which packages add names. A module is imported at the first ``get``.
    """

    def __init__(
        self, kind: str, targets: Mapping[str, str] | Callable[[], Mapping[str, str]], *, entry_points: str
    ) -> None:
        self.kind = kind
        self._find_own = targets if callable(targets) else lambda: targets
        self._group = entry_points
        self._own: Mapping[str, str] = {}

    @cached_property
    def _targets(self) -> dict[str, str]:
        self._own = self._find_own()
        added = {point.name: point.value for point in entry_points(group=self._group)}
        return {**added, **self._own}  # nobody replaces ours

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def require(self, name: str) -> None:
        """Refuse an unknown name; nothing is imported.

        Args:
            name: To be looked up.

        Raises:
            UnknownNameError: If there is no such name, with the nearest ones.
        """
        if name not in self._targets:
            raise UnknownNameError(self.kind, name, self._targets)

    def get(self, name: str) -> T:
        """Load the object behind a name.

        Args:
            name: To be looked up.

        Raises:
            UnknownNameError: If there is no such name.
            PluginError: If another package's object cannot be loaded.
        """
        self.require(name)
        module, _, attribute = self._targets[name].partition(":")
        try:
            loaded: T = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            if name in self._own:
                raise
            raise PluginError(
                f"{self.kind} {name!r} ({self._targets[name]}) cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        return loaded

    def state(self, name: str, *attributes: str) -> dict[str, Any]:
        """Read attributes of the class behind a name: from the source of ours, while others' are imported.

        Args:
            name: To be looked up.
            attributes: Names of class attributes.

        Raises:
            UnknownNameError: If there is no such name.
            PluginError: If another package's class cannot be loaded.
        """
        self.require(name)
        if name in self._own:
            with suppress(ValueError):
                return {attribute: read_literal(self._own[name], attribute) for attribute in attributes}
        loaded = self.get(name)
        return {attribute: getattr(loaded, attribute) for attribute in attributes}


def read_literal(target: str, attribute: str) -> Any:
    """Read the literal that a class, or the nearest of its bases, gives an attribute.

    Args:
        target: The class, as ``module:Class``.
        attribute: Its name.

    Raises:
        ValueError: If none of them gives it a value, or one that is no literal.
    """
    module, _, name = target.partition(":")
    value = _value(module, name, attribute)
    if value is None:
        raise ValueError(f"the source of {target} gives {attribute} no value")
    return ast.literal_eval(value)


def named_classes(package: str, folder: Path) -> dict[str, str]:
    """Find the classes of a package that state a literal ``name``, without importing or parsing its files.

    Args:
        package: The package's dotted name.
        folder: Where it lies; subfolders belong to it.

    Returns:
        ``"module:Class"`` by name, in the order of the names.

    Raises:
        ValueError: If two classes state one name.
    """
    targets: dict[str, str] = {}
    for file in folder.rglob("*.py"):
        module = ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        owner = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            if line[:1].strip():  # a statement of the module
                match = _CLASS.match(line)
                owner = "" if match is None else f"{module}:{match[1]}"
            elif owner and (match := _NAME.match(line)) and targets.setdefault(match[1], owner) != owner:
                raise ValueError(f"{owner} and {targets[match[1]]} both state the name {match[1]!r}: rename one")
    return dict(sorted(targets.items()))


def _value(module: str, name: str, attribute: str) -> ast.expr | None:
    """Find the value of an attribute in a class that a module defines or imports, or in its bases; None without one."""
    for node in _parsed(module).body:
        match node:
            case ast.ClassDef() if node.name == name:
                return _value_in(node, module, attribute)
            case ast.ImportFrom(module=str(source)):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _value(source, alias.name, attribute)
    return None


def _value_in(definition: ast.ClassDef, module: str, attribute: str) -> ast.expr | None:
    for node in definition.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=given)], value=value) if given == attribute:
                return value
            case ast.AnnAssign(target=ast.Name(id=given), value=ast.expr() as value) if given == attribute:
                return value
    for base in definition.bases:
        parent = base.value if isinstance(base, ast.Subscript) else base
        inherited = _value(module, parent.id, attribute) if isinstance(parent, ast.Name) else None
        if inherited is not None:
            return inherited
    return None


@lru_cache
def _parsed(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    source = loader.get_source(module) if isinstance(loader, InspectLoader) else None
    return ast.parse(source or "")
