"""Free factors on the loss: clipping, accumulation, sums, loss scales, the head's own rate, and weights of classes.

The head's equations fix a factor: F = A R has the norms that LayerNorm leaves, and probabilities follow from F alone.
Which labels a batch has, however, is shown in units of the factor. So each set of labels that some factor makes the
likeliest is tried, with the factor solved for: one of the whole batch first, then with a smoothing of the labels that
nobody told, then one of each class.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import torch

from fedmjp.attacks.class_token.head import HeadEquations
from fedmjp.attacks.class_token.labels import SLACK, Labels, least_counts, likeliest, shown_counts
from fedmjp.attacks.class_token.search import SOLVED, HeadSolution, fixed_point, from_starts, label_tensor, polish

# What a picture shows of itself on average, in units of the factor: most of it where predictions are unsure.
SHARES = tuple(1.05 / 1.15**number for number in range(17))
MINIMISED = {False: 3, True: 16}  # sets of labels, the best of the fixed point, by whether classes have weights
SPARED = 3  # sets of labels where the fixed point alone is tried, on many pictures
BETTER = 0.1  # of the misfit without a factor: a free factor explains a little of any noise
CONSISTENT = 16.0  # times the noise that is known: a larger misfit is none
SETS = 64  # of labels, that are tried with weights of classes
POLISHED = 8  # steps from the end of the fixed point
PLAIN = 1e-3  # relative: a factor nearer to 1 is none


def solve_factors(
    equations: HeadEquations, labels: Labels | None, *, misfit: float, dense: bool
) -> HeadSolution | None:
    """Solve with free factors, for a gradient that no labels explain without.

    Args:
        equations: Of the head, without factors.
        labels: Where they are told, in any order.
        misfit: What is left of the gradient where all factors are 1, relative to its size.
        dense: Whether pictures are few enough for Levenberg-Marquardt; else the fixed point alone is tried.

    Returns:
        The solution, whose state has the factors; None if none fits far better, or if the factors are 1.
    """
    sets = _likely_sets(equations) if labels is None else [tuple(sorted(labels))]
    enough = max(CONSISTENT * equations.noise, SOLVED)
    scaled = _best_of(equations, sets, dense=dense)
    if scaled is None:
        return None
    if scaled.misfit >= enough and dense:
        smoothed = _best_of(equations, [] if equations.gradient.smoothing else sets, smooths=True)
        if smoothed is not None and smoothed.misfit < enough:
            return _with_smoothing(smoothed)
        weighted = _best_of(equations, _all_sets(equations) if labels is None else sets, by_class=True)
        if weighted is not None and weighted.misfit < enough:
            return weighted
    is_plain = bool((scaled.state.factors.log().abs() < max(PLAIN, scaled.misfit)).all())
    return None if is_plain or scaled.misfit > max(BETTER * misfit, SOLVED) else scaled


def _with_smoothing(solution: HeadSolution) -> HeadSolution:
    """State the smoothing that was found in the targets."""
    equations, state = solution.equations, solution.state
    gradient = replace(equations.gradient, smoothing=float(state.smoothing))
    smoothed = HeadEquations(equations.head, gradient, groups=equations.groups, smooths=True)
    targets = gradient.targets(label_tensor(equations, solution.labels))[None]
    return HeadSolution(smoothed, solution.labels, smoothed.state(state.unknowns, targets))


def _likely_sets(equations: HeadEquations) -> list[Labels]:
    """List the sets of labels that are likeliest under some factor, those of unsure predictions first."""
    lower_bounds, count = shown_counts(equations.head, equations.gradient), equations.count
    whole = float(lower_bounds.clamp_min(0).sum()) / count
    sets: dict[Labels, None] = {}
    for share in SHARES if 0 < whole < math.inf else ():
        scaled = lower_bounds * share / whole
        if int(least_counts(scaled).sum()) <= count:
            sets[likeliest(scaled, count)] = None
    return list(sets)


def _all_sets(equations: HeadEquations) -> list[Labels]:
    """List all sets of the labels that some picture shows, whatever weights classes have; none if they are too many."""
    classes = (equations.gradient.bias < -SLACK * equations.gradient.bias.abs().max()).nonzero().flatten().tolist()
    further = equations.count - len(classes)
    if not classes or further < 0 or math.comb(equations.count - 1, further) > SETS:
        return []
    return [tuple(sorted((*classes, *more))) for more in combinations_with_replacement(classes, further)]


def _best_of(
    equations: HeadEquations,
    sets: Sequence[Labels],
    *,
    by_class: bool = False,
    smooths: bool = False,
    dense: bool = True,
) -> HeadSolution | None:
    solutions = _solutions(equations, sets, by_class=by_class, smooths=smooths, dense=dense)
    finite = (solution for solution in solutions if math.isfinite(solution.misfit))
    return min(finite, key=lambda solution: solution.misfit, default=None)


def _solutions(
    plain: HeadEquations, sets: Sequence[Labels], *, by_class: bool, smooths: bool, dense: bool
) -> Iterator[HeadSolution]:
    """Solve under each set of labels, until one explains all but rounding."""
    generator = torch.Generator().manual_seed(0)  # of the starts alone
    ends = []
    for labels in sets if dense else sets[:SPARED]:
        assumed = label_tensor(plain, labels)
        classes = sorted(set(labels))
        if by_class and (len(classes) == 1 or not _decided(plain, len(classes))):
            continue
        groups = torch.tensor([classes.index(label) * by_class for label in labels], device=assumed.device)
        equations = HeadEquations(plain.head, plain.gradient, groups=groups, smooths=smooths)
        state = fixed_point(equations, assumed, generator)
        if dense:
            state = polish(equations, state, plain.gradient.targets(assumed)[None], iterations=POLISHED)
        ends.append(HeadSolution(equations, labels, state))
        yield ends[-1]
        if ends[-1].fits:
            return
    ends.sort(key=lambda end: end.misfit)
    for end in ends[: MINIMISED[by_class]] if dense else ():
        solution = from_starts(end.equations, end.labels, generator)
        yield solution
        if solution.fits:
            return


def _decided(equations: HeadEquations, factors: int) -> bool:
    """Tell whether the gradient, whose rows add up to 0, is enough equations, and some more."""
    count = equations.count
    return (len(equations.gradient.bias) - 1) * (count + 1) >= count**2 + factors + count
