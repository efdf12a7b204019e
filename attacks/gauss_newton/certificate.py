"""Whether a picture is right, told from residuals alone."""

import math
from dataclasses import dataclass

import torch

from fedmjp.attacks.gauss_newton.levenberg import Minimum
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.attacks.mjp.facts import LinearFacts

# Relative distance of gradients in units of float32's rounding; at the truth it is 11 to 19.
ROUNDED = 25.0
FLOAT32 = 2.0**-24
ENOUGH = (20 * FLOAT32) ** 2  # squared distance that is not worth a further step
ERROR = 10 ** (-40 / 20)  # root mean square of each picture's error, of 1, that a certificate promises: 40 dB


@dataclass(frozen=True)
class Certificate:
    """Of one solution."""

    residual: float  # relative distance of its gradients from the uploaded ones, in units of float32's rounding
    error: float  # the largest root mean square of a picture's error that distance and facts can hide, of 1

    @property
    def explained(self) -> bool:
        """Tell whether rounding explains the distance, so that no further search could do better."""
        return self.residual <= ROUNDED

    @property
    def holds(self) -> bool:
        """Tell whether rounding explains the distance, and no wrong picture nearby has so small a distance.

        Both hold for the pictures as sets of masked patches: their order is in no upload.
        """
        return self.explained and self.error <= ERROR

    def diagnostics(self) -> dict[str, float]:
        """Return the figures for the trial's row."""
        return {"content_certified": float(self.holds), "residual": self.residual, "expected_error": self.error}


def certify(minimum: Minimum, space: OpenSpace, facts: LinearFacts, deviation: float) -> Certificate:
    """Bound the error of a minimum whose distance is all error in its worst direction.

    To first order residuals r hide an error e of the unknowns with J e = r, so that |e| along any direction is at most
    |r| times what the inverse of J^T J = L L^T makes of it.

    Args:
        minimum: Of the residuals.
        space: That its unknowns are of.
        facts: That the space is of; they have errors of their own.
        deviation: Largest factor from the network's input space to [0, 1].
    """
    distance = math.sqrt(minimum.cost)
    error = math.sqrt(float(facts.variance.mean())) * deviation
    if len(minimum.point):
        factor, failed = torch.linalg.cholesky_ex(minimum.gram)
        if failed:  # a direction along which nothing is said of the pictures
            return Certificate(distance / FLOAT32, 1.0)
        inverse = torch.linalg.solve_triangular(factor.mT, torch.eye(len(factor)).to(factor), upper=True)
        hidden = space.root @ inverse.view(-1, space.root.shape[1], len(factor))
        worst = torch.linalg.eigvalsh(hidden @ hidden.mT)[:, -1].max().sqrt()
        error += distance * float(worst) / math.sqrt(space.natural.numel()) * deviation
    return Certificate(distance / FLOAT32, min(error, 1.0))
