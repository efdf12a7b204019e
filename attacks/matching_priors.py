"""What natural pictures look like, as penalties on candidates in [0, 1]."""

import torch
from torch import Tensor

from attacks.natural_patches import NaturalPatches
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches

# Added to every direction of the patch covariance: detail finer than a hundredth of the range costs no more.
PATCH_VARIANCE = 1e-4


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down plus across.

    Args:
        images: (candidates, batch, 3, size, size) in [0, 1].

    Returns:
        (candidates,).
    """
    down = images.diff(dim=-2).abs().flatten(1).mean(dim=1)
    across = images.diff(dim=-1).abs().flatten(1).mean(dim=1)
    return down + across


def patch_seams(images: Tensor, patch_size: int) -> Tensor:
    """Mean squared jump from the last pixels of a patch to the first of the next, down plus across.

    A transformer sees patches one by one, so nothing else makes neighbours fit.

    Args:
        images: (candidates, batch, 3, size, size) in [0, 1], of more than one patch per side.
        patch_size: Pixels per side of a patch.

    Returns:
        (candidates,).

    References:
        Hatamizadeh et al., "GradViT: Gradient Inversion of Vision Transformers", CVPR 2022
        (there the norm of every seam, here its mean square).
    """
    first = slice(patch_size, None, patch_size)
    last = slice(patch_size - 1, -1, patch_size)
    down = images[..., first, :] - images[..., last, :]
    across = images[..., :, first] - images[..., :, last]
    return down.square().flatten(1).mean(dim=1) + across.square().flatten(1).mean(dim=1)


class PatchPrior:
    """Mean squared Mahalanobis distance of the patches from natural ones, per pixel and channel.

    About 1 for a natural picture.

    Args:
        model: Gives image and patch size.

    Raises:
        AttackNotApplicableError: If there are no statistics for the model's sizes.
    """

    def __init__(self, model: VitClassifier) -> None:
        natural = NaturalPatches.for_model(model)
        variances, directions = torch.linalg.eigh(natural.covariance.double())
        self._whiten = (directions * (variances + PATCH_VARIANCE).rsqrt()).float()
        self._mean = natural.mean.float()
        self._patch_size = model.patch_size

    def __call__(self, images: Tensor) -> Tensor:
        """(candidates, batch, 3, size, size) in [0, 1] to (candidates,)."""
        patches = to_patches(images.flatten(0, 1), self._patch_size)
        whitened = (patches - self._mean) @ self._whiten
        distances: Tensor = whitened.square().view(len(images), -1).mean(dim=1)
        return distances
