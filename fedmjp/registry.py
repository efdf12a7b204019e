"""Names to objects, loaded when asked for: listing attacks must not import them all."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from fedmjp.errors import PluginError, UnknownNameError
from fedmjp.stated import read_literal

T = TypeVar("T")


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

    @cached_property
    def _own(self) -> dict[str, str]:
        return dict(self._find_own())

    @cached_property
    def _targets(self) -> dict[str, str]:
        added = {point.name: point.value for point in entry_points(group=self._group)}
        return added | self._own  # nobody replaces ours

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
