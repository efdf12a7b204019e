"""Labels that the upload does not show for certain: solve the pictures whose labels it does show, and then the rest.

The slopes of pictures of unknown labels are unknowns too, in any mixture. What is left of the gradient without the
pictures of known labels is the gradient of a smaller batch, whose labels are better shown.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedmjp.attacks.class_token.head import HeadEquations, HeadState
from fedmjp.attacks.class_token.search import SOLVED

ITERATIONS = 40
ATTEMPTS = 6  # of a step, with more damping each time


def solve_known(equations: HeadEquations, unknowns: Tensor, targets: Tensor, hidden: int) -> HeadState:
    """Solve for all unknowns and the slopes of the last pictures, whose targets do not count, by Levenberg-Marquardt.

    Args:
        equations: Of the head.
        unknowns: (pictures, pictures) where it begins.
        targets: (pictures, classes).
        hidden: How many last pictures.
    """
    known_count = equations.count - hidden
    state = equations.state(unknowns[None], targets[None])
    state = _with_slopes(equations, unknowns, targets, state.slopes[0, known_count:])
    damping = 1e-2
    for _ in range(ITERATIONS):
        if float(state.relative) < SOLVED:
            break
        matrix, slope = equations.normal(state)
        beside = torch.cat([state.unknowns[0], torch.full_like(unknowns[:, :1], equations.constant)], 1)[known_count:]
        mixed = _pulls(equations, state)[known_count:] * equations.size
        gram = beside @ beside.mT
        at_slopes = beside @ state.misfit[0].mT
        for _ in range(ATTEMPTS):
            inverse = torch.linalg.inv(gram + damping * torch.diag(gram.diagonal()))
            followed = torch.einsum("ab,bkn->akn", inverse, mixed)
            reduced = matrix[0] + damping * torch.diag(matrix[0].diagonal())
            reduced = reduced - torch.einsum("bkn,bkm->nm", mixed, followed)
            right = slope[0] - torch.einsum("bkn,bk->n", followed, at_slopes)
            factor, failed = torch.linalg.cholesky_ex(reduced)
            change = -torch.cholesky_solve(right[:, None], factor)[:, 0]
            moved = -inverse @ (at_slopes + mixed @ change) * equations.size
            trial = _with_slopes(
                equations,
                state.unknowns[0] + change.view_as(unknowns),
                targets,
                state.slopes[0, known_count:] + moved,
            )
            if not failed and bool(trial.cost < state.cost):
                state, damping = trial, damping / 5
                break
            damping *= 4
        else:
            break
    return state


def _with_slopes(equations: HeadEquations, unknowns: Tensor, targets: Tensor, slopes: Tensor) -> HeadState:
    """Return the state where the last pictures have slopes of their own, which do not follow from their unknowns."""
    state, known_count = equations.state(unknowns[None], targets[None]), len(unknowns) - len(slopes)
    state.slopes[0, known_count:] = slopes
    state.probabilities[0, known_count:] = 0  # so that the slopes have no derivative
    return replace(state, misfit=equations.misfit(state.unknowns, state.slopes))


def _pulls(equations: HeadEquations, state: HeadState) -> Tensor:
    """Return (pictures, classes, n): the misfit's transposed derivative times what one more slope adds to it."""
    unknowns, steps = state.unknowns[0], equations.steps(state)[0]
    gram = unknowns @ unknowns.mT + equations.constant**2
    direct = torch.einsum("ak,bj->bkaj", state.slopes[0], unknowns)
    through = torch.einsum("ab,akj->bkaj", gram, steps)
    pulls: Tensor = ((direct + through) / equations.size**2).flatten(2)
    return pulls
