"""The equations that the last layer's gradient is, in the features that it read.

With V (pictures, classes) the gradients of the loss at the logits and F (pictures, dim) the features, the head's weight
has the gradient G = V^T F and its bias g = V^T 1, where V = (softmax(F W^T + c) - T) / pictures and T are the targets.
G shows its row space R (pictures, dim), so that F = A R with few unknowns A (pictures, pictures).
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NORM_WEIGHT = 0.03  # of the equations of LayerNorm, beside those of the gradient, which are relative to its size


@dataclass(frozen=True)
class Head:
    """The last layer and the LayerNorm before it, as the server sent them, in float64."""

    weight: Tensor  # (classes, dim)
    bias: Tensor  # (classes,)
    scale: Tensor  # (dim,) of the LayerNorm
    shift: Tensor  # (dim,)

    def normed(self, raw_features: Tensor) -> Tensor:
        """Return the nearest features that have mean and variance as LayerNorm leaves them.

        Args:
            raw_features: (..., dim).
        """
        inner = (raw_features - self.shift) / self.scale
        inner = inner - inner.mean(-1, keepdim=True)
        inner = inner / inner.std(-1, keepdim=True, correction=0).clamp_min(torch.finfo(inner.dtype).tiny)
        features: Tensor = inner * self.scale + self.shift
        return features


@dataclass(frozen=True)
class HeadGradient:
    """What an upload tells of the last layer, float64: weight (classes, dim) and bias (classes,)."""

    weight: Tensor
    bias: Tensor
    noise: Tensor  # (classes,) norm of rounding and noise on a row of the weight, with the bias as one more column
    pictures: int
    smoothing: float = 0.0
    mixed: bool = False  # pictures are mixed in pairs, and so are their targets

    def targets(self, labels: Tensor) -> Tensor:
        """Return the targets (..., pictures, classes) of labels.

        Args:
            labels: (..., pictures) int64.
        """
        classes = len(self.bias)
        hot = torch.nn.functional.one_hot(labels, classes).to(self.bias)
        targets: Tensor = (1 - self.smoothing) * hot + self.smoothing / classes
        return targets


@dataclass(frozen=True)
class HeadState:
    """Unknowns A (starts, pictures, pictures), and what follows from them."""

    unknowns: Tensor
    slopes: Tensor  # V (starts, pictures, classes)
    probabilities: Tensor  # (starts, pictures, classes)
    misfit: Tensor  # (starts, classes, pictures + 1), relative to the size of the gradient
    mean: Tensor  # (starts, pictures) of the normalised features, 0 at the truth
    variance: Tensor  # (starts, pictures) of them less 1
    factors: Tensor  # (starts, pictures) of the slopes
    smoothing: Tensor  # (starts,) of the labels, beyond what is told
    models: Tensor | None  # (starts, free, classes, pictures + 1): the gradient is their sum, times what is free

    @property
    def relative(self) -> Tensor:
        """Return (starts,) misfit of the gradient relative to its size."""
        relative: Tensor = self.misfit.norm(dim=(-2, -1))
        return relative

    @property
    def cost(self) -> Tensor:
        """Return (starts,) sum of squares of all equations."""
        norms = self.mean.square().sum(-1) + self.variance.square().sum(-1)
        cost: Tensor = self.misfit.square().sum((-2, -1)) + NORM_WEIGHT**2 * norms
        return cost


class HeadEquations:
    """G = V^T F and g = V^T 1 on the row space of G, and what LayerNorm says of F.

    The bias is one more column of the gradient, of a feature that is a constant for all pictures. Rows of classes that
    are ``left_open`` say nothing: there the targets may be anything, and slopes count as 0.

    With ``groups`` the pictures of each group have a positive factor on their loss, which is solved for: the factors
    that fit best given the unknowns (variable projection, Golub and Pereyra, SIAM J. Numer. Anal., 1973). With
    ``smooths`` so is a smoothing of the labels.
    """

    def __init__(
        self,
        head: Head,
        gradient: HeadGradient,
        *,
        left_open: Collection[int] = (),
        groups: Tensor | None = None,
        smooths: bool = False,
    ) -> None:
        self.head, self.gradient, self.count = head, gradient, gradient.pictures
        self.groups, self.smooths = groups, smooths  # groups: (pictures,) int64
        self._kept = torch.ones_like(gradient.bias)
        self._kept[list(left_open)] = 0
        dim = gradient.weight.shape[1]
        self.rows = torch.linalg.svd(gradient.weight, full_matrices=False).Vh[: self.count]
        self.constant = dim**0.5  # a picture's features are of this size
        observed = gradient.weight @ self.rows.mT
        bias = gradient.bias[:, None] * self.constant
        self.observed = torch.cat([observed, bias], 1) * self._kept[:, None]
        self.size = self.observed.norm().clamp_min(torch.finfo(observed.dtype).tiny)
        self.noise = float((gradient.noise * self._kept).norm() / self.size)
        # What is in no row space of so many pictures is noise.
        self.outside = ((gradient.weight - observed @ self.rows) * self._kept[:, None]).norm() / self.size
        self._logits = head.weight @ self.rows.mT

    @cached_property
    def _norm(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Prepare mean and variance of (a R - shift) / scale: u a - m, and a C a - 2 h a + s."""
        inverse, dim = 1 / self.head.scale, len(self.head.scale)
        shifted = self.head.shift * inverse
        mean = self.rows @ inverse / dim
        square = (self.rows * inverse.square()) @ self.rows.mT / dim
        cross = self.rows @ (shifted * inverse) / dim
        return mean, shifted.mean(), square, cross, shifted.square().mean()

    def features(self, unknowns: Tensor) -> Tensor:
        """Return the features (..., pictures, dim).

        Args:
            unknowns: (..., pictures, pictures).
        """
        features: Tensor = unknowns @ self.rows
        return features

    def unknowns(self, features: Tensor) -> Tensor:
        """Solve for the unknowns of the nearest features.

        Args:
            features: (..., pictures, dim).
        """
        unknowns: Tensor = features @ self.rows.mT
        return unknowns

    def state(self, unknowns: Tensor, targets: Tensor) -> HeadState:
        """Evaluate the equations.

        Args:
            unknowns: (starts, pictures, pictures).
            targets: (starts, pictures, classes).
        """
        probabilities = torch.softmax(unknowns @ self._logits.mT + self.head.bias, -1)
        slopes = (probabilities - targets) * self._kept / self.count
        factors, smoothing, models = torch.ones_like(unknowns[..., 0]), torch.zeros_like(unknowns[:, 0, 0]), None
        if self.groups is not None:
            bases = self._bases(slopes, targets)
            models = bases.mT @ self._with_constant(unknowns)[:, None]
            free = self._free(models)
            slopes = (free[..., None, None] * bases).sum(1)
            factors = free[:, self.groups]
            smoothing = free[:, -1] / free[:, 0] if self.smooths else smoothing
        misfit = self.misfit(unknowns, slopes)
        u, m, square, cross, s = self._norm
        mean = unknowns @ u - m
        variance = ((unknowns @ square) * unknowns).sum(-1) - 2 * unknowns @ cross + s - 1
        return HeadState(unknowns, slopes, probabilities, misfit, mean, variance, factors, smoothing, models)

    def _bases(self, slopes: Tensor, targets: Tensor) -> Tensor:
        """Return (starts, free, pictures, classes): the slopes are their sum, times what is free."""
        assert self.groups is not None  # noqa: S101 (else nothing is free)
        members = torch.nn.functional.one_hot(self.groups).to(slopes).mT
        bases = slopes[:, None] * members[..., None]
        if not self.smooths:
            return bases
        smoothed = (targets - 1 / targets.shape[-1]) * self._kept / self.count
        return torch.cat([bases, smoothed[:, None]], 1)

    def _free(self, models: Tensor) -> Tensor:
        """Solve for what is free (starts, free), of which nothing is negative; NaN where that overflows."""
        flat = models.flatten(2)
        free: Tensor = _solved_gram(flat, flat @ self.observed.flatten()[:, None])[..., 0]
        return free.clamp_min(0)

    def misfit(self, unknowns: Tensor, slopes: Tensor) -> Tensor:
        """Return (starts, classes, pictures + 1): the unexplained part of the gradient, relative to its size.

        Args:
            unknowns: (starts, pictures, pictures).
            slopes: (starts, pictures, classes).
        """
        misfit: Tensor = (slopes.mT @ self._with_constant(unknowns) - self.observed) / self.size
        return misfit

    def steps(self, state: HeadState) -> Tensor:
        """Differentiate a picture's slopes by its unknowns: (starts, pictures, classes, pictures)."""
        inner = self._logits - (state.probabilities @ self._logits)[..., None, :]
        scaled = state.probabilities * self._kept * state.factors[..., None]
        steps: Tensor = scaled[..., None] * inner / self.count
        return steps

    def normal(self, state: HeadState, *, variance: bool = True) -> tuple[Tensor, Tensor]:
        """Compute the Gauss-Newton matrix (starts, n, n) and gradient (starts, n) of half the cost, n = pictures^2."""
        count, steps, unknowns = self.count, self.steps(state), state.unknowns
        extended = self._with_constant(unknowns)
        flat = steps.transpose(1, 2).flatten(2)
        pairs = (flat.mT @ flat).view(-1, count, count, count, count)
        crossed = torch.einsum("sbk,sckl->sbcl", state.slopes, steps)
        one_way = torch.einsum("sbcl,scj->sbjcl", crossed, unknowns)
        matrix = pairs.mul_((extended @ extended.mT)[:, :, None, :, None])
        matrix += one_way
        matrix += one_way.permute(0, 3, 4, 1, 2)
        diagonal = torch.arange(count)
        matrix[:, :, diagonal, :, diagonal] += state.slopes @ state.slopes.mT
        matrix /= self.size**2
        slope = self.pulled(state, state.misfit, steps)
        if state.models is not None:
            matrix = self._projected(state, steps, matrix, state.models / self.size)
        u, _, square, cross, _ = self._norm
        rows = 2 * (unknowns @ square - cross) * float(variance)
        curvature = u[:, None] * u + rows[..., :, None] * rows[..., None, :]
        matrix[:, diagonal, :, diagonal, :] += NORM_WEIGHT**2 * curvature.transpose(0, 1)
        slope = slope + NORM_WEIGHT**2 * (state.mean[..., None] * u + state.variance[..., None] * rows)
        return matrix.reshape(-1, count**2, count**2), slope.flatten(1)

    def _projected(self, state: HeadState, steps: Tensor, matrix: Tensor, models: Tensor) -> Tensor:
        """Take out of the Gauss-Newton matrix what is free, which is solved for anew at each state."""
        pulls = [self.pulled(state, model, steps).flatten(1) for model in models.unbind(1)]
        border, flat = torch.stack(pulls, 1), models.flatten(2)
        explained = border.mT @ _solved_gram(flat, border)
        projected: Tensor = matrix - explained.view_as(matrix)
        return projected

    def pulled(self, state: HeadState, misfit: Tensor, steps: Tensor) -> Tensor:
        """Multiply a misfit by the transposed derivative of the misfit: (starts, pictures, pictures).

        Args:
            state: Where.
            misfit: (starts, classes, pictures + 1).
            steps: Of that state.
        """
        direct = state.slopes @ misfit[..., : self.count]
        through = torch.einsum("sbk,sbkj->sbj", self._with_constant(state.unknowns) @ misfit.mT, steps)
        pulled: Tensor = (direct + through) / self.size
        return pulled

    def moved_slopes(self, state: HeadState, change: Tensor) -> Tensor:
        """Return (starts, pictures, classes): how slopes change with the unknowns, to first order.

        Args:
            state: Where.
            change: (starts, pictures, pictures) of the unknowns.
        """
        logits = change @ self._logits.mT
        weighted = state.probabilities * logits
        inner = weighted - state.probabilities * weighted.sum(-1, keepdim=True)
        moved: Tensor = inner * state.factors[..., None] / self.count
        return moved

    def solved(self, slopes: Tensor) -> Tensor:
        """Solve for the unknowns by least squares, given slopes.

        Args:
            slopes: (..., pictures, classes).
        """
        gram = slopes @ slopes.mT
        right = slopes @ self.observed[:, : self.count]
        solved: Tensor = torch.linalg.lstsq(gram, right).solution
        return solved

    def targets(self, unknowns: Tensor) -> Tensor:
        """Return the targets (pictures, classes) that leave the least misfit in every row.

        Args:
            unknowns: (pictures, pictures).
        """
        slopes = torch.linalg.lstsq(self._with_constant(unknowns).mT, self.observed.mT).solution
        targets: Tensor = torch.softmax(unknowns @ self._logits.mT + self.head.bias, -1) - self.count * slopes
        return targets

    def _with_constant(self, unknowns: Tensor) -> Tensor:
        return torch.cat([unknowns, torch.full_like(unknowns[..., :1], self.constant)], -1)


def _solved_gram(rows: Tensor, right: Tensor) -> Tensor:
    """Solve with the Gram matrix of rows (..., n, entries); NaN where it is not finite or singular."""
    factor, failed = torch.linalg.cholesky_ex(rows @ rows.mT)
    solved = torch.cholesky_solve(right, factor)
    return torch.where(failed[..., None, None] > 0, torch.nan, solved)
