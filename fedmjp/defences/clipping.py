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


def clip_examples(gradients: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Scale the gradient of each example down to a norm where it is longer.

    Args:
        gradients: (batch, *shape) by name.
        norm: Largest Euclidean norm of an example's gradient, above 0.
    """
    import torch

    # A tensor without dimensions has one number per example.
    norms = [
        torch.linalg.vector_norm(grad[:, None].flatten(1), dim=1, dtype=torch.float64) for grad in gradients.values()
    ]
    lengths = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factors = (norm / lengths).clamp(max=1)  # a zero gradient has 1
    return {name: grad * factors.to(grad).reshape(-1, *(1,) * (grad.dim() - 1)) for name, grad in gradients.items()}
