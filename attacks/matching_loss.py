"""Options and loss of gradient matching: distances of gradients, and penalties on unnatural pictures.

Candidates are pictures (candidates, batch, 3, size, size) in [0, 1].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmjp.attacks.matching_gradients import Agreement, Candidates, Comparison
from fedmjp.attacks.natural_patches import NaturalPatches
from fedmjp.config import Config, Names
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches

NOISE = "noise"  # as start
ALL = "all"  # as tensors
# Below the square of any rounding error of scaled gradients.
TINY = 1e-30
# Added to every direction of the patch covariance: detail finer than a hundredth of the range costs no more.
PATCH_VARIANCE = 1e-4


class SearchOptions(Config):
    """Masks and budget of a search among pictures."""

    mask: Literal["read", "ignore"] = Field(
        "read", description="of a defended model, one picture per update: read it from the upload, or do without"
    )
    iterations: int = Field(400, ge=1, description="evaluations of the gradient per restart")
    seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="per upload, all restarts together; one iteration is made at least"
    )
    restarts: int = Field(1, ge=1, description="searches per upload, of which the best by its own loss is kept")
    step_size: float = Field(0.02, gt=0, le=1, description="first step of a pixel, in units of its range")
    arithmetic: Literal["float32", "tf32"] = Field("float32", description="of the search; tf32 on CUDA alone")
    parallel: int = Field(
        4, ge=1, description="pictures at a time; bounds the memory. With 1, neighbours do not even change rounding"
    )


class GradientMatchingOptions(SearchOptions):
    """Objective, priors and start."""

    objective: Literal["cosine", "l2"] = Field(
        "cosine", description="distance of gradients: one minus the cosine, or the squared distance over the target's"
    )
    tensors: Names = Field(
        (names.PATCH_WEIGHT,), min_length=1, description="whose gradients are matched: names, comma-separated, or 'all'"
    )
    position_weight: float = Field(
        2.0, ge=0, allow_inf_nan=False, description="of a distance of its own between position-embedding gradients"
    )
    position_centred: bool = Field(
        True, description="take their mean over the patches away first; without it, APRIL's variant"
    )
    total_variation: float = Field(0.2, ge=0, allow_inf_nan=False, description="weight of total variation")
    seams: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of jumps where patches meet")
    patch_prior: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of unlikeness to natural patches")
    start: str = Field("grey", description="'noise', or the attack whose reconstruction is the start")


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, down plus across, (candidates,).

    Args:
        images: (candidates, batch, 3, size, size).
    """
    down = images.diff(dim=-2).abs().flatten(1).mean(dim=1)
    across = images.diff(dim=-1).abs().flatten(1).mean(dim=1)
    return down + across


def patch_seams(images: Tensor, patch_size: int) -> Tensor:
    """Return the mean squared jump from the last pixels of a patch to the first of the next, down plus across.

    A transformer sees patches one by one, so nothing else makes neighbours fit.

    Args:
        images: (candidates, batch, 3, size, size).
        patch_size: Pixels per side, of more than one patch per side.

    References:
        Hatamizadeh et al., "GradViT: Gradient Inversion of Vision Transformers", CVPR 2022
        (there the norm of every seam, here its mean square).
    """
    first = slice(patch_size, None, patch_size)
    last = slice(patch_size - 1, -1, patch_size)
    down = images[..., first, :] - images[..., last, :]
    across = images[..., :, first] - images[..., :, last]
    return down.square().flatten(1).mean(dim=1) + across.square().flatten(1).mean(dim=1)


def patch_prior(model: VitClassifier) -> Callable[[Tensor], Tensor]:
    """Make the mean squared Mahalanobis distance of patches from natural ones, per pixel and channel: 1 for these.

    Args:
        model: States the sizes.
    """
    natural = NaturalPatches.for_model(model)
    variances, directions = torch.linalg.eigh(natural.covariance.double())
    whiten, mean = (directions * (variances + PATCH_VARIANCE).rsqrt()).float(), natural.mean.float()

    def unlikeness(images: Tensor) -> Tensor:
        patches = to_patches(images.flatten(0, 1), model.patch_size)
        distances: Tensor = ((patches - mean) @ whiten).square().view(len(images), -1).mean(dim=1)
        return distances

    return unlikeness


@dataclass(frozen=True)
class Job:
    """One search: an upload, prepared, and a start.

    Attributes:
        start: (batch, 3, size, size).
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
    """The loss of the candidates of some jobs, one candidate for each.

    Args:
        options: Objective and weights.
        model: States the sizes.
        comparison: Computes candidates' gradients.
        jobs: Their targets, labels and masks.
        prior: Penalty on unnatural patches; None without a weight.
    """

    def __init__(
        self,
        options: GradientMatchingOptions,
        model: VitClassifier,
        comparison: Comparison,
        jobs: Sequence[Job],
        prior: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._options, self._model, self._comparison, self._prior = options, model, comparison, prior
        self._labels = torch.stack([job.labels for job in jobs])
        self._norms = torch.stack([job.norm for job in jobs])
        masks = [job.mask for job in jobs if job.mask is not None]
        self._mask = torch.stack(masks) if masks else None
        self._targets = {name: torch.stack([job.targets[name] for job in jobs]) for name in jobs[0].targets}
        positions = torch.stack([job.positions for job in jobs])[:, self._model.prefix_tokens :]
        self._visible = (positions != 0).any(dim=2, keepdim=True)
        if self._mask is not None:  # under noise there are rows at masked places, too
            self._visible &= ~self._mask.all(dim=1)[..., None]
        self._positions = self._informative(positions)

    def __call__(self, images: Tensor) -> Tensor:
        """Compute the loss of candidates, (candidates,)."""
        agreement = self._comparison.agreement(Candidates(images, self._labels, self._mask), self._targets)
        return self._distances(agreement) + self._penalties(images)

    def _distances(self, agreement: Agreement) -> Tensor:
        # The targets were divided by their norm. In float64, as the ratio of two norms may be anything.
        ratio = 1 / (agreement.scale.double() * self._norms)
        products, squares = agreement.products.sum(dim=1), agreement.squares.sum(dim=1)
        total = self._distance(products, squares, torch.ones_like(squares), ratio)
        if self._options.position_weight:
            rows = self._informative(agreement.positions[:, self._model.prefix_tokens :])
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
            total = total + self._options.seams * patch_seams(images, self._model.patch_size)
        if self._prior is not None:
            total = total + self._options.patch_prior * self._prior(images)
        return total
