"""MJP's distance in the Fourier domain."""

import torch
from torch import Tensor

from fedmjp.metrics.shapes import as_pair


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
        (batch,) float64, from 0 (identical). A black image has no direction: the quotient counts as
        1 if both are black and as 0 if one is.

    Raises:
        RecordError: If the shapes differ.

    References:
        Ren et al., CVPR 2023, Table 5 ("FFT"); yhlleo/MJP, eval/cal_fft2d.py.
    """
    reconstruction, target = as_pair(reconstruction, target)
    u, v = (torch.fft.fft2(images).flatten(1) for images in (reconstruction, target))
    product, norm_u, norm_v = (u * v).sum(1), (u * u).sum(1), (v * v).sum(1)
    black_u, black_v = norm_u == 0, norm_v == 0
    quotient = product / torch.where(black_u | black_v, 1, (norm_u * norm_v).sqrt())
    quotient = torch.where(black_u & black_v, torch.ones_like(quotient), quotient)
    return (1 - quotient).abs()
