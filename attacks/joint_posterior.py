"""The picture from equations of which both sides are known in part: D^T X = G with errors in D and in G.

D gets a normal prior whose covariance between patches is learned, X that of natural pictures. D is integrated out:
given X, each row of G is one normal observation whose covariance holds what is not known of D. Gauss-Newton steps
on X alternate with the posterior of D, which is linear. Where entries are known between bounds
(``fedmjp.attacks.entries``), these are replaced by observations anew in every round.

Noise that is assumed besides falls from round to round: with little of it at first, the nearest of many pictures that
fit would be settled on. Where entries are bounds, some of G are held out, and the round that predicts these best is
taken: later ones fit D to its gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.entries import Entries, Observations
from fedmjp.attacks.mjp.closing import conjugate_gradients
from fedmjp.attacks.natural_patches import natural_inputs
from fedmjp.attacks.natural_pictures import NaturalPictures
from fedmjp.models.entrance import Entrance, count_patches
from fedmjp.patches import from_patches, to_patches
from fedmjp.seeds import torch_generator

LOUDEST, FALL, FAINTEST = 0.2, 0.7, 1e-4  # of the noise that is assumed besides, over the rms of G
STEPS = 60  # of conjugate gradients in a round
PRECISE = 1e-3
LEARNING = 8  # rounds in which the prior of D is learned: later ones would learn what they fit
HELD_OUT = 0.04  # share of the entries of G
PATIENCE = 4  # rounds without a better prediction, or without less noise
BETTER = 0.95  # share of the last best below which a prediction is one
DROWNED = 0.3  # of the noise that is there, below which no other is assumed besides
RESCALED = 1.25  # factor by which the size of D changes in a round at most, where signs leave it open
RIDGE = 1e-8
TOGETHER = 16  # systems that are written out at once


@dataclass(frozen=True)
class Equations:
    """All uploads of the same weights: they share D and G, and differ by what was done to them.

    Attributes:
        rows: Per upload, the entries of D^T, (dim, patches).
        right: Per upload, the entries of G, (dim, values).
    """

    rows: Sequence[Entries]
    right: Sequence[Entries]


class PicturePrior:
    """The prior of X: its precision, and its own eigenvectors where patches are taken for independent.

    Args:
        model: States the sizes.

    Raises:
        AttackNotApplicableError: If there is none for the model's image size.
    """

    def __init__(self, model: Entrance) -> None:
        self.size, self.patch_size = model.pixels[0], model.patch_size
        self.prior = NaturalPictures.for_model(model)
        covariance = natural_inputs(model).covariance
        variances, self.directions = torch.linalg.eigh(covariance)
        self.variances = variances.clamp(min=RIDGE * float(variances.max()))
        self.mean = self.prior.mean.double().repeat_interleave(self.patch_size**2).expand(count_patches(model), -1)
        self.power = float(self.variances.mean() + self.mean[0].square().mean())

    def slope(self, patches: Tensor) -> Tensor:
        """Multiply the difference to the mean by the precision, float32.

        Args:
            patches: Differences (patches, values).
        """
        image = from_patches(patches.float()[None], self.size, self.patch_size)[0]
        return to_patches(self.prior.slope(image)[None], self.patch_size)[0]


class EquationBelief:
    """Equations of the same weights, and a normal belief about their D, scaled so that G has a mean square of 1.

    Args:
        equations: Those of the same weights.
        power: Mean square of a picture's values under the prior.
    """

    def __init__(self, equations: Equations, power: float) -> None:
        scale = 1 / _rms(equations.right[0])
        self.rows = [entries.scaled(scale) for entries in equations.rows]
        self.right = [entries.scaled(scale) for entries in equations.right]
        first = self.right[0].low
        patches = self.rows[0].low.shape[1]
        self.bounded = not all(entries.is_exact for entries in (*self.rows, *self.right))
        drawn = torch.rand(first.shape, generator=torch_generator(0, "held out"))
        self.held_out = (drawn < HELD_OUT * self.bounded).to(first.device)
        variance = 1 / (patches * power)  # of D, so that those of D^T X are 1
        self.prior = variance * torch.eye(patches, dtype=first.dtype, device=first.device)
        nothing = first.new_zeros(len(first), patches)
        self.rows_seen = [entries.observed(nothing, nothing + variance) for entries in self.rows]
        self.right_seen = [entries.observed(torch.zeros_like(first), torch.ones_like(first)) for entries in self.right]
        self.weights, self.target = self._right(LOUDEST)
        self.mean, self.covariance = self._solve(None)
        # Before anything is known of X, what is not known of D counts as noise of its own on every entry.
        doubt = self.covariance.diagonal(dim1=1, dim2=2).sum(dim=1, keepdim=True).double() * power
        self.weights = self.weights / (1 + self.weights * doubt)

    @property
    def noise(self) -> float:
        """Return the typical deviation of the entries of G that are not bounds; 0 of bounds."""
        return 0.0 if self.bounded else float(self.right_seen[0].precision.median()) ** -0.5

    def believe(self, patches: Tensor, noise: float, *, learn: bool) -> None:
        """Update D from its own entries and, given X, those of G.

        Args:
            patches: X, (patches, values).
            noise: Deviation of the noise that is assumed besides.
            learn: Whether the prior of D is learned, too.
        """
        self.weights, self.target = self._right(noise)
        self.mean, self.covariance = self._solve(patches)
        if learn:
            outer = self.mean.T @ self.mean + self.covariance.double().mean(dim=0) * len(self.mean)
            self.prior = outer / len(self.mean)

    def observe(self, patches: Tensor, variances: Tensor) -> None:
        """Update what bounds say.

        Args:
            patches: X, (patches, values).
            variances: The variances of its entries.
        """
        if not self.bounded:
            return
        row_variances = self.covariance.diagonal(dim1=1, dim2=2).double().expand_as(self.mean)
        shared = self.covariance.double().mean(dim=0)
        doubt = (patches * (shared @ patches)).sum(dim=0) * (row_variances.mean(dim=1) / shared.diagonal().mean())[
            :, None
        ]
        predicted, spread = self.mean @ patches, self.mean.square() @ variances + row_variances @ variances + doubt
        self.right_seen = _observed(self.right, predicted, spread, self.right_seen)
        if self.right[0].magnitude is not None:
            normal = (predicted.square() + spread).mean().sqrt() * (2 / torch.pi) ** 0.5  # its mean magnitude
            factor = float((self.right[0].magnitude / normal).clamp(1 / RESCALED, RESCALED))
            self.mean, self.prior = self.mean * factor, self.prior * factor**2
        self.rows_seen = _observed(self.rows, self.mean, row_variances, self.rows_seen)

    @property
    def doubt(self) -> Tensor:
        """Sum the covariances of the rows of D^T, (patches, patches), by how much G weighs them."""
        weights = self.weights.mean(dim=1)
        if len(self.covariance) == 1:
            return weights.sum() * self.covariance[0].double()
        return torch.einsum("k,kpq->pq", weights.float(), self.covariance).double()

    def gradient(self, patches: Tensor, doubt: Tensor) -> Tensor:
        """Differentiate the log likelihood of G by X, with D integrated out, after ``believe`` at the same X.

        Args:
            patches: X, (patches, values).
            doubt: The property of this name, or zeros where D counts as known.
        """
        gradient: Tensor = self.mean.T @ (self.weights * (self.target - self.mean @ patches)) - doubt @ patches
        return gradient

    def missed(self, patches: Tensor) -> Tensor:
        """Return the mean square by which held-out entries are predicted outside of their bounds.

        Args:
            patches: X, (patches, values).
        """
        predicted, entries = (self.mean @ patches)[self.held_out], self.right[0]
        low, high = entries.low[self.held_out], entries.high[self.held_out]
        nearest = (low + high) / 2 if entries.peaked else torch.minimum(torch.maximum(predicted, low), high)
        error: Tensor = (predicted - nearest).square().mean()
        return error

    def _right(self, noise: float) -> tuple[Tensor, Tensor]:
        combined = sum(self.right_seen[1:], self.right_seen[0])
        weights = (combined.precision / (1 + combined.precision * noise**2)).masked_fill(self.held_out, 0.0)
        return weights, combined.value

    def _solve(self, patches: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return posterior mean (dim, patches) and covariance of D^T, one covariance for all rows where they agree."""
        combined = sum(self.rows_seen[1:], self.rows_seen[0])
        count = self.prior.shape[0]
        ridge = (
            RIDGE * self.prior.diagonal().mean() * torch.eye(count, dtype=self.prior.dtype, device=self.prior.device)
        )
        inverse, stated = torch.linalg.inv(self.prior + ridge), combined.precision * combined.value
        weights, own_precision = self.weights, combined.precision
        if bool((weights == weights[:1]).all()) and bool((own_precision == own_precision[:1]).all()):
            weights, own_precision = weights[:1], own_precision[:1]
        precision = inverse + torch.diag_embed(own_precision)
        if patches is not None:
            for start in range(0, len(weights), TOGETHER):
                part = slice(start, start + TOGETHER)
                precision[part] += (patches * weights[part, None]) @ patches.T
            stated = stated + (self.weights * self.target) @ patches.T
        factor = torch.linalg.cholesky(precision)
        if len(factor) == 1:
            mean = torch.cholesky_solve(stated.T, factor[0]).T
        else:
            mean = torch.cholesky_solve(stated[..., None], factor)[..., 0]
        return mean, torch.cholesky_inverse(factor).float()


