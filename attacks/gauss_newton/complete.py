"""One picture from what the network says of its tokens and from the patch embedding's gradient.

No gradient behind the embedding shows more of a patch than its token does. The patch embedding's own, D^T X, shows the
rest: with the tokens, D is known, so that it is linear in X.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.first_mlp.places import Entrance, in_place
from attacks.gauss_newton.picked import Known
from attacks.gauss_newton.space import OpenSpace, Prior


@dataclass(frozen=True)
class Stated:
    """Patches along the directions that tokens show, as a search found them: a normal distribution around these.

    Attributes:
        along: (patches, rank).
        precision: (patches, rank, patches, rank), of what the gradients behind the embedding say.
        pull: (patches, rank), the slope of their log likelihood, where a prior keeps the search from its maximum.
        slopes: (patches, dim), the loss's gradient at each token.
    """

    along: Tensor
    precision: Tensor
    pull: Tensor
    slopes: Tensor

    @staticmethod
    def of(space: OpenSpace, point: Tensor, gram: Tensor, slopes: Tensor) -> "Stated":
        """Of a point (unknowns,) with the second derivative ``gram`` of the likelihood and the prior together."""
        count, rank = len(space.natural), len(space.basis)
        strengths, axes = torch.linalg.eigh(gram - torch.eye(len(gram)).to(gram))
        halves = axes * strengths.clamp(min=0).sqrt()  # rounding makes the faintest negative
        halves = torch.linalg.solve_triangular(space.root.mT, halves, upper=False)
        precision = halves @ halves.mT
        pull = torch.linalg.solve_triangular(space.root.mT, point[:, None], upper=False)
        along = space.patches(point)[0] @ space.basis.mT
        return Stated(along, precision.view(count, rank, count, rank), pull.view(count, rank), slopes)

    def moved(self, places: Tensor, shown: Tensor, entrance: Entrance) -> "Stated":
        """The same tokens in other places (tokens,): patches (rank, values) make up for the positions there."""
        shifts = entrance.shifts(shown)
        along = self.along + shifts - shifts[places]
        source = places.argsort()
        precision = self.precision[source][:, :, source]
        return Stated(in_place(along, places), precision, self.pull[source], self.slopes[source])


def complete(stated: Stated, shown: Tensor, prior: Prior, patch_weight: Known) -> Tensor:
    """The most likely (patches, values), in what tokens show and in what they do not.

    Args:
        stated: What the network says.
        shown: (rank, values) the directions.
        prior: Of natural pictures.
        patch_weight: Entries of the patch embedding's gradient (dim, values).
    """
    mean, slopes = prior.mean, stated.slopes
    count, values = mean.shape
    precision = prior.precision.view(count, values, count, values).clone()
    right = torch.einsum("avbw,bw->av", precision, mean)
    precision += torch.einsum("iv,aibj,jw->avbw", shown, stated.precision, shown)
    right += (torch.einsum("aibj,bj->ai", stated.precision, stated.along) + stated.pull) @ shown
    dense = torch.zeros(slopes.shape[1], values).to(mean)
    weights, targets = dense.clone(), dense.clone()
    weights[patch_weight.rows, patch_weight.columns] = patch_weight.precision
    targets[patch_weight.rows, patch_weight.columns] = patch_weight.values
    of_entries = torch.einsum("ak,kv,bk->vab", slopes, weights, slopes)
    every = torch.arange(values, device=mean.device)
    precision[:, every, :, every] += of_entries
    right += slopes @ (weights * targets)
    factor = torch.linalg.cholesky(precision.view(count * values, -1))
    solved: Tensor = torch.cholesky_solve(right.view(-1, 1), factor)
    return solved.view(count, values)
