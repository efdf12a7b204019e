"""A Gaussian prior of the patches of natural pictures, for attacks.

Its covariance depends only on the distance between two pixels and on their channels, as in any collection of pictures
without a preferred place. A table of it, measured on the 300 ImageNet pictures that ``natural_patches.json`` names,
ships with fedmjp. None of them may be attacked with it: the engine refuses.
``python results/natural_patches/study.py`` makes the table.
"""

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedmjp.attacks.linear_systems import GaussianPrior
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.entrance import Entrance

TABLE = Path(__file__).with_name("natural_patches.safetensors")
# Pictures of 8 bits carry at least the variance of rounding to them, in every direction.
ROUNDING_VARIANCE = 1 / (12 * 255**2)


class NaturalPatches(GaussianPrior):
    """The prior of a patch, independent of others: of its pixels in [0, 1], in the order of ``fedmjp.patches``."""

    @staticmethod
    def for_model(model: Entrance) -> "NaturalPatches":
        """Return the prior for the model's sizes, on its device; AttackNotApplicableError if the table has none.

        Args:
            model: States sizes and device.
        """
        if refusal := prior_refusal(model):
            raise AttackNotApplicableError(refusal)
        mean, covariance = patch_statistics(model.pixels[0], model.patch_size)
        return NaturalPatches(mean.to(model.mean.device), covariance.to(model.mean.device))


def natural_inputs(model: Entrance) -> GaussianPrior:
    """Return the same prior for a patch as it enters the network; AttackNotApplicableError if the table has none.

    Args:
        model: States sizes, normalisation and device.
    """
    if refusal := prior_refusal(model):
        raise AttackNotApplicableError(refusal)
    mean, std = (tuple(values.flatten().tolist()) for values in (model.mean, model.std))
    return _inputs(model.pixels[0], model.patch_size, mean, std, model.mean.device)


@lru_cache(maxsize=4)
def _inputs(
    image_size: int, patch_size: int, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> GaussianPrior:
    """Cache the prior for its spectrum, which takes longer than to solve for a picture."""
    centre, covariance = (values.to(device) for values in patch_statistics(image_size, patch_size))
    shift, scale = (centre.new_tensor(values).repeat_interleave(patch_size**2) for values in (mean, std))
    return GaussianPrior((centre - shift) / scale, covariance / scale[:, None] / scale)


def prior_refusal(model: Entrance) -> str | None:
    """Say why the table has no prior for the model's patches; None if it has one.

    Args:
        model: States the sizes.
    """
    if refusal := size_refusal(model.pixels):
        return refusal
    largest = _table()[f"{model.pixels[0]}.autocovariance"].shape[-1] // 2 + 1
    if model.patch_size > largest:
        return f"needs a prior of natural patches, which reaches up to patch size {largest}, not {model.patch_size}"
    return None


def size_refusal(pixels: tuple[int, int]) -> str | None:
    """Say why the table says nothing about pictures of this size; None if it does.

    Args:
        pixels: Height and width.
    """
    sizes = sorted(int(name.split(".")[0]) for name in _table() if name.endswith(".mean"))
    height, width = pixels
    if height == width and height in sizes:
        return None
    size = f"image size {height}" if height == width else f"pictures of {height} x {width}"
    return f"needs a prior of natural patches, and there is none for {size}, only for {sizes}"


@lru_cache(maxsize=1)
def _table() -> dict[str, Tensor]:
    return load_file(TABLE)


@lru_cache(maxsize=4)
def patch_statistics(image_size: int, patch_size: int) -> tuple[Tensor, Tensor]:
    """Return mean (values,) and covariance (values, values) of the pixels of a patch, in [0, 1].

    Args:
        image_size: One that the table knows.
        patch_size: Pixels per side of a patch.
    """
    mean, autocovariance = (_table()[f"{image_size}.{name}"].double() for name in ("mean", "autocovariance"))
    return mean.repeat_interleave(patch_size**2), patch_covariance(autocovariance, patch_size)


def patch_covariance(autocovariance: Tensor, patch_size: int) -> Tensor:
    """Compute the covariance (values, values) of the pixels of a patch from that of two pixels at a distance.

    What sampling left below the variance of 8-bit rounding is lifted to it, which also makes it positive definite.

    Args:
        autocovariance: (3, 3, 2 L + 1, 2 L + 1) float64; entry [c, d, L + y, L + x] is the covariance
            of channel c at a place and channel d at y rows below and x columns right of it.
        patch_size: At most L + 1.
    """
    pixels = torch.arange(patch_size)
    lag = pixels[None] - pixels[:, None] + autocovariance.shape[-1] // 2
    pairs = autocovariance[:, :, lag][:, :, :, :, lag]  # (c, d, row, row', column, column')
    covariance = pairs.permute(0, 2, 4, 1, 3, 5).reshape(3 * patch_size**2, -1)
    variances, directions = torch.linalg.eigh((covariance + covariance.T) / 2)
    lifted: Tensor = (directions * variances.clamp(min=ROUNDING_VARIANCE)) @ directions.T
    return lifted
