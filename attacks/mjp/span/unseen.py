"""Patches of which nothing is known but that others attend to them.

While tokens are missing, attention is off, and all equations with it. So every missing patch has a stand-in that takes
part in the attention and need not fulfil equations of its own. The stand-ins follow, together with the visible patches,
from the equations of these: Gauss-Newton as in ``joint``, in units of rounding. Masked patches that are found are held
fixed, which would become one where they are nearly alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import jacfwd

from fedmjp.attacks.linear_systems import NEGLIGIBLE
from fedmjp.attacks.mjp.closing import conjugate_gradients
from fedmjp.attacks.mjp.span.equations import LEVEL_WEIGHT, Attended, PatchEquations, PatchPoint, PatchSet, attended
from fedmjp.attacks.mjp.span.joint import transpose_of
from fedmjp.attacks.mjp.span.minimise import HARDER, SOFTER
from fedmjp.attacks.mjp.span.visible import VisiblePatches, good_patches

TRIALS, DAMPING = 4, 1e-3
ENOUGH = 0.01  # the iteration ends when the cost falls by less than this share
CONJUGATE, TOLERANCE = 40, 0.02  # steps of conjugate gradients, and where they may end
ALIKE = 0.05  # of the length of a patch: how far stand-ins are expected to be from what they are copies of
SAMPLE = 24  # visible patches from which the stand-ins' part of the preconditioner is taken
FIRM = 1e-6  # of its mean diagonal, always added to it: hardly determined directions stay where they are


@dataclass(frozen=True)
class CompletePatches:
    """All patches of a picture: those that have been found, and stand-ins for the others."""

    visible: VisiblePatches  # those that are not good are stand-ins
    masked: Tensor  # (found, unknowns)
    unseen: Tensor  # (missing, unknowns) stand-ins for masked ones
    around: Tensor  # what these are expected to resemble

    def found(self, equations: PatchEquations) -> PatchSet:
        """Return those that fulfil their own equations."""
        return good_patches(equations, self.visible, self.masked)

    def all(self, equations: PatchEquations) -> PatchSet:
        """Return all of them."""
        return PatchSet(equations.visible, self.visible.coefficients, torch.cat([self.masked, self.unseen]))

    def attended(self, equations: PatchEquations) -> Attended:
        """Return the map z -> z + o(z), with all of them in the attention."""
        return attended(equations, self.all(equations))

    def without(self, dropped: Tensor) -> "CompletePatches":
        """Turn masked patches into stand-ins.

        Args:
            dropped: (found,) bool.
        """
        unseen, around = (torch.cat([rows, self.masked[dropped]]) for rows in (self.unseen, self.around))
        return CompletePatches(self.visible, self.masked[~dropped], unseen, around)


def fitted(equations: PatchEquations, tokens: CompletePatches, steps: int) -> CompletePatches:
    """Move stand-ins, and good visible patches with them, to where the visible patches' equations hold best.

    Args:
        equations: Of the upload.
        tokens: All patches.
        steps: At most.
    """
    if not tokens.visible.good.any() or not len(tokens.masked) + len(tokens.unseen):
        return tokens
    problem = _Problem(equations, tokens)
    values, damping = problem.start, DAMPING
    for _ in range(steps):
        if equations.time_is_up():
            break
        residuals = problem.residuals(values)
        solver, old_cost = problem.solver(values, residuals), float(residuals.square().sum())
        cost = old_cost
        for _ in range(TRIALS):
            if equations.time_is_up():
                break
            step = solver(damping)
            if step is not None:
                cost = float(problem.residuals(values + step).square().sum())
                if cost < old_cost:
                    values, damping = values + step, damping * SOFTER
                    break
            damping *= HARDER
        if not cost < old_cost * (1 - ENOUGH):
            break
    return problem.moved(values)


class _Problem:
    """``values`` are the coefficients of good visible patches, which are ``stated``, then those of all stand-ins."""

    def __init__(self, equations: PatchEquations, tokens: CompletePatches) -> None:
        self.equations, self.tokens = equations, tokens
        whole, good = tokens.all(equations), tokens.visible.good
        self.whole, self.places = whole.coefficients, whole.all_places(equations)
        first, last = len(good) + len(tokens.masked), len(self.whole)
        self.stated = good.nonzero().flatten()
        self.stand_ins = torch.cat([(~good).nonzero().flatten(), torch.arange(first, last, device=good.device)])
        self.moving = torch.cat([self.stated, self.stand_ins])
        self.weights = 1 / equations.noise(self._point(self.whole, self.stated))
        # Rounding's part of each of the equations has the variance 1 / count.
        lengths = torch.cat([tokens.masked, tokens.unseen]).square().sum(dim=1)
        self.pull = (equations.unknowns / equations.count / lengths.mean()).sqrt() / ALIKE

    @property
    def start(self) -> Tensor:
        return self.whole[self.moving]

    def residuals(self, values: Tensor) -> Tensor:
        """Return all residuals, in units of what rounding makes of them."""
        whole = self._with(values)
        level = self.equations.level_error(whole, self.places)[self.moving] * self.weights.median()
        pulled = self.pull * (whole[len(whole) - len(self.tokens.around) :] - self.tokens.around)
        return torch.cat([self._outside(whole, self.stated, self.weights), level, pulled.flatten()])

    def moved(self, values: Tensor) -> CompletePatches:
        """Return the patches at these values."""
        whole, visible = self._with(values), self.tokens.visible
        visible_count, found_count = len(visible.good), len(self.tokens.masked)
        visible = replace(visible, coefficients=whole[:visible_count])
        return replace(self.tokens, visible=visible, unseen=whole[visible_count + found_count :])

    def solver(self, values: Tensor, residuals: Tensor) -> Callable[[float], Tensor | None]:
        """Return steps by damping; a step is None where the system is not positive definite in floating point."""
        whole, count = self._with(values), len(self.stated)
        point = self._point(whole, self.stated)
        blocks, _ = self.equations.normal(point, whole[self.stated], self.places[self.stated])
        blocks = blocks * self.weights.square()[:, None, None]
        scales = blocks.diagonal(dim1=1, dim2=2)
        of_one = self.pull.square() * torch.eye(blocks.shape[-1]).to(blocks)
        if len(self.stand_ins):
            of_one = of_one + self._of_a_stand_in(whole)
        firm = of_one.diagonal()
        masked = self.equations.mask[self.places[self.stand_ins]].to(of_one)
        level = LEVEL_WEIGHT * self.weights.median() * masked[:, None] * self.equations.level
        of_stand_ins = of_one + level[:, :, None] * level[:, None]
        # J v comes from J^T: w -> J^T w is linear, and its transpose is J.
        _, back = transpose_of(self.residuals, values)
        _, forward = transpose_of(back, torch.zeros_like(residuals))

        def step(damping: float) -> Tensor | None:
            damping_of_stated = damping * scales + NEGLIGIBLE * scales.mean(1, keepdim=True)
            damping_of_stand_ins = damping * firm + FIRM * firm.mean()
            factors, failures = torch.linalg.cholesky_ex(blocks + torch.diag_embed(damping_of_stated))
            stand_in_factors, failed = torch.linalg.cholesky_ex(of_stand_ins + torch.diag(damping_of_stand_ins))
            if failures.any() or failed.any():
                return None
            damped = torch.cat([damping_of_stated, damping_of_stand_ins.expand(len(values) - count, -1)])

            def precondition(vector: Tensor) -> Tensor:
                solved = torch.cholesky_solve(vector[:count, :, None], factors)
                return torch.cat([solved, torch.cholesky_solve(vector[count:, :, None], stand_in_factors)])[:, :, 0]

            def times(vector: Tensor) -> Tensor:
                return back(forward(vector)) + damped * vector

            return conjugate_gradients(times, -back(residuals), precondition, steps=CONJUGATE, precise=TOLERANCE)

        return step

    def _with(self, values: Tensor) -> Tensor:
        return self.whole.index_copy(0, self.moving, values)

    def _point(self, whole: Tensor, rows: Tensor) -> PatchPoint:
        """Evaluate the equations of some rows, which attend to all."""
        equations = self.equations
        entering = equations.tokens(whole, self.places)
        keys_values = equations.block.keys_values(torch.cat([equations.class_token, entering]))
        return equations.at(entering[rows] + equations.block.attention(entering[rows], keys_values))

    def _outside(self, whole: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        point = self._point(whole, rows)
        return (point.remainders * weights[:, None]).flatten()

    def _of_a_stand_in(self, whole: Tensor) -> Tensor:
        """Return (unknowns, unknowns) of the Gauss-Newton matrix of one stand-in: all are attended to alike."""
        stand_in = self.stand_ins[len(self.stand_ins) // 2][None]
        some = torch.arange(0, len(self.stated), max(len(self.stated) // SAMPLE, 1), device=stand_in.device)

        def residuals(coefficients: Tensor) -> Tensor:
            moved = whole.index_copy(0, stand_in, coefficients[None])
            return self._outside(moved, self.stated[some], self.weights[some])

        derivative: Tensor = jacfwd(residuals)(whole[stand_in[0]])
        return derivative.mT @ derivative * (len(self.stated) / len(some))
