"""Pixel-wise errors."""

from torch import Tensor

from fedmjp.metrics.shapes import as_pair

# 200 dB lies far beyond what float32 pictures can differ by and keeps means of exact hits finite.
SMALLEST_MSE = 1e-20


def mse(reconstruction: Tensor, target: Tensor) -> Tensor:
    r"""Mean squared error of each reconstruction, in squared intensity units.

    .. math:: \mathrm{MSE}_b = \frac{1}{CHW}\sum_{c,h,w} (\hat{x}_{bchw} - x_{bchw})^2

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The private images, same shape and order.

    Returns:
        (batch,) float64 in [0, 1]; 0 is a perfect reconstruction.

    Raises:
        RecordError: If the shapes differ.

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
    """Peak signal-to-noise ratio of each reconstruction, peak 1.

    The mean of per-image values, as in the official scripts, is not the value of the mean MSE.

    Args:
        reconstruction: (batch, 3, height, width) in [0, 1].
        target: The private images, same shape and order.

    Returns:
        (batch,) float64, in dB, in [0, 200]. Identical images give 200 instead of infinity.

    Raises:
        RecordError: If the shapes differ.

    References:
        Ren et al., CVPR 2023, Table 5; yhlleo/MJP, eval/basic.py, ``calc_psnr``.

    Example:
        >>> import torch
        >>> psnr(torch.zeros(1, 3, 4, 4), torch.full((1, 3, 4, 4), 0.1))
        tensor([20.0000], dtype=torch.float64)
    """
    return -10 * mse(reconstruction, target).clamp_min(SMALLEST_MSE).log10()
