"""Lists as boards need them: in groups, and in words."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by what they have in common, groups and items in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def listed(parts: Sequence[str], last: str = "and") -> str:
    """``a, b and c``; nothing of none."""
    return f" {last} ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