def most_likely(systems: Sequence[Equations], pictures: PicturePrior, rounds: int) -> tuple[Tensor, dict[str, float]]:
    """Find the picture that several sets of equations state together.

    Args:
        systems: One per set of weights, on the model's device.
        pictures: The prior for the model's sizes.
        rounds: At most.

    Returns:
        Normalised patches (patches, values) float64, and diagnostics.
    """
    beliefs = [EquationBelief(equations, pictures.power) for equations in systems]
    patches, noise = pictures.mean.clone(), LOUDEST
    faintest = max(FAINTEST, DROWNED * min(belief.noise for belief in beliefs))
    best, least, best_round = patches, torch.inf, 0
    for number in range(rounds):
        if number:
            noise = max(faintest, noise * FALL)
            for belief in beliefs:
                belief.believe(patches, noise, learn=number <= LEARNING)
        patches, variances = _step(beliefs, pictures, patches, sure=number > 0)
        bounded = [belief.missed(patches) for belief in beliefs if belief.bounded]
        missed = float(torch.stack(bounded).mean()) if bounded else noise
        if missed < BETTER * least:
            best, least, best_round = patches, missed, number
        if number - best_round >= PATIENCE:
            break
        for belief in beliefs:
            belief.observe(patches, variances)
    return best, {"rounds": float(best_round + 1)}


