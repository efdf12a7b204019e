"""Clipping of many tensors by their common norm, as several defences use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def global_norm(update: Mapping[str, Tensor]) -> float:
    """Compute the Euclidean norm of all real numbers of an update together; counters do not count.

    Args:
        update: Tensors by name.
    """
    import torch

    norms = [
        float(torch.linalg.vector_norm(value, dtype=torch.float64))
        for value in update.values()
        if value.is_floating_point()
    ]
    return math.hypot(*norms)


def clip(update: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Scale an update down to a norm where it is longer.

    Args:
        update: Tensors by name, finite.
        norm: Largest Euclidean norm, above 0.
    """
    length = global_norm(update)
    if length <= norm:
        return dict(update)
    return {name: tensor * (norm / length) if tensor.is_floating_point() else tensor for name, tensor in update.items()}
