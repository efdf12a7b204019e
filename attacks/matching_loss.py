"""The loss of gradient matching: distances of gradients, and penalties on unnatural pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.matching_gradients import Agreement, Candidates, Comparison
from attacks.matching_options import GradientMatchingOptions
from attacks.matching_priors import PatchPrior, patch_seams, total_variation
from fedmjp.models.classifier import VitClassifier

# Below the square of any rounding error of scaled gradients.
TINY = 1e-30


@dataclass(frozen=True)
class Job:
    """One search: an upload, prepared, and a start.

    Attributes:
        start: (batch, 3, size, size) in [0, 1].
        labels: (batch,) int64.
        mask: (batch, patches) bool; None for no mask.
        norm: (), of all matched gradients, float64.
        targets: Name to gradient over that norm, float32.
        positions: (tokens, dim) gradient of the position embedding over that norm, float32; zeros where
            it is not used.
    """

    start: Tensor
    labels: Tensor
    mask: Tensor | None
    norm: Tensor
    targets: Mapping[str, Tensor]
    positions: Tensor


class Loss:
    """The loss of the candidates of some jobs, one value per candidate.

    Args:
        options: Objective and weights.
        model: Gives sizes.
        comparison: Computes the candidates' gradients.
        jobs: One per candidate.
        prior: The patch prior, where it has a weight.
    """

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
        """(candidates, batch, 3, size, size) to (candidates,)."""
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
