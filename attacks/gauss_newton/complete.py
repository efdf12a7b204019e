"""One picture from what the network says of its tokens and from the patch embedding's gradient.

No gradient behind the embedding shows more of a patch than its token does. The patch embedding's own, D^T X, shows the
rest: with the tokens, D is known, so that it is linear in X.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.entries import Entries, Observations
from fedmjp.attacks.first_block.places import TokenEmbedding, in_place
from fedmjp.attacks.gauss_newton.space import OpenSpace, Prior

ROUNDS = 8  # in which bounds are read, at most
SETTLED = 3e-3  # of what patches are off the mean: what changes less is settled


@dataclass(frozen=True)
class PatchPosterior:
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
    def of(space: OpenSpace, point: Tensor, spectrum: tuple[Tensor, Tensor], slopes: Tensor) -> "PatchPosterior":
        """Build from the end of a search.

        Args:
            space: That was searched.
            point: (unknowns,) where it ended.
            spectrum: Of the second derivative there of likelihood and prior together.
            slopes: (patches, dim), the loss's gradient at each token.
        """
        count, rank = len(space.natural), len(space.basis)
        strengths, axes = spectrum
        halves = axes * (strengths - 1).sqrt()  # the prior's is 1
        halves = torch.linalg.solve_triangular(space.root.mT, halves, upper=False)
        precision = halves @ halves.mT
        pull = torch.linalg.solve_triangular(space.root.mT, point[:, None], upper=False)
        along = space.patches(point)[0] @ space.basis.mT
        return PatchPosterior(along, precision.view(count, rank, count, rank), pull.view(count, rank), slopes)

    def gram(self, space: OpenSpace) -> Tensor:
        """Return the second derivative again, (unknowns, unknowns), by the unknowns of a space."""
        precision = self.precision.flatten(2).flatten(0, 1)
        gram: Tensor = space.root.mT @ precision @ space.root
        gram.diagonal().add_(1.0)
        return gram

    def moved(self, places: Tensor, directions: Tensor, embedding: TokenEmbedding) -> "PatchPosterior":
        """Move tokens to other places: their patches change to make up for the positions there.

        Args:
            places: (tokens,), the new ones.
            directions: (rank, values) along which patches may change.
            embedding: Of the model.
        """
        shifts = embedding.shifts(directions)
        along = self.along + shifts - shifts[places]
        source = places.argsort()
        precision = self.precision[source][:, :, source]
        return PatchPosterior(in_place(along, places), precision, self.pull[source], self.slopes[source])


def complete(stated: PatchPosterior, directions: Tensor, prior: Prior, patch_weight: Entries) -> Tensor:
    """Estimate patches (patches, values), in what tokens show and in what they do not.

    Args:
        stated: What the network says.
        directions: (rank, values) the directions.
        prior: Of natural pictures.
        patch_weight: Entries of the patch embedding's gradient (dim, values).
    """
    mean, slopes = prior.mean, stated.slopes
    count, values = mean.shape
    precision = prior.precision.view(count, values, count, values).clone()
    right = torch.einsum("avbw,bw->av", precision, mean)
    precision += torch.einsum("iv,aibj,jw->avbw", directions, stated.precision, directions)
    right += (torch.einsum("aibj,bj->ai", stated.precision, stated.along) + stated.pull) @ directions
    nothing = torch.zeros(slopes.shape[1], values).to(mean)
    if patch_weight.is_exact:
        patches, _ = _believed(precision, right, slopes, patch_weight.observed(nothing, nothing))
        return patches
    observations = Observations(nothing, nothing)
    patches, factor = _believed(precision, right, slopes, observations)
    for _ in range(ROUNDS):
        observations = patch_weight.observed(slopes.mT @ patches, _spread(factor, slopes), observations)
        last_patches, (patches, factor) = patches, _believed(precision, right, slopes, observations)
        if float((patches - last_patches).norm()) < SETTLED * float((patches - mean).norm()):
            break
    return patches


def _believed(precision: Tensor, right: Tensor, slopes: Tensor, observations: Observations) -> tuple[Tensor, Tensor]:
    """Estimate patches (patches, values) from observations of D^T X for slopes D; return their precision's factor."""
    count, values = right.shape
    every = torch.arange(values, device=right.device)
    precision = precision.clone()
    precision[:, every, :, every] += torch.einsum("ak,kv,bk->vab", slopes, observations.precision, slopes)
    right = right + slopes @ (observations.precision * observations.value)
    factor = torch.linalg.cholesky(precision.view(count * values, -1))
    return torch.cholesky_solve(right.view(-1, 1), factor).view(count, values), factor


def _spread(factor: Tensor, slopes: Tensor) -> Tensor:
    """Return the variance (dim, values) of D^T X, D being the slopes (patches, dim)."""
    count, values = len(slopes), len(factor) // len(slopes)
    every = torch.arange(values, device=factor.device)
    covariance = torch.cholesky_inverse(factor).view(count, values, count, values)[:, every, :, every]
    return torch.einsum("ak,vab,bk->kv", slopes, covariance, slopes)
