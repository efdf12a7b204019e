"""Solvers for ``rows^T X = right``: exact, of minimum norm, and Bayesian with a Gaussian prior.

All take stacks of systems: ``rows`` (stack, unknowns, equations), ``right`` (stack, equations, values), float64; they
return (stack, unknowns, values).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Of the largest: token gradients of natural pictures stay ten times above it, float32 rounding does not.
NEGLIGIBLE = 1e-6
# The diagonal of a QR decomposition, in the same unit, hides dependent rows: it is some thirty times above that.
SUSPICIOUS = 1e-4
# On that diagonal, too: all singular values are then far above float64 rounding.
UNCERTAIN = 1e-10


@dataclass(frozen=True)
class GaussianPrior:
    """A normal distribution of a vector: mean (values,) and covariance (values, values), float64."""

    mean: Tensor
    covariance: Tensor

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return variances, ascending, and the directions (values, values) that have them, a column each."""
        variances, directions = torch.linalg.eigh(self.covariance)
        return variances.clamp(min=0), directions

    @property
    def precision(self) -> Tensor:
        """Return the pseudo-inverse of the covariance, (values, values): rounding of float64 counts as nothing."""
        variances, directions = self.spectrum
        rounding = len(variances) * torch.finfo(variances.dtype).eps * variances[-1]
        return (directions * torch.where(variances > rounding, 1 / variances, 0.0)) @ directions.mT


@dataclass(frozen=True)
class PosteriorEstimate:
    """Posterior means (stack, unknowns, values), and the noise that was estimated (stack,).

    The noise is the standard deviation on the right-hand side, relative to its root mean square.
    """

    values: Tensor
    noise: Tensor


def least_squares(rows: Tensor, right: Tensor) -> Tensor:
    """Solve by least squares with QR, for at most as many unknowns as equations.

    Systems whose rows are dependent up to the rounding of a float32 upload are solved with minimum norm: rows that
    are equal share their value.

    Args:
        rows: (stack, unknowns, equations) float64.
        right: (stack, equations, values) float64.
    """
    orthogonal, triangular = _factorised(rows.mT)
    diagonal = triangular.diagonal(dim1=-2, dim2=-1).abs()
    dependent = diagonal.amin(dim=-1) <= SUSPICIOUS * diagonal.amax(dim=-1)
    singular = torch.linalg.svdvals(triangular[dependent])
    dependent[dependent.clone()] = singular[:, -1] <= NEGLIGIBLE * singular[:, 0]
    solution = torch.empty(*rows.shape[:2], right.shape[-1], dtype=rows.dtype, device=rows.device)
    unique = ~dependent
    projected = orthogonal[unique].mT @ right[unique]
    solution[unique] = torch.linalg.solve_triangular(triangular[unique], projected, upper=True)
    if dependent.any():
        solution[dependent] = minimum_norm(rows[dependent], right[dependent], cut_off=NEGLIGIBLE)
    return solution


def minimum_norm(rows: Tensor, right: Tensor, *, cut_off: float | None = None) -> Tensor:
    """Solve by least squares with minimum norm, on the CPU, where alone LAPACK's gelsd exists.

    Args:
        rows: (stack, unknowns, equations) float64.
        right: (stack, equations, values) float64.
        cut_off: Singular values below this share of the largest count as zero; without it, those below float64
            rounding, as in breaching. A QR decomposition, a tenth of the time, then serves where its diagonal is far
            above rounding.
    """
    tall, values = rows.mT.cpu(), right.cpu()
    solution = _by_full_rank(tall, values) if cut_off is None else None
    if solution is None:
        solution = torch.linalg.lstsq(tall, values, rcond=cut_off, driver="gelsd").solution
    return solution.to(rows.device)


def _by_full_rank(matrices: Tensor, right: Tensor) -> Tensor | None:
    """Solve by minimum-norm least squares with QR; None where a matrix may lack rank."""
    wide = matrices.shape[-2] < matrices.shape[-1]
    orthogonal, triangular = torch.linalg.qr(matrices.mT if wide else matrices)
    diagonal = triangular.diagonal(dim1=-2, dim2=-1).abs()
    if bool((diagonal.amin(dim=-1) <= UNCERTAIN * diagonal.amax(dim=-1)).any()):
        return None
    solution: Tensor
    if wide:
        solution = orthogonal @ torch.linalg.solve_triangular(triangular.mT, right, upper=False)
    else:
        solution = torch.linalg.solve_triangular(triangular, orthogonal.mT @ right, upper=True)
    return solution


def positive_solution(matrices: Tensor, right: Tensor) -> Tensor:
    """Solve positive definite systems by Cholesky.

    Those that rounding has made indefinite are solved by LU, one by one: with two threads, oneMKL's LU of a stack
    stopped at pivots that are no rows.

    Args:
        matrices: (stack, n, n).
        right: (stack, n).
    """
    lower, code = torch.linalg.cholesky_ex(matrices)
    solution = torch.cholesky_solve(right[:, :, None], lower)[:, :, 0]
    for index in code.nonzero().flatten().tolist():
        solution[index] = torch.linalg.solve(matrices[index], right[index])
    return solution


