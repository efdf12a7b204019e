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


def with_copies(equations: PatchEquations, patches: PatchSet) -> PatchSet:
    """Return as many masked patches as there are: the known ones, then copies of them, unless none is known."""
    missing, kinds = equations.unknowns - len(patches.masked), len(patches.masked)
    if not missing or not kinds:
        return patches
    copies = torch.full((kinds,), missing // kinds)
    copies[: missing % kinds] += 1
    if len(patches.visible):
        counts, matrix, vector = _fitted(equations, patches)
        copies = _whole(matrix.cpu(), vector.cpu(), counts.cpu(), missing)
    copied = patches.masked.repeat_interleave(copies.to(patches.masked.device), dim=0)
    return PatchSet(patches.places, patches.visible, torch.cat([patches.masked, copied]))


def _fitted(equations: PatchEquations, patches: PatchSet) -> tuple[Tensor, Tensor, Tensor]:
    """Fit how many more of each masked patch there are (masked,), in parts, to what visible patches attend to.

    And the matrix and vector of the quadratic that they minimise.
    """
    missing, kinds = equations.unknowns - len(patches.masked), len(patches.masked)
    rows = torch.arange(0, len(patches.visible), max(len(patches.visible) // SAMPLE, 1), device=patches.masked.device)
    counts = torch.full_like(patches.masked[:, 0], missing / kinds)
    tokens = equations.tokens(patches.visible[rows], patches.places[rows])

    def residuals(copies: Tensor) -> Tensor:
        point = equations.at(attended(equations, patches, 1 + copies)(tokens))
        return point.remainders

    for _ in range(PASSES):
        point = equations.at(attended(equations, patches, 1 + counts)(tokens))
        weights = 1 / torch.maximum(point.cost.sqrt(), equations.noise(point))
        derivative = (weights[:, None, None] * jacfwd(residuals)(counts)).flatten(0, 1)
        right = derivative @ counts - (weights[:, None] * residuals(counts)).flatten()
        matrix, vector = derivative.mT @ derivative, derivative.mT @ right
        counts = _non_negative(matrix, vector, missing).to(counts)
    return counts, matrix, vector


def _non_negative(matrix: Tensor, vector: Tensor, total: int) -> Tensor:
    """Return the x >= 0 of this sum that minimises x^T matrix x / 2 - vector^T x."""
    scale = matrix.diagonal().mean()
    root = torch.linalg.cholesky(matrix + TINY * scale * torch.eye(len(matrix)).to(matrix))
    firm = FIRM * scale.sqrt()
    right = torch.linalg.solve_triangular(root, vector[:, None], upper=False)[:, 0]
    rows = torch.cat([root.mT, firm.expand(1, len(matrix))])
    return torch.from_numpy(nnls(rows.cpu().numpy(), torch.cat([right, firm[None] * total]).cpu().numpy())[0])


def _whole(matrix: Tensor, vector: Tensor, counts: Tensor, total: int) -> Tensor:
    """Return whole numbers of this sum: rounded down, then added and moved one by one, where it costs least."""
    whole = counts.floor().clamp(max=total)
    units = torch.eye(len(whole), dtype=whole.dtype)

    def costs(candidates: Tensor) -> Tensor:
        return ((candidates @ matrix) * candidates).sum(dim=1) / 2 - candidates @ vector

    while (missing := total - int(whole.sum())) != 0:
        candidates = whole + math.copysign(1, missing) * units
        possible = (candidates >= 0).all(dim=1)
        whole = candidates[int(torch.where(possible, costs(candidates), math.inf).argmin())]
    while True:
        moved = (whole + units[None] - units[:, None]).flatten(0, 1)
        moved_costs = torch.where((moved >= 0).all(dim=1), costs(moved), math.inf)
        best, cost = int(moved_costs.argmin()), costs(whole[None])[0]
        if not moved_costs[best] < cost - GAIN * cost.abs():
            return whole.long()
        whole = moved[best]
