"""A Gaussian prior of whole natural pictures, for attacks that lay patches side by side.

The energy of a picture is the mean, over all windows of 16 x 16 pixels, of their energies under the statistics of
``fedmjp.attacks.natural_patches``: (x_w - m)^T S^-1 (x_w - m). S is the same everywhere, so its gradient is a
convolution of
the picture with one short kernel, done by FFT. At the borders the picture goes on as its mirror image.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.attacks.natural_patches import ROUNDING_VARIANCE, patch_statistics, size_refusal
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.entrance import Entrance

WINDOW = 16  # the largest that the table's distances allow
# The finest structure varies from picture to picture more than the table, a mean, can say. To trust its smallest
# variances costs 0.8 dB at mask ratio 0.09 and 0.3 dB at 0.27 on 20 pictures; 20 times the rounding costs as much.
FLOOR = 4 * ROUNDING_VARIANCE


@dataclass(frozen=True)
class NaturalPictures:
    """The prior of a picture, in the network's input space, float32.

    Attributes:
        mean: (3,), of every pixel.
        kernel: (3, 3, 31, 31); entry [c, d, 15 + y, 15 + x] is the precision between channel c at a place
            and channel d at y rows below and x columns right of it.
        spectrum: (3, 3, 2 size, size + 1) complex, the same by the frequencies of twice the picture.
    """

    mean: Tensor
    kernel: Tensor
    spectrum: Tensor

    @staticmethod
    def for_model(model: Entrance) -> "NaturalPictures":
        """Return the prior for the model's image size, on its device; AttackNotApplicableError if the table has none.

        Args:
            model: States size, normalisation and device.
        """
        if refusal := size_refusal(model.pixels):
            raise AttackNotApplicableError(refusal)
        mean, kernel = _statistics(model.pixels[0])
        centre, scale = (values.flatten().double().cpu() for values in (model.mean, model.std))
        kernel = kernel * scale[:, None, None, None] * scale[:, None, None]
        spectrum = _spectrum(kernel, 2 * model.pixels[0])
        device, mean = model.mean.device, (mean - centre) / scale
        return NaturalPictures(mean.float().to(device), kernel.float().to(device), spectrum.to(device, torch.complex64))

    def slope(self, image: Tensor) -> Tensor:
        """Return half the gradient of the energy at ``mean + image``: the precision times an image.

        Args:
            image: (3, size, size).
        """
        size = image.shape[-1]
        mirrored = torch.cat([image, image.flip(-1)], dim=-1)
        mirrored = torch.cat([mirrored, mirrored.flip(-2)], dim=-2)
        waves = (self.spectrum * torch.fft.rfft2(mirrored)).sum(dim=1)
        convolved = torch.fft.irfft2(waves, s=mirrored.shape[-2:])
        rows = convolved[:, :size] + convolved[:, size:].flip(-2)
        both: Tensor = (rows[..., :size] + rows[..., size:].flip(-1)) / 4
        return both

    def reach(self, patch_size: int) -> int:
        """Return the number of patches within which two patches still share a window.

        Args:
            patch_size: Pixels per side of a patch.
        """
        return -(-(self.kernel.shape[-1] // 2) // patch_size)

    def between_patches(self, patch_size: int, down: int, right: int) -> Tensor:
        """Return the precision (values, values) between a patch and another.

        Args:
            patch_size: Pixels per side of a patch.
            down: The number of patches by which the other lies below.
            right: The number of patches by which it lies to the right.
        """
        far = self.kernel.shape[-1] // 2
        pixels = torch.arange(patch_size, device=self.kernel.device)
        lag = pixels[None] - pixels[:, None]
        rows, columns = lag + down * patch_size + far, lag + right * patch_size + far
        room = (abs(down) + abs(right) + 1) * patch_size  # beyond the kernel there is nothing
        kernel = F.pad(self.kernel, (room,) * 4)
        pairs = kernel[:, :, rows + room][:, :, :, :, columns + room]  # (c, d, row, row', column, column')
        return pairs.permute(0, 2, 4, 1, 3, 5).reshape(3 * patch_size**2, 3 * patch_size**2)


@lru_cache(maxsize=4)
def _statistics(image_size: int) -> tuple[Tensor, Tensor]:
    """Return mean (3,) and precision kernel in [0, 1], float64."""
    mean, covariance = patch_statistics(image_size, WINDOW)
    variances, directions = torch.linalg.eigh(covariance)
    precision = (directions / variances.clamp(min=FLOOR)) @ directions.mT
    pairs = precision.reshape(3, WINDOW, WINDOW, 3, WINDOW, WINDOW).permute(0, 3, 1, 2, 4, 5)
    kernel = torch.zeros(3, 3, 2 * WINDOW - 1, 2 * WINDOW - 1, dtype=pairs.dtype)
    for row in range(WINDOW):
        for column in range(WINDOW):
            top, first_column = WINDOW - 1 - row, WINDOW - 1 - column
            kernel[:, :, top : top + WINDOW, first_column : first_column + WINDOW] += pairs[:, :, row, column]
    # Mirror images at the borders make upside down as natural as upright: half of the windows are.
    return mean[:: WINDOW**2], (kernel + kernel.flip(-2)) / (2 * WINDOW**2)


def _spectrum(kernel: Tensor, size: int) -> Tensor:
    """Return the effect of the kernel on each frequency of a picture of ``size`` that goes on periodically."""
    far = kernel.shape[-1] // 2
    lags = torch.arange(-far, far + 1) % size
    periodic = torch.zeros(3, 3, size, size, dtype=kernel.dtype)
    periodic[:, :, lags[:, None], lags] = kernel
    spectrum: Tensor = torch.fft.rfft2(periodic).conj().resolve_conj()
    return spectrum
