"""How often each known masked patch occurs, from what the visible ones attend to.

What is not found is nearly equal to something that is. A token that occurs twice has twice the weight in every softmax,
and the visible tokens' equations show their attention to far better than that. Their residuals are nearly linear in the
counts, which follow by least squares.
"""

import math

import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.func import jacfwd

from fedmjp.attacks.mjp.span.equations import PatchEquations, PatchSet, attended

SAMPLE = 48  # visible patches that tell counts
PASSES = 2  # in which counts and the weights of the residuals follow from each other
FIRM = 1e3  # weight of the equation that the counts add up, of the others'
GAIN = 1e-9  # of the cost: moving one copy must lower it by more
TINY = 1e-10  # of the mean diagonal, which makes the normal matrix positive definite


def with_copies(equations: PatchEquations, known: PatchSet) -> PatchSet:
    """As many masked patches as there are: the known ones, then copies of them, unless none is known."""
    missing, kinds = equations.unknowns - len(known.masked), len(known.masked)
    if not missing or not kinds:
        return known
    copies = torch.full((kinds,), missing // kinds)
    copies[: missing % kinds] += 1
    if len(known.visible):
        counts, matrix, vector = _fitted(equations, known)
        copies = _whole(matrix.cpu(), vector.cpu(), counts.cpu(), missing)
    again = known.masked.repeat_interleave(copies.to(known.masked.device), dim=0)
    return PatchSet(known.places, known.visible, torch.cat([known.masked, again]))


def _fitted(equations: PatchEquations, known: PatchSet) -> tuple[Tensor, Tensor, Tensor]:
    """(masked,) how many more of each masked patch there are, in parts, by what visible patches attend to.

    And the matrix and vector of the quadratic that they minimise.
    """
    missing, kinds = equations.unknowns - len(known.masked), len(known.masked)
    rows = torch.arange(0, len(known.visible), max(len(known.visible) // SAMPLE, 1), device=known.masked.device)
    counts = torch.full_like(known.masked[:, 0], missing / kinds)
    tokens = equations.tokens(known.visible[rows], known.places[rows])

    def residuals(copies: Tensor) -> Tensor:
        point = equations.at(attended(equations, known, 1 + copies)(tokens))
        return torch.cat([point.outside_inputs, point.outside_activations], dim=1)

    for _ in range(PASSES):
        point = equations.at(attended(equations, known, 1 + counts)(tokens))
        weights = 1 / torch.maximum(point.cost.sqrt(), equations.noise(point))
        derivative = (weights[:, None, None] * jacfwd(residuals)(counts)).flatten(0, 1)
        right = derivative @ counts - (weights[:, None] * residuals(counts)).flatten()
        matrix, vector = derivative.mT @ derivative, derivative.mT @ right
        counts = _non_negative(matrix, vector, missing).to(counts)
    return counts, matrix, vector


def _non_negative(matrix: Tensor, vector: Tensor, total: int) -> Tensor:
    """The x >= 0 of this sum that minimises x^T matrix x / 2 - vector^T x."""
    scale = matrix.diagonal().mean()
    root = torch.linalg.cholesky(matrix + TINY * scale * torch.eye(len(matrix)).to(matrix))
    firm = FIRM * scale.sqrt()
    right = torch.linalg.solve_triangular(root, vector[:, None], upper=False)[:, 0]
    left = torch.cat([root.mT, firm.expand(1, len(matrix))])
    return torch.from_numpy(nnls(left.cpu().numpy(), torch.cat([right, firm[None] * total]).cpu().numpy())[0])


def _whole(matrix: Tensor, vector: Tensor, counts: Tensor, total: int) -> Tensor:
    """Whole numbers of this sum: rounded down, then added and moved one by one, always where it costs least."""
    whole = counts.floor().clamp(max=total)
    one = torch.eye(len(whole), dtype=whole.dtype)

    def costs(candidates: Tensor) -> Tensor:
        return ((candidates @ matrix) * candidates).sum(dim=1) / 2 - candidates @ vector

    while (left := total - int(whole.sum())) != 0:
        candidates = whole + math.copysign(1, left) * one
        possible = (candidates >= 0).all(dim=1)
        whole = candidates[int(torch.where(possible, costs(candidates), math.inf).argmin())]
    while True:
        moved = (whole + one[None] - one[:, None]).flatten(0, 1)
        after = torch.where((moved >= 0).all(dim=1), costs(moved), math.inf)
        best, before = int(after.argmin()), costs(whole[None])[0]
        if not after[best] < before - GAIN * before.abs():
            return whole.long()
        whole = moved[best]
