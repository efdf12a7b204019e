"""Which token stands where, and what patches are behind tokens.

A token is z = E x + b + e, with e the position embedding of its place. The server knows E, b and all e.
"""

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.first_mlp.tokens import centred
from attacks.linear_systems import NEGLIGIBLE, Gaussian
from attacks.mjp.affine import AffinePatches
from attacks.mjp.closing import close
from attacks.natural_patches import NaturalPatches
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

UNSURE = 3e-3  # of a token's values: errors that the places must bear


@dataclass(frozen=True)
class Entrance:
    """How patches become tokens, less what LayerNorms do not see: means over the dimensions."""

    weight: Tensor  # (dim, values)
    shift: Tensor  # (dim,)
    positions: Tensor  # (patches, dim)
    prior: Gaussian

    @staticmethod
    def of(model: VitClassifier) -> "Entrance":
        """Read it out of a model, in float64."""
        weight, bias, positions = (
            model.get_parameter(name).detach().double()
            for name in (names.PATCH_WEIGHT, names.PATCH_BIAS, names.POSITION_EMBEDDING)
        )
        prior = NaturalPatches.for_model(model).normalised(model)
        return Entrance(centred(weight.flatten(1).mT).mT, centred(bias), centred(positions[0, 1:]), prior)

    @property
    def shows_all(self) -> bool:
        """Whether a token without its mean determines its patch."""
        singular = torch.linalg.svdvals(self.weight)
        return self.weight.shape[1] < self.weight.shape[0] and bool(singular[-1] > NEGLIGIBLE * singular[0])

    def by_prior(self, tokens: Tensor) -> Tensor:
        """Places (tokens,) of tokens (tokens, dim): where what is left makes the most natural patches."""
        covariance = self.weight @ self.prior.covariance @ self.weight.mT
        noise = (UNSURE**2 * tokens.square().mean()) * torch.eye(len(covariance)).to(covariance)
        root = torch.linalg.cholesky(covariance + noise)

        def whitened(rows: Tensor) -> Tensor:
            solved: Tensor = torch.linalg.solve_triangular(root, rows.mT, upper=False)
            return solved.mT

        left = tokens - self.shift - self.weight @ self.prior.mean
        return assigned(torch.cdist(whitened(left), whitened(self.positions)).square().log())

    def by_patches(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """Places of tokens whose patches (tokens, values) are known."""
        return assigned(torch.cdist(tokens - self.shift - patches @ self.weight.mT, self.positions).square())

    def patches(self, tokens: Tensor, places: Tensor, model: VitClassifier) -> Tensor:
        """Patches (patches, values) in their places behind tokens in any order; the prior fills what is not seen."""
        left, singular, right = torch.linalg.svd(self.weight)
        seen = int((singular > NEGLIGIBLE * singular[0]).sum())
        stated = (tokens - self.shift - self.positions[places]) @ left[:, :seen] / singular[:seen] @ right[:seen]
        return close(AffinePatches(in_place(stated, places), right[seen:]), model)


def by_slopes(slopes: Tensor, rows: Tensor) -> Tensor:
    """Places of tokens with slopes (tokens, dim), where the position embedding has the gradients (patches, dim)."""
    return assigned(torch.cdist(slopes, rows) / (slopes.norm(dim=1)[:, None] + rows.norm(dim=1)))


def assigned(costs: Tensor) -> Tensor:
    """(tokens,) places, each once, of the least sum of costs (tokens, places)."""
    _, places = linear_sum_assignment(costs.cpu().numpy())
    return torch.from_numpy(places).to(costs.device)


def in_place(rows: Tensor, places: Tensor) -> Tensor:
    """Rows (tokens, values) in the order of the places that they belong to."""
    ordered = torch.empty_like(rows)
    ordered[places] = rows
    return ordered
