"""Structural similarity, in the two variants that this field reports under one name."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.metrics.shapes import as_pair

RADIUS = 5
SIGMA = 1.5
C1, C2 = 0.01**2, 0.03**2


def _blur(images: Tensor, padding: int) -> Tensor:
    """Separable Gaussian of each channel; ``padding`` zeros on every side."""
    offsets = torch.arange(-RADIUS, RADIUS + 1, dtype=images.dtype, device=images.device)
    weights = torch.exp(-offsets.square() / (2 * SIGMA**2))
    weights = (weights / weights.sum()).repeat(images.shape[1], 1, 1, 1)
    rows = F.conv2d(images, weights.transpose(2, 3), padding=(padding, 0), groups=images.shape[1])
    return F.conv2d(rows, weights, padding=(0, padding), groups=images.shape[1])


def _mean_ssim(reconstruction: Tensor, target: Tensor, padding: int) -> Tensor:
    x, y = as_pair(reconstruction, target)
    mean_x, mean_y = _blur(x, padding), _blur(y, padding)
    variance_x = _blur(x * x, padding) - mean_x.square()
    variance_y = _blur(y * y, padding) - mean_y.square()
    covariance = _blur(x * y, padding) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x.square() + mean_y.square() + C1)
    structure = (2 * covariance + C2) / (variance_x + variance_y + C2)
    return (luminance * structure).mean(dim=(1, 2, 3))


def ssim(reconstruction: Tensor, target: Tensor) -> Tensor:
    """Structural similarity as scikit-image computes it with the original paper's constants.

    Gaussian window 11x11, sigma 1.5, population covariance, data range 1, channels averaged, the
    border where the window does not fit left out.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1], at least 11 pixels a side.
        target: The private images, same shape and order.

    Returns:
        (batch,) float64 in [-1, 1]; 1 is a perfect reconstruction.

    Raises:
        RecordError: If the shapes differ.

    References:
        Wang et al., "Image quality assessment", IEEE TIP 2004; ``structural_similarity(...,
        gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1)``.
    """
    return _mean_ssim(reconstruction, target, padding=0)


def ssim_mjp(reconstruction: Tensor, target: Tensor) -> Tensor:
    """Structural similarity as MJP's evaluation computes it, for comparison with its Table 5.

    The same window as ``ssim``, but the images are padded with zeros, so that the black border
    counts as agreement.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The private images, same shape and order.

    Returns:
        (batch,) float64 in [-1, 1]; 1 is a perfect reconstruction.

    Raises:
        RecordError: If the shapes differ.

    References:
        yhlleo/MJP, eval/basic.py, ``calc_ssim``.
    """
    return _mean_ssim(reconstruction, target, padding=RADIUS)
