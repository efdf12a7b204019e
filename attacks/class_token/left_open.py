"""Solve the head without knowing the targets: rows of classes that may occur are left out, and give the targets after.

In a row of a class that no picture has, the slopes are the probabilities. Such rows, and LayerNorm, are more equations
than unknowns while classes are many. Which classes occur need not be known for certain: that of the row that fits worst
is left out too, until the others fit. Then every row is linear in the targets.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.class_token.head import Head, HeadEquations, HeadGradient, HeadState
from fedmjp.attacks.class_token.labels import SLACK, Labels, likeliest, shown_counts
from fedmjp.attacks.class_token.search import SOLVED, STARTS, begin, minimise, polish

ATTEMPTS = 10  # rows that are left out one by one


@dataclass(frozen=True)
class OpenSolution:
    """Where the search ended, and what it did not use."""

    equations: HeadEquations  # without the rows of some classes
    state: HeadState  # of one start
    targets: Tensor  # (pictures, classes)


def solve_open(
    head: Head, gradient: HeadGradient, labels: Labels | None, generator: torch.Generator
) -> OpenSolution | None:
    """Return the best solution; None where so many rows would be left out that the remaining ones decide nothing.

    Args:
        head: As the server sent it.
        gradient: Of the head.
        labels: Where they are told, in any order.
        generator: Of the starts, on the CPU.
    """
    full = HeadEquations(head, gradient)
    lower_bounds = shown_counts(head, gradient)
    likely = torch.tensor(likeliest(lower_bounds, full.count) if labels is None else labels, device=lower_bounds.device)
    left_open = set(likely.tolist()) | (
        set((lower_bounds > SLACK).nonzero().flatten().tolist()) if labels is None else set()
    )
    begun = torch.stack([begin(full, likely, start, generator) for start in STARTS])
    targets = gradient.targets(likely)[None]
    best: OpenSolution | None = None
    for _ in range(ATTEMPTS):
        if not _decided(full, left_open):
            break
        equations = HeadEquations(head, gradient, left_open=left_open)
        ends = minimise(equations, begun, targets.expand(len(begun), -1, -1))
        end = ends.unknowns[ends.relative.argmin()][None]
        state = polish(equations, equations.state(end, targets), targets)
        if best is None or state.relative < best.state.relative:
            best = OpenSolution(equations, state, full.targets(state.unknowns[0]))
        if labels is not None or state.relative < SOLVED:
            break
        left_open.add(int(state.misfit[0].norm(dim=1).argmax()))
        begun = torch.cat([begun[: len(STARTS)], end])
    return best


def _decided(equations: HeadEquations, left_open: Collection[int]) -> bool:
    """Tell whether the remaining rows, and LayerNorm's mean and variance, are more equations than unknowns."""
    count, rows = equations.count, len(equations.gradient.bias) - len(left_open)
    return rows * (count + 1) + 2 * count > count**2
