"""MJP's distance in the Fourier domain."""

import torch
from torch import Tensor

from fedmjp.metrics.shapes import as_pair

ROUNDING = 1e-12


def fft2d(reconstruction: Tensor, target: Tensor) -> Tensor:
    r"""The "FFT2D" of MJP's evaluation script, written out.

    .. math:: \left| 1 - \frac{\sum uv}{\sqrt{\sum u^2 \sum v^2}} \right|

    with u and v the complex two-dimensional FFT of every channel and no conjugate anywhere, as old
    SciPy releases computed ``distance.cosine`` of complex vectors. Without the conjugate it
    compares one image with the point reflection of the other; it is no distance and may exceed 1.
    It is here because the paper reports it, not because it is a good metric.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The private images, same shape and order.

    Returns:
        (batch,) float64, from 0 (identical). The quotient is undefined where sum u^2 or sum v^2
        vanishes: for a black image, or one that shares no bright pixel with its own point reflection.
        It then counts as 1 if the images are identical, else as 0.

    Raises:
        RecordError: If the shapes differ.

    References:
        Ren et al., CVPR 2023, Table 5 ("FFT"); yhlleo/MJP, eval/cal_fft2d.py.
    """
    reconstruction, target = as_pair(reconstruction, target)
    u, v = (torch.fft.fft2(images).flatten(1) for images in (reconstruction, target))
    product, square_u, square_v = (u * v).sum(1), (u * u).sum(1), (v * v).sum(1)
    vanishes = _vanishes(u, square_u) | _vanishes(v, square_v)
    quotient = product / torch.where(vanishes, 1, (square_u * square_v).sqrt())
    identical = (reconstruction == target).flatten(1).all(1)
    return (1 - torch.where(vanishes, identical.to(quotient), quotient)).abs()


def _vanishes(spectrum: Tensor, square: Tensor) -> Tensor:
    """Whether the sum of squares is nothing but rounding of its terms."""
    return square.abs() <= ROUNDING * spectrum.abs().square().sum(1)
