"""Names to objects, loaded when asked for: listing attacks must not import them all."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from fedmjp.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A closed set of names, each pointing to ``"module:attribute"``.

    Args:
        kind: What the names stand for ("attack", "model"), used in error messages.
        targets: Name to ``"module:attribute"``; the module is imported at the first ``get``.
    """

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self.kind = kind
        self._targets = dict(targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def get(self, name: str) -> T:
        """Return the object behind ``name``.

        Raises:
            UnknownNameError: If there is no such name; the message offers the nearest ones.
        """
        if name not in self._targets:
            raise UnknownNameError(self.kind, name, self._targets)
        module, _, attribute = self._targets[name].partition(":")
        loaded: T = getattr(importlib.import_module(module), attribute)
        return loaded
