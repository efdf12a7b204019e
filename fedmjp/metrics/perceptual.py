"""LPIPS, from the lpips package. Its AlexNet backbone is fetched by hand, never replaced."""

import warnings
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedmjp.errors import WeightsMissingError
from fedmjp.metrics import missing_backbone
from fedmjp.metrics.pictures import as_pair


@lru_cache
def _network(device: torch.device) -> nn.Module:
    import lpips  # noqa: PLC0415 (slow import, needed only here)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lpips calls torchvision by a deprecated argument
        network: nn.Module = lpips.LPIPS(net="alex", version="0.1", verbose=False).to(device)
    return network


def perceptual_distance(network: nn.Module, reconstruction: Tensor, target: Tensor) -> Tensor:
    """Apply an LPIPS network, which takes images in [-1, 1], to images in [0, 1].

    Args:
        network: Of package lpips.
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The same shape, the private pictures in the same order.

    Returns:
        (batch,) float64.
    """
    reconstruction, target = as_pair(reconstruction, target)
    with torch.no_grad():
        distance: Tensor = network(reconstruction.float() * 2 - 1, target.float() * 2 - 1)
    return distance.flatten().double()


def lpips_alex(reconstruction: Tensor, target: Tensor) -> Tensor:
    """Compute the learned perceptual distance with the AlexNet backbone, version 0.1.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The same shape, the private pictures in the same order.

    Returns:
        (batch,) float64 from 0 (identical).

    Raises:
        WeightsMissingError: If the AlexNet weights are not on this machine. Random weights would
            give a number, but not LPIPS.

    References:
        Zhang et al., "The unreasonable effectiveness of deep features", CVPR 2018; package lpips.
    """
    reason = missing_backbone()
    if reason:
        raise WeightsMissingError(f"lpips_alex cannot be computed: {reason}")
    return perceptual_distance(_network(reconstruction.device), reconstruction, target)
