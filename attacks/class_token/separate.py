"""From the head's gradient to labels and features, with what residuals alone say of their errors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch import Tensor

from fedmjp.attacks.class_token.factors import CONSISTENT, solve_factors
from fedmjp.attacks.class_token.head import Head, HeadEquations, HeadGradient, HeadState
from fedmjp.attacks.class_token.hidden import solve_known
from fedmjp.attacks.class_token.labels import SLACK, Labels, labels_of, least_counts, likeliest, shown_counts
from fedmjp.attacks.class_token.left_open import solve_open
from fedmjp.attacks.class_token.search import (
    STARTS,
    HeadSolution,
    SearchStart,
    begin,
    fixed_point,
    from_starts,
    label_tensor,
    minimise,
    polish,
)
from fedmjp.errors import AttackFailedError

DENSE = 32  # pictures: of more, only the fixed point is tried
TRIES = 20  # starts where labels are hidden
QUICK = 2  # attempts before factors are free: further ones take longer
IMPOSSIBLE = 2  # times the pictures: so many labels show a factor at once
POWERS, MARGIN = 20, 1.2  # steps that estimate a rate of contraction, and how far it may be off


@dataclass(frozen=True)
class Separation:
    """What the head's gradient says of each picture."""

    labels: Tensor  # (pictures,) int64
    targets: Tensor  # (pictures, classes)
    features: Tensor  # (pictures, dim)
    slopes: Tensor  # (pictures, classes) gradients of the loss at the logits
    misfit: float  # of the gradient, relative to its size
    noise: float  # what is expected of it
    # (pictures,) bound on the distance from the true features, to first order, where the misfit is noise; infinite
    # where nothing is known.
    errors: Tensor
    factors: Tensor | None = None  # (pictures,) on the loss of each, where they were free
    smoothing: float = 0.0  # of the labels, as it was told or found


def separate(head: Head, gradient: HeadGradient, labels: Labels | None, *, generator: torch.Generator) -> Separation:
    """Solve the equations of the head, with factors on the loss where nothing fits without.

    Args:
        head: As the server sent it.
        gradient: Of the mean loss of the batch.
        labels: Where they are told, in any order.
        generator: Of the starts, on the CPU.

    Raises:
        AttackFailedError: If pictures are mixed and the equations do not determine them.
    """
    if gradient.mixed:
        return _separate_mixed(head, gradient, labels, generator)
    solution = _solved_with_factors(HeadEquations(head, gradient), labels, generator)
    equations, state = solution.equations, solution.state
    misfit = _misfit_of(equations, state)
    if equations.count <= DENSE:
        bounds = _dense_bounds(equations, state)
    else:
        bounds = _contraction_bounds(equations, state, generator)
    return Separation(
        labels=torch.tensor(solution.labels),
        targets=equations.gradient.targets(label_tensor(equations, solution.labels)),
        features=equations.features(state.unknowns[0]),
        slopes=state.slopes[0],
        misfit=misfit,
        noise=equations.noise,
        errors=bounds * max(equations.noise, misfit),
        factors=None if equations.groups is None else state.factors[0],
        smoothing=equations.gradient.smoothing,
    )


def _separate_mixed(
    head: Head, gradient: HeadGradient, labels: Labels | None, generator: torch.Generator
) -> Separation:
    """Separate mixed pictures: the rows without their labels decide, and all rows must fit afterwards."""
    solution = solve_open(head, gradient, labels, generator)
    if solution is None:
        raise AttackFailedError("more rows of the head belong to labels than the mixed pictures can be told without")
    equations, full, targets = solution.equations, HeadEquations(head, gradient), solution.targets
    likely, off = labels_of(targets, gradient)
    state = full.state(solution.state.unknowns, targets[None])
    misfits = _misfit_of(equations, solution.state), _misfit_of(full, state)
    noise = max(equations.noise, full.noise)
    within = _within(equations, solution.state) * max(equations.noise, misfits[0])
    errors = (within.square() + (_given_slopes(full, state) * max(full.noise, misfits[1])).square()).sqrt()
    return Separation(
        labels=torch.tensor(likely),
        targets=targets,
        features=full.features(state.unknowns[0]),
        slopes=state.slopes[0],
        misfit=max(misfit * noise / of for misfit, of in zip(misfits, (equations.noise, full.noise), strict=True)),
        noise=noise,
        errors=errors if off < SLACK else torch.full_like(errors, torch.inf),
    )


def _solved_with_factors(equations: HeadEquations, labels: Labels | None, generator: torch.Generator) -> HeadSolution:
    """Free the factors where the quick attempts explain the gradient by none; go on without where that fails too."""
    dense = equations.count <= DENSE
    lower_bounds = shown_counts(equations.head, equations.gradient)
    factored = None
    if labels is None and int(least_counts(lower_bounds).sum()) > IMPOSSIBLE * equations.count:
        factored = solve_factors(equations, labels, misfit=1.0, dense=dense)
    if factored is not None:
        return factored
    attempts = _attempts(equations, labels, generator)
    solution = _first_that_fits(islice(attempts, QUICK))
    if not solution.fits and solution.misfit > CONSISTENT * equations.noise:
        factored = solve_factors(equations, labels, misfit=solution.misfit, dense=dense)
    if factored is not None:
        return factored
    return _first_that_fits(chain([solution], attempts))


def _solved(equations: HeadEquations, labels: Labels | None, generator: torch.Generator) -> HeadSolution:
    """Find the labels and unknowns of least misfit, where the loss has no factor."""
    return _first_that_fits(_attempts(equations, labels, generator))


def _first_that_fits(solutions: Iterator[HeadSolution]) -> HeadSolution:
    """Return the first solution that leaves rounding alone, else the one of least misfit."""
    best = next(solutions)
    while not best.fits and (solution := next(solutions, None)) is not None:
        best = min(best, solution, key=_misfit)
    return best


