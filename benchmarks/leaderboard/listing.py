"""Lists as boards need them: in groups, and in words."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by a key; groups and items keep the order in which they come.

    Args:
        items: The items.
        key: Computes the key of an item.
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def listed(parts: Sequence[str], last: str = "and") -> str:
    """Join parts into a list in words: ``a, b and c``; an empty text without parts.

    Args:
        parts: The parts.
        last: The word before the last part.
    """
    return f" {last} ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
