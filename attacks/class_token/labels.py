"""Which labels a batch has, with multiplicity: what is certain, and what the misfit speaks for."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.class_token.head import Head, HeadEquations, HeadGradient, State

SLACK = 0.02  # of a picture: what is nearer to a whole number may be noise
BEYOND = 0.7  # what a picture shows of itself, on average
CLASSES = 64  # that are tried in place of another, those that the bias speaks for most
DAMPING = 1e-3  # of predictions, relative to the diagonal

Labels = tuple[int, ...]


def shown_counts(head: Head, gradient: HeadGradient) -> Tensor:
    """(classes,) that no count of pictures of a class is below, up to noise.

    The slopes of a class c are p_bc, less 1 - s for its n_c pictures and less s / K for all. Their sum over the batch
    is the gradient g_c of the bias, and p_bc is positive. The sum of their sizes is at least |G_c| over the norm that
    all normalised features have in common, and at most g_c + 2 (1 - s) n_c / B: what a sum of such vectors is too long
    for is a label.
    """
    share = gradient.smoothing / len(gradient.bias)
    inner = (gradient.weight - gradient.bias[:, None] * head.shift) / head.scale
    sizes = inner.norm(dim=1) / inner.shape[1] ** 0.5
    by_size = (sizes - gradient.bias) / 2 - share
    counts: Tensor = torch.maximum(by_size, -gradient.bias - share) * gradient.pictures / (1 - gradient.smoothing)
    return counts


def least_counts(shown: Tensor) -> Tensor:
    """(classes,) how many pictures of each class there are at least."""
    return torch.ceil(shown - SLACK).clamp_min(0).long()


def likeliest(shown: Tensor, pictures: int) -> Labels:
    """Labels, sorted: the least counts, and for the rest of the pictures the classes that are shown most beyond."""
    counts = least_counts(shown)
    while int(counts.sum()) < pictures:
        counts[int((shown - BEYOND * counts).argmax())] += 1
    while int(counts.sum()) > pictures:  # under noise more seem to be shown than there are
        counts[int(torch.where(counts > 0, shown - counts, torch.inf).argmin())] -= 1
    return tuple(torch.repeat_interleave(torch.arange(len(counts)), counts.cpu()).tolist())


def exchanges(
    equations: HeadEquations, state: State, labels: Sequence[int], least: Tensor, count: int, tried: set[Labels]
) -> list[tuple[Labels, Tensor]]:
    """The most promising ways to give one picture another label, with unknowns to begin from.

    Each is judged by what is left of the misfit once the unknowns have followed, to first order. ``state`` is of one
    start; ``tried`` holds sorted labels that are passed over, and gets those that are returned.
    """
    gradient, count_of = equations.gradient, Counter(labels)
    classes = gradient.bias.argsort()[:CLASSES]
    occurring = torch.tensor(sorted(count_of), device=classes.device)
    classes = torch.cat([occurring, classes[~torch.isin(classes, occurring)]])
    place = {int(label): index for index, label in enumerate(classes)}
    matrix, slope = equations.normal(state)
    matrix.diagonal(dim1=-2, dim2=-1).mul_(1 + DAMPING)
    factor, failed = torch.linalg.cholesky_ex(matrix[0])
    if failed:
        return []
    pulls = _pulls(equations, state, classes)  # (pictures, classes, n)
    whitened = torch.linalg.solve_triangular(factor, pulls.flatten(0, 1).mT, upper=False).mT.view_as(pulls)
    rest = torch.linalg.solve_triangular(factor, slope.mT, upper=False)[:, 0]
    size = (1 - gradient.smoothing) / equations.count / equations.size
    extended = torch.cat([state.unknowns[0], torch.full_like(state.unknowns[0][:, :1], equations.constant)], 1)
    along = size * extended @ state.misfit[0][classes].mT  # (pictures, classes): inner product with the misfit
    norms = 2 * size**2 * extended.square().sum(1)
    scores: list[tuple[float, int, int]] = []
    for picture, label in enumerate(labels):
        if count_of[label] <= int(least[label]):
            continue
        old = place[label]
        left = rest - whitened[picture] + whitened[picture, old]
        score = 2 * (along[picture, old] - along[picture]) + norms[picture] - left.square().sum(1)
        scores += [(float(value), picture, index) for index, value in enumerate(score) if index != old]
    chosen: list[tuple[Labels, Tensor]] = []
    for _, picture, index in sorted(scores):
        changed = (*labels[:picture], int(classes[index]), *labels[picture + 1 :])
        key = tuple(sorted(changed))
        if key in tried:
            continue
        tried.add(key)
        old = place[labels[picture]]
        pulled = slope[0] - pulls[picture, index] + pulls[picture, old]
        change = torch.cholesky_solve(pulled[:, None], factor)[:, 0]
        chosen.append((changed, state.unknowns[0] - change.view_as(state.unknowns[0])))
        if len(chosen) == count:
            break
    return chosen


def _pulls(equations: HeadEquations, state: State, classes: Tensor) -> Tensor:
    """(pictures, classes, n): the transposed derivative times what a label of a picture adds to the misfit."""
    unknowns, slopes = state.unknowns[0], state.slopes[0][:, classes]
    steps = equations.steps(state)[0][:, classes]
    gram = unknowns @ unknowns.mT + equations.constant**2
    direct = torch.einsum("ak,bj->bkaj", slopes, unknowns)
    through = torch.einsum("ab,akj->bkaj", gram, steps)
    size = (1 - equations.gradient.smoothing) / equations.count / equations.size**2
    pulls: Tensor = ((direct + through) * size).flatten(2)
    return pulls
