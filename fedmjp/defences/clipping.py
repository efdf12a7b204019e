"""Clipping of many tensors by their common norm, as several defences use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedmjp.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor


def global_norm(update: Mapping[str, Tensor]) -> float:
    """Euclidean norm of all real numbers of an update together; counters do not count."""
    norms = [
        float(torch.linalg.vector_norm(value, dtype=torch.float64))
        for value in update.values()
        if value.is_floating_point()
    ]
    return math.hypot(*norms)


def clip(update: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """An update scaled down to a norm where it is longer; finite, or nothing is promised."""
    length = global_norm(update)
    if length <= norm:
        return dict(update)
    return {name: tensor * (norm / length) if tensor.is_floating_point() else tensor for name, tensor in update.items()}


def clip_examples(gradients: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Gradients of single examples, (batch, *shape) by name, each scaled down to a norm where it is longer."""
    # Of a tensor without dimensions there is one number per example.
    norms = [
        torch.linalg.vector_norm(grad[:, None].flatten(1), dim=1, dtype=torch.float64) for grad in gradients.values()
    ]
    lengths = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factors = (norm / lengths).clamp(max=1)  # of a zero gradient: 1
    return {name: grad * factors.to(grad).reshape(-1, *(1,) * (grad.dim() - 1)) for name, grad in gradients.items()}
