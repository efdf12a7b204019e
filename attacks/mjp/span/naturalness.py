"""How natural coefficients are: the prior of natural patches, seen in the open directions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.natural_patches import natural_inputs
from fedmjp.models.classifier import VitClassifier


@dataclass(frozen=True)
class Naturalness:
    """Mahalanobis distance to the mean natural patch, as a function of a patch's coefficients."""

    affine: AffinePatches  # which patches are possible
    mean: Tensor  # (values,) of natural patches
    precision: Tensor  # (values, unknowns), inverse covariance times the open directions
    metric: Tensor  # (unknowns, unknowns), precision of the coefficients
    black: Tensor  # (values,), the least that a pixel can be
    white: Tensor  # (values,), the most

    @staticmethod
    def of(affine: AffinePatches, model: VitClassifier) -> "Naturalness":
        """Read the prior for patches of the model's size."""
        prior = natural_inputs(model)
        factor = torch.linalg.cholesky(prior.covariance)
        precision = torch.cholesky_solve(affine.basis.mT, factor)
        metric = affine.basis @ precision
        values = model.patch_size**2
        black, white = (
            ((limit - model.mean) / model.std).flatten().double().repeat_interleave(values) for limit in (0, 1)
        )
        return Naturalness(affine, prior.mean, precision, (metric + metric.mT) / 2, black, white)

    def patches(self, coefficients: Tensor, places: Tensor) -> Tensor:
        """Return patches (rows, values).

        Args:
            coefficients: (rows, unknowns).
            places: (rows,).
        """
        return self.affine.fixed[places] + coefficients @ self.affine.basis

    def excess(self, coefficients: Tensor, places: Tensor) -> Tensor:
        """Return (rows,) by how much the worst pixel leaves [0, 1].

        Args:
            coefficients: (rows, unknowns).
            places: (rows,).
        """
        patches, span = self.patches(coefficients, places), self.white - self.black
        beyond: Tensor = torch.maximum(patches - self.white, self.black - patches) / span
        return beyond.amax(dim=1).clamp(min=0)

    def nearest(self, patches: Tensor, place: int) -> Tensor:
        """Return the coefficients (rows, unknowns) of the possible patches that come nearest to given ones.

        Args:
            patches: (rows, values).
            place: A visible one.
        """
        solved: Tensor = torch.linalg.solve(self.metric, ((patches - self.affine.fixed[place]) @ self.precision).mT).mT
        return solved

    def draw(self, count: int, place: int, generator: torch.Generator) -> Tensor:
        """Draw (count, unknowns) of natural patches that are possible at a place.

        Args:
            count: How many.
            place: A visible one.
            generator: On the CPU.
        """
        noise = torch.randn(count, len(self.metric), generator=generator, dtype=torch.float64).to(self.metric)
        root = torch.linalg.cholesky(self.metric)
        deviation: Tensor = torch.linalg.solve_triangular(root.mT, noise.mT, upper=True).mT
        return self.nearest(self.mean[None], place) + deviation
