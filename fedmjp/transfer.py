"""Tensors from the CPU to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmjp.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; CUDA copies it while it computes, and nobody waits for what it was given before."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
