"""Helpers for tensors by name, as updates and weights are: finite, on a device, near to others, averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Training moves weights by far less than their length in a round; a gradient is as far off as zero is.
FARTHEST = 0.5


def is_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor holds no NaN and no infinite value.

    Smallest and largest value say it (a NaN is both) in a tenth of the time and without a mask of the tensor's size. A
    GPU is waited for once.

    Args:
        tensor: Floating point, of any shape.
    """
    import torch

    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).isfinite().all())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; CUDA copies while it computes, and nobody waits for earlier work.

    Args:
        tensor: Of any shape, on any device.
        device: Where to.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def are_weights(reply: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    """Tell whether a client's reply is so near to the weights that it was sent that it can be nothing but weights.

    Args:
        reply: Tensors by name.
        sent: The weights, by name.
    """
    names = [name for name, tensor in reply.items() if tensor.is_floating_point()]
    if not names or any(name not in sent or reply[name].shape != sent[name].shape for name in names):
        return False
    length = math.fsum(float(sent[name].double().square().sum()) for name in names)
    moved = math.fsum(float((reply[name].double() - sent[name].double()).square().sum()) for name in names)
    return length > 0 and moved <= FARTHEST**2 * length


def without_decay(delta: Tensor, sent: Tensor, kept: float) -> Tensor:
    """Take off a weight delta what weight decay alone did; a tensor that did not move at all was not trained.

    Args:
        delta: Change of the weights.
        sent: Weights that the server had sent, of the same shape.
        kept: Share of them that the client's steps kept.
    """
    if kept == 1 or not bool(delta.any()):
        return delta
    return (delta.double() + (1 - kept) * sent.detach().to(delta.device).double()).to(delta.dtype)


def average_updates(updates: Sequence[Mapping[str, Tensor]], examples: Sequence[float] = ()) -> dict[str, Tensor]:
    """Average updates over clients, in their order, weighted by their pictures where these differ; counts are rounded.

    Args:
        updates: Of the same names and shapes.
        examples: Pictures behind each; empty weighs all alike.
    """
    import torch

    if len(updates) == 1:
        return dict(updates[0])
    return {name: _mean(torch.stack([update[name] for update in updates]), examples) for name in updates[0]}


def _mean(stacked: Tensor, examples: Sequence[float]) -> Tensor:
    import torch

    if stacked.is_floating_point() and len(set(examples)) <= 1:
        return stacked.mean(dim=0)
    weights = torch.tensor(examples or [1.0] * len(stacked), dtype=torch.float64, device=stacked.device)
    mean: Tensor = torch.tensordot(weights / weights.sum(), stacked.double(), dims=1)
    return (mean if stacked.is_floating_point() else mean.round()).to(stacked.dtype)