def _step(
    beliefs: Sequence[EquationBelief], pictures: PicturePrior, patches: Tensor, *, sure: bool
) -> tuple[Tensor, Tensor]:
    """Take a Gauss-Newton step on X, with the variances of its entries; D counts as known unless it is ``sure``."""
    now, directions = patches.float(), pictures.directions
    means = [belief.mean.float() for belief in beliefs]
    weights = [belief.weights.float() for belief in beliefs]
    doubts = [belief.doubt if sure else torch.zeros_like(belief.prior) for belief in beliefs]
    doubt = torch.stack(doubts).sum(dim=0)
    coarse = doubt.float()

    def curvature(change: Tensor) -> Tensor:
        image = pictures.slope(change) + coarse @ change
        for belief, mean, weight in zip(beliefs, means, weights, strict=True):
            weighed = weight * (mean @ change)
            if sure:  # what another D explains says nothing of X
                weighed = weighed - weight * (_times(belief.covariance, weighed @ now.T) @ now)
            image = image + mean.T @ weighed
        return image

    gradient = -pictures.slope(patches - pictures.mean).double()
    gram = doubt.clone()
    share_left = torch.ones_like(pictures.variances)
    for belief, open_rows in zip(beliefs, doubts, strict=True):
        gradient = gradient + belief.gradient(patches, open_rows)
        gram = gram + belief.mean.T @ (belief.weights.mean(dim=1)[:, None] * belief.mean)
        if sure:
            rotated, shared = patches @ directions, belief.covariance.double().mean(dim=0)
            explained = belief.weights.mean() * (rotated * (shared @ rotated)).sum(dim=0)
            share_left = torch.minimum(share_left, (1 - explained).clamp(min=1e-3))
    strengths, axes = torch.linalg.eigh(gram)
    variances = 1 / (strengths.clamp(min=0)[:, None] * share_left + 1 / pictures.variances)
    across, along, scale = axes.float(), directions.float(), variances.float()

    def precondition(residual: Tensor) -> Tensor:
        conditioned: Tensor = across @ (scale * (across.T @ residual @ along)) @ along.T
        return conditioned

    change = conjugate_gradients(curvature, gradient.float(), precondition, steps=STEPS, precise=PRECISE)
    return patches + change.double(), axes.square() @ variances @ directions.square().T


def _times(covariance: Tensor, rows: Tensor) -> Tensor:
    if len(covariance) == 1:
        return rows @ covariance[0]
    return torch.bmm(covariance, rows[..., None])[..., 0]


def _observed(
    entries: Sequence[Entries], mean: Tensor, variance: Tensor, last: Sequence[Observations]
) -> list[Observations]:
    return [part.observed(mean, variance, previous) for part, previous in zip(entries, last, strict=True)]


def _rms(entries: Entries) -> float:
    """Return the root mean square of the sent entries, or the stated magnitude where bounds are endless."""
    if entries.magnitude is not None:
        return entries.magnitude
    return float(((entries.low + entries.high) / 2).square().mean().sqrt())


def agreement(first: Tensor, second: Tensor, pictures: PicturePrior) -> float:
    """Correlate two pictures beyond what all natural pictures share.

    Every direction of a patch counts as much as natural pictures make it rare; the mean patch does not count.

    Args:
        first: Normalised patches (patches, values).
        second: Normalised patches (patches, values).
        pictures: The prior.
    """
    former, latter = (
        (patches - patches.mean(dim=0)) @ pictures.directions / pictures.variances.sqrt() for patches in (first, second)
    )
    return float((former * latter).sum() / (former.norm() * latter.norm()))
