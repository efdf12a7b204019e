"""From the head's gradient to labels and features, with what residuals alone say of their errors."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.class_token.head import Head, HeadEquations, HeadGradient, State
from attacks.class_token.labels import Labels, exchanges, least_counts, likeliest, shown_counts
from attacks.class_token.search import SOLVED, STARTS, begin, fixed_point, minimise, polish

DENSE = 32  # pictures: of more, only the fixed point is tried
KEPT = 2  # label sets that are gone on with
TRIED = 4  # changes of labels per round and set
ROUNDS = 16
FIRST, LATER = 25, 8  # iterations from a start, and from where other labels ended
POWERS, MARGIN = 20, 1.2  # steps that estimate a rate of contraction, and how far it may be off


@dataclass(frozen=True)
class Separation:
    """What the head's gradient says of each picture."""

    labels: Tensor  # (pictures,) int64
    features: Tensor  # (pictures, dim)
    slopes: Tensor  # (pictures, classes) gradients of the loss at the logits
    misfit: float  # of the gradient, relative to its size
    # (pictures,) bound on the distance from the true features, to first order, where the misfit is noise; infinite
    # where nothing is known.
    errors: Tensor


@dataclass(frozen=True)
class _Tried:
    labels: tuple[int, ...]  # in the order of the unknowns
    state: State  # of one start

    @property
    def key(self) -> Labels:
        return tuple(sorted(self.labels))


def separate(
    head: Head, gradient: HeadGradient, labels: Labels | None, *, noise: float, generator: torch.Generator
) -> Separation:
    """Solve the equations of the head.

    Args:
        head: As the server sent it.
        gradient: Of the mean loss of the batch.
        labels: Where they are told, in any order.
        noise: Largest norm of what is not the gradient, relative to its size; rounding at least.
        generator: Of the starts.
    """
    equations = HeadEquations(head, gradient)
    shown = shown_counts(head, gradient)
    first = likeliest(shown, gradient.pictures) if labels is None else tuple(sorted(labels))
    device = gradient.weight.device
    if equations.count > DENSE:
        state = fixed_point(equations, torch.tensor(first, device=device), generator)
        best = _Tried(first, state)
    else:
        least = least_counts(shown)
        fixed = labels is not None or int(least.sum()) >= equations.count
        best = _searched(equations, first, None if fixed else least, generator)
        state = polish(equations, best.state, _targets(equations, best.labels)[None])
        best = replace(best, state=state)
    return _told(equations, best, noise, generator)


def _searched(equations: HeadEquations, first: Labels, least: Tensor | None, generator: torch.Generator) -> _Tried:
    """The best of all labels and starts that were tried; with ``least`` None the labels are known."""
    kept, tried = _from_starts(equations, first, generator), {first}
    for _ in range(ROUNDS):
        if float(kept[0].state.relative) < SOLVED:
            break
        begun: list[_Tried] = []
        if least is not None:
            for candidate in kept:
                changes = exchanges(equations, candidate.state, candidate.labels, least, TRIED, tried)
                begun += [_Tried(labels, _at(equations, labels, unknowns)) for labels, unknowns in changes]
        ends = _minimised(equations, begun, LATER) if begun else []
        if not ends or ends[0].state.cost >= kept[0].state.cost:
            ends += _from_starts(equations, kept[0].key, generator)
        kept = _distinct([*kept, *ends])[:KEPT]
    return kept[0]


def _from_starts(equations: HeadEquations, labels: Labels, generator: torch.Generator) -> list[_Tried]:
    chosen = torch.tensor(labels, device=equations.gradient.weight.device)
    begun = [begin(equations, chosen, start, generator) for start in STARTS]
    return _minimised(equations, [_Tried(labels, _at(equations, labels, unknowns)) for unknowns in begun], FIRST)


def _minimised(equations: HeadEquations, begun: list[_Tried], iterations: int) -> list[_Tried]:
    """Each followed to where it leads, the best first."""
    targets = torch.stack([_targets(equations, each.labels) for each in begun])
    state = minimise(equations, torch.cat([each.state.unknowns for each in begun]), targets, iterations=iterations)
    ends = [_Tried(each.labels, _one(state, place)) for place, each in enumerate(begun)]
    return sorted(ends, key=lambda end: float(end.state.cost))


def _distinct(tried: list[_Tried]) -> list[_Tried]:
    by_labels: dict[Labels, _Tried] = {}
    for candidate in sorted(tried, key=lambda each: float(each.state.cost)):
        by_labels.setdefault(candidate.key, candidate)
    return list(by_labels.values())


def _targets(equations: HeadEquations, labels: Labels) -> Tensor:
    return equations.gradient.targets(torch.tensor(labels, device=equations.gradient.weight.device))


def _at(equations: HeadEquations, labels: Labels, unknowns: Tensor) -> State:
    return equations.state(unknowns[None], _targets(equations, tuple(labels))[None])


def _one(state: State, place: int) -> State:
    fields = {name: value[place : place + 1] for name, value in vars(state).items() if isinstance(value, Tensor)}
    return State(**fields)


def _told(equations: HeadEquations, best: _Tried, noise: float, generator: torch.Generator) -> Separation:
    state = best.state
    misfit = float((state.relative.square() + equations.outside.square()).sqrt())
    floor = max(noise, misfit)
    bounds = (
        _dense_bounds(equations, state)
        if equations.count <= DENSE
        else _contraction_bounds(equations, state, generator)
    )
    return Separation(
        labels=torch.tensor(best.labels),
        features=equations.features(state.unknowns[0]),
        slopes=state.slopes[0],
        misfit=misfit,
        errors=bounds * floor,
    )


def _dense_bounds(equations: HeadEquations, state: State) -> Tensor:
    """(pictures,) how far a misfit of norm 1 can move each: the norm of its rows of the pseudoinverse."""
    count = equations.count
    matrix, _ = equations.normal(state, variance=False)
    factor, failed = torch.linalg.cholesky_ex(matrix[0])
    if failed:
        return torch.full((count,), torch.inf, dtype=matrix.dtype, device=matrix.device)
    inverse = torch.cholesky_inverse(factor).view(count, count, count, count)
    diagonal = torch.arange(count)
    blocks = inverse[diagonal, :, diagonal, :]
    within = torch.linalg.eigvalsh(blocks)[:, -1].clamp_min(0)
    bounds: Tensor = (within + _given_slopes(equations, state).square()).sqrt()
    return bounds


def _contraction_bounds(equations: HeadEquations, state: State, generator: torch.Generator) -> Tensor:
    """As of ``_dense_bounds`` and never less, without its matrix: from how fast the fixed point contracts."""
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


def _given_slopes(equations: HeadEquations, state: State) -> Tensor:
    """(pictures,) the bound if the slopes were known."""
    gram = state.slopes[0] @ state.slopes[0].mT
    inverse = torch.linalg.pinv(gram, hermitian=True)
    singular = torch.linalg.matrix_rank(gram, hermitian=True) < equations.count
    bounds: Tensor = inverse.diagonal().clamp_min(0).sqrt() * equations.size
    return torch.full_like(bounds, torch.inf) if singular else bounds