def _attempts(equations: HeadEquations, labels: Labels | None, generator: torch.Generator) -> Iterator[HeadSolution]:
    """Solve in one way after another, the quickest first."""
    lower_bounds = shown_counts(equations.head, equations.gradient)
    likely = likeliest(lower_bounds, equations.count) if labels is None else tuple(sorted(labels))
    best = HeadSolution(equations, likely, fixed_point(equations, label_tensor(equations, likely), generator))
    yield best
    if equations.count > DENSE:
        return
    certain_counts = least_counts(lower_bounds)
    hidden = equations.count - int(certain_counts.sum())
    if labels is None and 0 < hidden < equations.count:
        for number in range(TRIES):
            sure = _fewer(certain_counts, number // len(STARTS), generator)
            solution = _with_hidden(equations, sure, likely, STARTS[number % len(STARTS)], generator)
            best = min(best, solution, key=_misfit)
            yield solution
    yield from_starts(equations, best.labels, generator)


def _fewer(counts: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Drop some counts at random, which are then solved with the hidden ones: another way past poor minima."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), counts.cpu())
    remaining = labels[torch.randperm(len(labels), generator=generator)[min(count, len(labels) - 1) :]]
    return torch.bincount(remaining, minlength=len(counts)).to(counts)


def _with_hidden(
    equations: HeadEquations, certain_counts: Tensor, likely: Labels, start: SearchStart, generator: torch.Generator
) -> HeadSolution:
    """Solve for the pictures of known labels, then for the hidden ones by themselves, then for all."""
    sure = torch.repeat_interleave(torch.arange(len(certain_counts)), certain_counts.cpu()).tolist()
    hidden_labels = list(likely)
    for label in sure:
        hidden_labels.remove(label)
    begun = label_tensor(equations, (*sure, *hidden_labels))
    gradient = equations.gradient
    state = solve_known(
        equations, begin(equations, begun, start, generator), gradient.targets(begun), len(hidden_labels)
    )
    slopes, unknowns = state.slopes[0, : len(sure)], state.unknowns[0, : len(sure)]
    share = equations.count / len(hidden_labels)
    remainder = replace(
        gradient,
        weight=(gradient.weight - slopes.mT @ equations.features(unknowns)) * share,
        bias=(gradient.bias - slopes.sum(0)) * share,
        pictures=len(hidden_labels),
    )
    smaller = HeadEquations(equations.head, remainder)
    separate_solution = _solved(smaller, None, generator)
    all_unknowns = torch.cat([unknowns, equations.unknowns(smaller.features(separate_solution.state.unknowns[0]))])
    labels = (*sure, *separate_solution.labels)
    targets = gradient.targets(label_tensor(equations, labels))[None]
    return HeadSolution(equations, labels, polish(equations, minimise(equations, all_unknowns[None], targets), targets))


def _misfit(solution: HeadSolution) -> float:
    return solution.misfit


def _misfit_of(equations: HeadEquations, state: HeadState) -> float:
    return float((state.relative.square() + equations.outside.square()).sqrt())


def _dense_bounds(equations: HeadEquations, state: HeadState) -> Tensor:
    """Return (pictures,) how far a misfit of norm 1 can move each: the norm of its rows of the pseudoinverse."""
    bounds: Tensor = (_within(equations, state).square() + _given_slopes(equations, state).square()).sqrt()
    return bounds


def _within(equations: HeadEquations, state: HeadState) -> Tensor:
    """Return the same bound, in the row space of the gradient."""
    count = equations.count
    matrix, _ = equations.normal(state, variance=False)
    factor, failed = torch.linalg.cholesky_ex(matrix[0])
    if failed:
        return torch.full((count,), torch.inf, dtype=matrix.dtype, device=matrix.device)
    inverse = torch.cholesky_inverse(factor).view(count, count, count, count)
    diagonal = torch.arange(count)
    blocks = inverse[diagonal, :, diagonal, :]
    within: Tensor = torch.linalg.eigvalsh(blocks)[:, -1].clamp_min(0).sqrt()
    return within


def _contraction_bounds(equations: HeadEquations, state: HeadState, generator: torch.Generator) -> Tensor:
    """Return a bound no less than ``_dense_bounds``, without its matrix: from how fast the fixed point contracts."""
    alone = _given_slopes(equations, state)
    shape = state.unknowns[0].shape
    change = torch.randn(shape, generator=generator, dtype=torch.float64).to(state.unknowns)
    gram = state.slopes[0] @ state.slopes[0].mT
    factor, failed = torch.linalg.cholesky_ex(gram)
    if failed:
        return torch.full_like(alone, torch.inf)
    rate = torch.zeros(())
    for _ in range(POWERS):
        change = change / change.norm()
        moved = equations.moved_slopes(state, change[None])[0].mT @ state.unknowns[0]
        change = torch.cholesky_solve(state.slopes[0] @ moved, factor)
        rate = MARGIN * change.norm()
    if rate >= 1:
        return torch.full_like(alone, torch.inf)
    bounds: Tensor = alone + rate / (1 - rate) * alone.max()
    return bounds


def _given_slopes(equations: HeadEquations, state: HeadState) -> Tensor:
    """Return (pictures,) the bound if the slopes were known."""
    gram = state.slopes[0] @ state.slopes[0].mT
    inverse = torch.linalg.pinv(gram, hermitian=True)
    singular = torch.linalg.matrix_rank(gram, hermitian=True) < equations.count
    bounds: Tensor = inverse.diagonal().clamp_min(0).sqrt() * equations.size
    return torch.full_like(bounds, torch.inf) if singular else bounds
