"""How a photograph is varied in training and prepared for evaluation, as timm and DeiT do it.

timm's transforms draw from the global generators of random, numpy and torch: call them within
``fedmjp.seeds.scoped_randomness``.
"""

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data.auto_augment import RandAugment
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torchvision.transforms import Compose

from fedmjp.errors import ConfigError
from fedmjp.learning import Recipe


class TrainingTransform:
    """A random crop and flip, RandAugment or colour jitter, and random erasing, to ``size`` pixels per side.

    timm erases after normalisation, with noise from N(0, 1). Here nothing is normalised, so the noise is
    mean + std N(0, 1), of ImageNet: the same picture once the model has normalised it.

    Raises:
        ConfigError: If timm does not know ``recipe.rand_augment``.
    """

    def __init__(self, recipe: Recipe, size: int) -> None:
        try:
            if recipe.rand_augment and recipe.rand_augment.split("-")[0] != "rand":
                raise ValueError(recipe.rand_augment)  # timm has other policies, by names of other kinds
            self._crop, vary, _ = transforms_imagenet_train(
                size,
                scale=(recipe.crop_scale, 1.0),
                hflip=recipe.flip,
                color_jitter=recipe.color_jitter or None,  # type: ignore[arg-type]  # None is no jitter
                auto_augment=recipe.rand_augment or None,
                interpolation="bicubic",
                separate=True,
            )
        except (AssertionError, KeyError, ValueError) as error:
            raise ConfigError(
                f"rand_augment {recipe.rand_augment!r} is none that timm knows; write it like 'rand-m9-mstd0.5-inc1'"
            ) from error
        self._vary = with_posterize(vary)
        self._erasing = recipe.random_erasing > 0
        self._erase = RandomErasing(recipe.random_erasing, mode="pixel", device="cpu")  # type: ignore[no-untyped-call]
        self._mean, self._std = (
            torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
        )

    def __call__(self, photograph: Image.Image) -> Tensor:
        """Draw a version of a photograph.

        Args:
            photograph: In RGB.

        Returns:
            (3, size, size) float32 in [0, 1]; where something was erased, noise that may lie outside.
        """
        varied = self._vary(self._crop(photograph))
        image = torch.from_numpy(np.array(varied)).permute(2, 0, 1).contiguous().div(255)
        if not self._erasing:
            return image
        noise = self._erase(torch.full_like(image, torch.nan))
        if np.isnan(noise.numpy()).all():  # most pictures; six times as fast as torch's
            return image
        return torch.where(noise.isnan(), image, self._mean + self._std * noise)


def with_posterize(vary: Compose) -> Compose:
    """Mend timm's posterize, which asks Pillow for 0 bits at full strength; Pillow 13 refuses that.

    Args:
        vary: timm's transform, changed in place.
    """
    for step in vary.transforms:
        if isinstance(step, RandAugment):
            for operation in step.ops:
                if operation.name.startswith("Posterize"):
                    operation.aug_fn = _posterize
    return vary


def _posterize(picture: Image.Image, bits: int, **_: object) -> Image.Image:
    """Keep the highest bits; zero bits are black, as in the Pillow that timm was written for."""
    return ImageOps.posterize(picture, bits) if bits else Image.new("RGB", picture.size)