def posterior_mean(
    rows: Tensor, right: Tensor, prior: GaussianPrior, rounding: float, *, cut_off: float = 0.0
) -> PosteriorEstimate:
    """Return the mean of X given ``right = rows^T X + noise``, each row of X drawn from ``prior`` (Wiener filter).

    In the eigenvectors of the covariance and the singular vectors of ``rows`` everything is
    diagonal, so that one singular-value decomposition solves it:
    x_kj = s_k l_j / (s_k^2 l_j + n_j) * observed_kj, with singular values s, prior variances l and
    noise variances n. The noise is estimated: it is what is left of ``right`` outside the span of
    ``rows``, per prior direction j, because an error in ``rows`` is multiplied by the values it
    meets. Nothing is left where there are no more equations than unknowns; then, and as a lower bound
    always, the noise is the rounding of the upload's number format.

    Args:
        rows: (stack, unknowns, equations) float64.
        right: (stack, equations, values) float64.
        prior: The prior of a row of X.
        rounding: The relative error of the upload's number format.
        cut_off: Share of the largest singular value of ``rows`` below which the prior decides.
    """
    variances, directions = prior.spectrum
    centred = right - rows.sum(dim=1)[:, :, None] * prior.mean
    rotated = centred @ directions
    # The singular vectors of a tall matrix by way of its QR: a tenth of the time.
    orthogonal, triangular = _factorised(rows.mT)
    left_vectors, singular, unknowns = _decomposed(triangular)
    singular = torch.where(singular > cut_off * singular[:, :1], singular, 0.0)
    inside = orthogonal.mT @ rotated
    # The smallest normal number keeps an exact system from dividing zero by zero.
    noise = (rounding**2 * rotated.square().mean(dim=1)).clamp(min=torch.finfo(rotated.dtype).tiny)
    if (freedom := rotated.shape[1] - singular.shape[-1]) > 0:
        noise = torch.maximum((rotated - orthogonal @ inside).square().sum(dim=1) / freedom, noise)
    rotated_inside = left_vectors.mT @ inside
    signal = singular[:, :, None]
    gain = signal * variances / (signal.square() * variances + noise[:, None])
    values = prior.mean + (unknowns.mT @ (gain * rotated_inside)) @ directions.mT
    relative = (noise.mean(dim=1) / rotated.square().mean(dim=(1, 2))).sqrt()
    return PosteriorEstimate(values, relative)


def _factorised(tall: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a stack by QR, without CUDA's Householder, which takes one matrix after another."""
    if tall.is_cuda:
        return qr_by_cholesky(tall)
    orthogonal, triangular = torch.linalg.qr(tall)
    return orthogonal, triangular


def qr_by_cholesky(tall: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a stack by QR through Cholesky, twice; through Householder where these break down.

    As accurate as Householder's up to a condition of 1e8.

    Args:
        tall: (stack, rows, columns), no fewer rows than columns.

    Returns:
        Q (stack, rows, columns) and R (stack, columns, columns).

    References:
        Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm", ETNA 44, 2015.
    """
    once, first, failed = _by_cholesky(tall)
    orthogonal, second, failed_again = _by_cholesky(once)
    triangular = second @ first
    if bool((failed := failed | failed_again).any()):
        orthogonal[failed], triangular[failed] = torch.linalg.qr(tall[failed])
    return orthogonal, triangular


def _by_cholesky(tall: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q and R of each matrix, and whether that failed (stack,)."""
    lower, code = torch.linalg.cholesky_ex(tall.mT @ tall)
    return torch.linalg.solve_triangular(lower.mT, tall, upper=True, left=False), lower.mT, code != 0


def _decomposed(square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose a stack by singular values, without CUDA's routine, which takes one matrix after another."""
    if square.is_cuda:
        return svd_by_eigenvectors(square)
    left_vectors, singular, right = torch.linalg.svd(square, full_matrices=False)
    return left_vectors, singular, right


def svd_by_eigenvectors(square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose a stack by singular values through the eigenvectors of ``square square^T``.

    Singular values are resolved down to 1e-8 of the first. Smaller ones are rounding, and their rows of V^T no unit
    vectors.

    Args:
        square: (stack, n, n).

    Returns:
        U, S and V^T.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(square @ square.mT)
    left_vectors, singular = eigenvectors.flip(-1), eigenvalues.flip(-1).clamp(min=0).sqrt()
    resolved = singular[:, :, None].clamp(min=torch.finfo(singular.dtype).tiny)
    return left_vectors, singular, (left_vectors.mT @ square) / resolved
