"""Scores that compare pixels: errors, structural similarity, MJP's distance in the Fourier domain."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.errors import RecordError

# 200 dB lies far beyond what float32 pictures can differ by and keeps means of exact hits finite.
SMALLEST_MSE = 1e-20
RADIUS, SIGMA = 5, 1.5
C1, C2 = 0.01**2, 0.03**2
ROUNDING = 1e-12


def as_pair(reconstruction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both batches to float64.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The same shape, the private pictures in the same order.

    Raises:
        RecordError: If they differ in shape, or are not (batch, 3, height, width).
    """
    if reconstruction.shape != target.shape or reconstruction.ndim != 4 or reconstruction.shape[1] != 3:
        raise RecordError(
            "reconstruction and target must both be (batch, 3, height, width), "
            f"got {tuple(reconstruction.shape)} and {tuple(target.shape)}"
        )
    return reconstruction.double(), target.double()


def mse(reconstruction: Tensor, target: Tensor) -> Tensor:
    r"""Compute the mean squared error of each reconstruction, in squared intensity units.

    .. math:: \mathrm{MSE}_b = \frac{1}{CHW}\sum_{c,h,w} (\hat{x}_{bchw} - x_{bchw})^2

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The same shape, the private pictures in the same order.

    Returns:
        (batch,) float64 in [0, 1]; 0 is a perfect reconstruction.

    References:
        Ren et al., CVPR 2023, Table 5; yhlleo/MJP, eval/cal_mse.py (which then averages a folder).

    Example:
        >>> import torch
        >>> mse(torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4))
        tensor([1., 1.], dtype=torch.float64)
    """
    reconstruction, target = as_pair(reconstruction, target)
    return (reconstruction - target).square().mean(dim=(1, 2, 3))


def psnr(reconstruction: Tensor, target: Tensor) -> Tensor:
    """Compute the peak signal-to-noise ratio of each reconstruction, peak 1.

    The mean of per-image values, as in the official scripts, is not the value of the mean MSE.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The same shape, the private pictures in the same order.

    Returns:
        (batch,) float64, in dB, in [0, 200]. Identical images give 200 instead of infinity.

    References:
        Ren et al., CVPR 2023, Table 5; yhlleo/MJP, eval/basic.py, ``calc_psnr``.

    Example:
        >>> import torch
        >>> psnr(torch.zeros(1, 3, 4, 4), torch.full((1, 3, 4, 4), 0.1))
        tensor([20.0000], dtype=torch.float64)
    """
    return -10 * mse(reconstruction, target).clamp_min(SMALLEST_MSE).log10()


def ssim(reconstruction: Tensor, target: Tensor, *, padding: int = 0) -> Tensor:
    """Compute structural similarity as scikit-image does with the original paper's constants.

    Gaussian window 11x11, sigma 1.5, population covariance, data range 1, channels averaged, the border where the
    window does not fit left out: images have at least 11 pixels a side.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The same shape, the private pictures in the same order.
        padding: Zeros on every side of both.

    Returns:
        (batch,) float64 in [-1, 1]; 1 is a perfect reconstruction.

    References:
        Wang et al., "Image quality assessment", IEEE TIP 2004; ``structural_similarity(...,
        gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1)``.

    Example:
        >>> import torch
        >>> pictures = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        >>> round(float(ssim(pictures / 2, pictures)), 4)
        0.6414
    """
    x, y = as_pair(reconstruction, target)
    mean_x, mean_y = _blur(x, padding), _blur(y, padding)
    variance_x = _blur(x * x, padding) - mean_x.square()
    variance_y = _blur(y * y, padding) - mean_y.square()
    covariance = _blur(x * y, padding) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x.square() + mean_y.square() + C1)
    structure = (2 * covariance + C2) / (variance_x + variance_y + C2)
    return (luminance * structure).mean(dim=(1, 2, 3))


def ssim_mjp(reconstruction: Tensor, target: Tensor) -> Tensor:
    """Compute structural similarity as MJP's evaluation does, for comparison with its Table 5.

    The same window as ``ssim``, but the images are padded with zeros, so that the black border counts as agreement.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The same shape, the private pictures in the same order.

    Returns:
        (batch,) float64 in [-1, 1]; 1 is a perfect reconstruction.

    References:
        yhlleo/MJP, eval/basic.py, ``calc_ssim``.

    Example:
        >>> import torch
        >>> pictures = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        >>> round(float(ssim_mjp(1 - pictures, pictures)), 4)
        -0.5215
    """
    return ssim(reconstruction, target, padding=RADIUS)


def fft2d(reconstruction: Tensor, target: Tensor) -> Tensor:
    r"""Compute the "FFT2D" of MJP's evaluation script, written out.

    .. math:: \left| 1 - \frac{\sum uv}{\sqrt{\sum u^2 \sum v^2}} \right|

    with u and v the complex two-dimensional FFT of every channel and no conjugate anywhere, as old
    SciPy releases computed ``distance.cosine`` of complex vectors. Without the conjugate it
    compares one image with the point reflection of the other; it is no distance and may exceed 1.
    It is here because the paper reports it, not because it is a good metric.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The same shape, the private pictures in the same order.

    Returns:
        (batch,) float64, from 0 (identical). The quotient is undefined where sum u^2 or sum v^2
        vanishes: for a black image, or one that shares no bright pixel with its own point reflection.
        It then counts as 1 if the images are identical, else as 0.

    References:
        Ren et al., CVPR 2023, Table 5 ("FFT"); yhlleo/MJP, eval/cal_fft2d.py.

    Example:
        >>> import torch
        >>> pictures = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        >>> round(float(fft2d(1 - pictures, pictures)), 4)
        0.0402
    """
    reconstruction, target = as_pair(reconstruction, target)
    u, v = (torch.fft.fft2(images).flatten(1) for images in (reconstruction, target))
    product, square_u, square_v = (u * v).sum(1), (u * u).sum(1), (v * v).sum(1)
    # Where a sum of squares is nothing but rounding of its terms.
    vanishes, vanishes_v = (
        square.abs() <= ROUNDING * spectrum.abs().square().sum(1) for spectrum, square in ((u, square_u), (v, square_v))
    )
    vanishes |= vanishes_v
    quotient = product / torch.where(vanishes, 1, (square_u * square_v).sqrt())
    identical = (reconstruction == target).flatten(1).all(1)
    return (1 - torch.where(vanishes, identical.to(quotient), quotient)).abs()


def _blur(images: Tensor, padding: int) -> Tensor:
    """Blur each channel by a separable Gaussian, after adding ``padding`` zeros on every side."""
    offsets = torch.arange(-RADIUS, RADIUS + 1, dtype=images.dtype, device=images.device)
    weights = torch.exp(-offsets.square() / (2 * SIGMA**2))
    weights = (weights / weights.sum()).repeat(images.shape[1], 1, 1, 1)
    rows = F.conv2d(images, weights.transpose(2, 3), padding=(padding, 0), groups=images.shape[1])
    return F.conv2d(rows, weights, padding=(0, padding), groups=images.shape[1])
