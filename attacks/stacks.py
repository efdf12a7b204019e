"""Solving a stack of uploads at once where their systems have the same size."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fedmjp.records import Reconstruction, Upload

S = TypeVar("S")


def in_stacks(
    systems: Sequence[S], solve: Callable[[Sequence[int]], list[Reconstruction]], *, size: Callable[[S], int]
) -> list[Reconstruction]:
    """Solve systems of equal size together; the order of the results is that of the systems.

    Args:
        systems: One per upload.
        solve: Gets the indices of systems of one size, gives their reconstructions.
        size: Number of unknowns of a system: masks of different size make different ones.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, system in enumerate(systems):
        groups[size(system)].append(index)
    found = {index: made for stack in groups.values() for index, made in zip(stack, solve(stack), strict=True)}
    return [found[index] for index in range(len(systems))]


def rounding_of(uploads: Sequence[Upload], name: str) -> float:
    """Relative rounding error of the number format that a tensor arrived in, the coarsest of the stack."""
    return max(torch.finfo(upload.tensors[name].dtype).eps / 2 for upload in uploads)
