"""Scores of a reconstruction against a private picture: pure functions, one value per image.

Every metric takes ``reconstruction`` and ``target``, both (batch, 3, height, width) in [0, 1] and
in the same order (RecordError if their shapes differ), computes in float64, and returns (batch,)
float64. None returns NaN or infinity for images in [0, 1]. Means, intervals and worst cases are
the leaderboard's business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from torch import Tensor

from fedmjp.errors import UnknownNameError
from fedmjp.metrics.perceptual import lpips_alex, missing_backbone
from fedmjp.metrics.pictures import fft2d, mse, psnr, ssim, ssim_mjp


@dataclass(frozen=True)
class Metric:
    """A named variant of a metric."""

    function: Callable[[Tensor, Tensor], Tensor]  # (reconstruction, target) to one value per image
    higher_leaks: bool  # whether a higher value means that more of the private picture is revealed
    bounds: str
    lowest: float  # the same as numbers
    highest: float
    definition: str  # the exact variant and its source
    missing: Callable[[], str | None] = lambda: None  # why it cannot be computed on this machine


METRICS = {
    "mse": Metric(mse, False, "0 (exact) to 1", 0, 1, "mean squared error over pixels and channels"),
    "psnr": Metric(psnr, True, "0 to 200 dB", 0, 200, "-10 log10(MSE), peak 1, per image; capped at 200 dB"),
    "ssim": Metric(
        ssim, True, "-1 to 1 (exact)", -1, 1, "scikit-image: Gaussian 11x11, sigma 1.5, population covariance, range 1"
    ),
    "ssim_mjp": Metric(ssim_mjp, True, "-1 to 1 (exact)", -1, 1, "MJP's eval/basic.py: the same window, zero padding"),
    "fft2d": Metric(
        fft2d,
        False,
        "from 0",
        0,
        inf,
        "MJP's eval/cal_fft2d.py: |1 - sum(uv) / sqrt(sum(u^2) sum(v^2))| over complex FFT2",
    ),
    "lpips_alex": Metric(
        lpips_alex,
        False,
        "from 0 (exact)",
        0,
        inf,
        "lpips 0.1 with its AlexNet head on ImageNet weights",
        missing_backbone,
    ),
}


def metric(name: str) -> Metric:
    """Look a metric up; UnknownNameError with the nearest names if there is none."""
    if name not in METRICS:
        raise UnknownNameError("metric", name, METRICS)
    return METRICS[name]
