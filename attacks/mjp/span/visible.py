"""The patches that are not masked: all of them together, from the most natural picture on."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.mjp.span.equations import Attended, PatchEquations, PatchSet, attended
from fedmjp.attacks.mjp.span.joint import solve_jointly
from fedmjp.attacks.mjp.span.minimise import Pull, Steps, minimise
from fedmjp.attacks.mjp.span.naturalness import Naturalness

PULLS = (1e-3, 1e-5, 0.0)  # weight of the prior, let go step by step
STEPS = 4  # of the joint iteration at each of them
SMALL = 0.01  # a residual that says nothing against a token
UNUSUAL = 5.0  # times the median residual: more is an outlier
ROUNDING = 3.0  # times what rounding explains: less is no outlier
IMPOSSIBLE = 0.2  # a pixel that far outside of [0, 1] is an outlier
RESTART = Steps(10, damping=1e-2)
NEAR = 2  # rows and columns from which an outlier's neighbours are taken
OTHERS, DRAWN = 12, 8  # solved patches from anywhere, and natural ones, that an outlier is started from


@dataclass(frozen=True)
class VisiblePatches:
    """Where the visible patches stand, in the order of ``PatchEquations.visible``."""

    coefficients: Tensor  # (visible, unknowns)
    residual: Tensor  # (visible,)
    good: Tensor  # (visible,) bool, which are no outliers

    @property
    def median(self) -> float:
        """Return the median residual."""
        return float(self.residual.median())


def judged(
    equations: PatchEquations,
    naturalness: Naturalness,
    coefficients: Tensor,
    residual: Tensor,
    with_attention: Attended,
) -> VisiblePatches:
    """Tell outliers: a residual far above the others' that rounding does not explain, or impossible pixels.

    Args:
        equations: Of the upload.
        naturalness: What patches are possible.
        coefficients: (visible, unknowns).
        residual: (visible,).
        with_attention: Adds the attention.
    """
    possible = naturalness.excess(coefficients, equations.visible) <= IMPOSSIBLE
    noise = equations.noise(equations.at(with_attention(equations.tokens(coefficients, equations.visible))))
    usual = residual <= (ROUNDING * noise).clamp(min=max(UNUSUAL * float(residual.median()), SMALL))
    return VisiblePatches(coefficients, residual, possible & usual)


def good_patches(equations: PatchEquations, visible: VisiblePatches, masked: Tensor) -> PatchSet:
    """Return the good visible patches and some masked ones, to attend to.

    Args:
        equations: Of the upload.
        visible: Visible patches.
        masked: (masked, unknowns).
    """
    return PatchSet(equations.visible[visible.good], visible.coefficients[visible.good], masked)


def solve_visible(
    equations: PatchEquations, naturalness: Naturalness, start: Tensor, generator: torch.Generator
) -> VisiblePatches:
    """Solve for the visible patches, without any masked one.

    Args:
        equations: Of the upload.
        naturalness: What patches are possible.
        start: (visible, unknowns) where it begins.
        generator: On the CPU.
    """
    now = PatchSet(equations.visible, start, start[:0])
    for weight in PULLS:
        pull = Pull(weight, start, naturalness.metric) if weight else None
        now, residual = solve_jointly(equations, now, steps=STEPS, pull=pull)
    visible = judged(equations, naturalness, now.visible, residual, attended(equations, now))
    with_attention = attended(equations, good_patches(equations, visible, start[:0]))
    return restarted(equations, naturalness, visible, with_attention, generator)


def restarted(
    equations: PatchEquations,
    naturalness: Naturalness,
    visible: VisiblePatches,
    with_attention: Attended,
    generator: torch.Generator,
) -> VisiblePatches:
    """Start outliers again from what their neighbours, other patches and natural ones look like.

    Args:
        equations: Of the upload.
        naturalness: What patches are possible.
        visible: Visible patches.
        with_attention: Adds the attention.
        generator: On the CPU.
    """
    outliers = (~visible.good).nonzero().flatten().tolist()
    if not outliers:
        return visible
    coefficients, residual = visible.coefficients.clone(), visible.residual.clone()
    for row in outliers:
        if equations.time_is_up():
            break
        starts = _starts(equations, naturalness, visible, row, generator)
        places = equations.visible[row].expand(len(starts))
        results = minimise(equations, starts, places, with_attention, RESTART)
        impossible = naturalness.excess(results.coefficients, places) > IMPOSSIBLE
        best = int((results.residual + impossible).argmin())
        coefficients[row], residual[row] = results.coefficients[best], results.residual[best]
    return judged(equations, naturalness, coefficients, residual, with_attention)


def _starts(
    equations: PatchEquations, naturalness: Naturalness, visible: VisiblePatches, row: int, generator: torch.Generator
) -> Tensor:
    """Return (starts, unknowns) for one place: like good patches near it, from anywhere, or just natural."""
    grid, place = math.isqrt(len(equations.mask)), int(equations.visible[row])
    down, right = equations.visible // grid - place // grid, equations.visible % grid - place % grid
    near = ((down.abs() <= NEAR) & (right.abs() <= NEAR) & visible.good).nonzero().flatten()
    rows = visible.good.nonzero().flatten()
    distant = rows[torch.randperm(len(rows), generator=generator)[:OTHERS].to(rows.device)]
    similar = torch.cat([near, distant])
    patches = naturalness.patches(visible.coefficients[similar], equations.visible[similar])
    return torch.cat(
        [
            visible.coefficients[row][None],
            naturalness.nearest(patches, place),
            naturalness.draw(DRAWN, place, generator),
        ]
    )
