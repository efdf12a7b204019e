"""The loss of gradient matching: distances of gradients, and penalties on unnatural pictures.

Candidates are pictures (candidates, batch, 3, size, size) in [0, 1].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.matching_gradients import Agreement, Candidates, Comparison
from attacks.matching_options import GradientMatchingOptions
from attacks.natural_patches import NaturalPatches
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches

# Below the square of any rounding error of scaled gradients.
TINY = 1e-30
# Added to every direction of the patch covariance: detail finer than a hundredth of the range costs no more.
PATCH_VARIANCE = 1e-4


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down plus across, (candidates,)."""
    down = images.diff(dim=-2).abs().flatten(1).mean(dim=1)
    across = images.diff(dim=-1).abs().flatten(1).mean(dim=1)
    return down + across


def patch_seams(images: Tensor, patch_size: int) -> Tensor:
    """Mean squared jump from the last pixels of a patch to the first of the next, down plus across.

    A transformer sees patches one by one, so nothing else makes neighbours fit. There is more than one patch per side.

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
    """

    def __init__(self, model: VitClassifier) -> None:
        natural = NaturalPatches.for_model(model)
        variances, directions = torch.linalg.eigh(natural.covariance.double())
        self._whiten = (directions * (variances + PATCH_VARIANCE).rsqrt()).float()
        self._mean = natural.mean.float()
        self._patch_size = model.patch_size

    def __call__(self, images: Tensor) -> Tensor:
        """Of candidates, (candidates,)."""
        patches = to_patches(images.flatten(0, 1), self._patch_size)
        whitened = (patches - self._mean) @ self._whiten
        distances: Tensor = whitened.square().view(len(images), -1).mean(dim=1)
        return distances


@dataclass(frozen=True)
class Job:
    """One search: an upload, prepared, and a start.

    Attributes:
        start: (batch, 3, size, size) in [0, 1].
        labels: (batch,) int64.
        mask: (batch, patches) bool; None for no mask.
        norm: (), of all matched gradients, float64.
        targets: Name to gradient over that norm, float32.
        positions: (tokens, dim) gradient of the position embedding over that norm, float32; zeros if unused.
    """

    start: Tensor
    labels: Tensor
    mask: Tensor | None
    norm: Tensor
    targets: Mapping[str, Tensor]
    positions: Tensor


class Loss:
    """The loss of the candidates of some jobs, one each. The model gives sizes; ``prior`` is None without a weight."""

    def __init__(
        self,
        options: GradientMatchingOptions,
        model: VitClassifier,
        comparison: Comparison,
        jobs: Sequence[Job],
        prior: PatchPrior | None,
    ) -> None:
        self._options = options
        self._patch_size = model.patch_size
        self._prefix = model.prefix_tokens
        self._comparison = comparison
        self._prior = prior
        self._labels = torch.stack([job.labels for job in jobs])
        self._norms = torch.stack([job.norm for job in jobs])
        masks = [job.mask for job in jobs if job.mask is not None]
        self._mask = torch.stack(masks) if masks else None
        self._targets = {name: torch.stack([job.targets[name] for job in jobs]) for name in jobs[0].targets}
        positions = torch.stack([job.positions for job in jobs])[:, self._prefix :]
        self._visible = (positions != 0).any(dim=2, keepdim=True)
        if self._mask is not None:  # under noise there are rows at masked places, too
            self._visible &= ~self._mask.all(dim=1)[..., None]
        self._positions = self._informative(positions)

    def __call__(self, images: Tensor) -> Tensor:
        """Of candidates, (candidates,)."""
        agreement = self._comparison.agreement(Candidates(images, self._labels, self._mask), self._targets)
        return self._distances(agreement) + self._penalties(images)

    def _distances(self, agreement: Agreement) -> Tensor:
        # The targets were divided by their norm. In float64, as the ratio of two norms may be anything.
        ratio = 1 / (agreement.scale.double() * self._norms)
        products, squares = agreement.products.sum(dim=1), agreement.squares.sum(dim=1)
        total = self._distance(products, squares, torch.ones_like(squares), ratio)
        if self._options.position_weight:
            rows = self._informative(agreement.positions[:, self._prefix :])
            products, squares = (rows * self._positions).sum((1, 2)), rows.square().sum((1, 2))
            targets = self._positions.square().sum((1, 2))
            total = total + self._options.position_weight * self._distance(products, squares, targets, ratio)
        return total.float()

    def _informative(self, rows: Tensor) -> Tensor:
        """Gradients at the patches (candidates, patches, dim): the visible ones, less their mean."""
        rows = rows * self._visible
        if not self._options.position_centred:
            return rows
        mean = rows.sum(dim=1, keepdim=True) / self._visible.sum(dim=1, keepdim=True).clamp(min=1)
        return (rows - mean) * self._visible

    def _distance(self, products: Tensor, squares: Tensor, targets: Tensor, ratio: Tensor) -> Tensor:
        """Distance of ``ratio`` times some gradients from targets, from products and squared norms."""
        products, squares, targets = products.double(), squares.double(), targets.double()
        if self._options.objective == "cosine":
            return 1 - products / (squares * targets).clamp(min=TINY).sqrt()
        return (ratio.square() * squares - 2 * ratio * products + targets) / targets.clamp(min=TINY)

    def _penalties(self, images: Tensor) -> Tensor:
        total = images.new_zeros(len(images))
        if self._options.total_variation:
            total = total + self._options.total_variation * total_variation(images)
        if self._options.seams:
            total = total + self._options.seams * patch_seams(images, self._patch_size)
        if self._prior is not None:
            total = total + self._options.patch_prior * self._prior(images)
        return total
