"""Torch, imported when something of it is first used: to read what a plan says takes none of it, and torch a second."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            import torch  # noqa: PLC0415 (that is what this file is for)

            return getattr(torch, name)

    torch = _Later()

__all__ = ["torch"]
