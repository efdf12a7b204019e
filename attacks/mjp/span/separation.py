"""Masked patches that resemble one another, told apart.

A search from random points meets the patches that stand alone. What it leaves is nearly alike to something that is
known, or it is known as a mixture. Here every known token is first minimised apart from all others (``apart``), which
takes mixtures to one of what they mix; then new ones are sought beside the known ones (``tangents``) and among what is
seen of the picture. Each must fit, and must add to the known ones more than its residual.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attacks.mjp.span.apart import Apart
from attacks.mjp.span.counts import attended_in_full
from attacks.mjp.span.equations import Attended, Equations, Known
from attacks.mjp.span.minimise import Steps, minimise
from attacks.mjp.span.naturalness import Naturalness
from attacks.mjp.span.starts import Kind, starts
from attacks.mjp.span.tangents import starts_beside
from attacks.mjp.span.visible import IMPOSSIBLE, Visible, known, restarted

STARTS, VALUES = 192, 10_000  # most starts of a round, and most unknowns of all of them
FAR, MASKED, VISIBLE = Steps(25, damping=1e-2), Steps(6, damping=1e-3), Steps(3, damping=1e-4)
KINDS: tuple[Kind | Literal["beside"], ...] = ("beside", "seen", "outside")  # of starts, in turn until one adds
PASSES, LAST = 2, 2  # in which tokens and attention follow from each other, and how often these are at the end
SPARE = 3.0  # times the merit of its level: a known token with more adds nothing to the others
UNLIKE = 10.0  # times the median merit: nor has it less than this, or attention is to blame
BETTER = 0.5  # of its residual: a visible patch is replaced by one with less
UNUSUAL = 3.0  # times the median of the residuals, in units of rounding's: more is wrong


@dataclass(frozen=True)
class Level:
    """What a new token must fulfil."""

    merit: float
    noise: float  # its residual, in units of rounding's, or of the visible ones' median if attention is not that good


LEVELS = (Level(0.01, 2.0), Level(0.03, 4.0))


def separate(
    equations: Equations, naturalness: Naturalness, visible: Visible, masked: Tensor, generator: torch.Generator
) -> tuple[Visible, Tensor]:
    """The visible patches, and (found, unknowns) masked ones that differ, from some of each."""
    visible, masked = _polished(equations, visible, masked)
    masked = masked[_possible(equations, naturalness, masked)]
    for level in LEVELS:
        dry = 0
        while 0 < len(masked) < equations.unknowns and dry < len(KINDS) and not equations.time_is_up():
            new = _round(equations, naturalness, visible, masked, level, KINDS[dry], generator)
            visible, masked = _polished(equations, visible, torch.cat([masked, new]))
            merits = _merits(equations, visible, masked)
            useful = merits < max(SPARE * level.merit, UNLIKE * float(merits.median()))
            masked = masked[useful & _possible(equations, naturalness, masked)]
            dry = 0 if len(new) else dry + 1
        visible, masked = _repaired(equations, naturalness, visible, masked, generator)
    if len(masked) == equations.unknowns:  # attention is that of all tokens now
        for _ in range(LAST):
            visible, masked = _polished(equations, visible, masked)
    return visible, masked


def _round(
    equations: Equations,
    naturalness: Naturalness,
    visible: Visible,
    masked: Tensor,
    level: Level,
    kind: Kind | Literal["beside"],
    generator: torch.Generator,
) -> Tensor:
    """(new, unknowns) masked patches that one set of starts leads to."""
    there = known(equations, visible, masked)
    with_attention = attended_in_full(equations, there)
    apart = Apart.of(equations, there, with_attention)
    count = min(STARTS, max(VALUES // equations.unknowns, 1))
    if kind == "beside":
        pixel = float((naturalness.white - naturalness.black).mean())
        begun = starts_beside(equations, apart, masked, pixel, count, generator)
    else:
        begun = starts(kind, count, equations.level, there.visible, masked, generator)
    places = equations.hole[:1].expand(len(begun))
    ended = minimise(equations, begun, places, with_attention, FAR, apart)
    cost, noise = _cost_and_noise(equations, ended.coefficients, places, with_attention)
    usual = max(1.0, float(_relative(equations, there, with_attention).median()))  # of no visible one the median is nan
    fits = ended.residual < level.noise * usual * noise
    fits &= _possible(equations, naturalness, ended.coefficients)
    candidates, cost = ended.coefficients[fits], cost[fits]
    new = masked[:0]
    while len(candidates) and len(masked) + len(new) < equations.unknowns:
        merits = apart.value(cost, candidates, torch.arange(len(candidates), device=candidates.device))
        best = int(merits.argmin())
        if not merits[best] < level.merit:
            break
        new = torch.cat([new, candidates[best][None]])
        apart = Apart.of(equations, known(equations, visible, torch.cat([masked, new])), with_attention)
    return new


def _polished(equations: Equations, visible: Visible, masked: Tensor) -> tuple[Visible, Tensor]:
    """Known tokens minimised one by one, masked ones apart from all others."""
    for _ in range(PASSES):
        there = known(equations, visible, masked)
        with_attention = attended_in_full(equations, there)
        apart = Apart.of(equations, there, with_attention).among(there)
        places = equations.hole[:1].expand(len(masked))
        moved = minimise(equations, there.visible, there.places, with_attention, VISIBLE)
        masked = minimise(equations, masked, places, with_attention, MASKED, apart).coefficients
        coefficients, residual = visible.coefficients.clone(), visible.residual.clone()
        coefficients[visible.good], residual[visible.good] = moved.coefficients, moved.residual
        visible = Visible(coefficients, residual, visible.good)
    return visible, masked


def _possible(equations: Equations, naturalness: Naturalness, masked: Tensor) -> Tensor:
    """(masked,) bool: which masked patches some picture may have."""
    return naturalness.excess(masked, equations.hole[:1].expand(len(masked))) < IMPOSSIBLE


def _merits(equations: Equations, visible: Visible, masked: Tensor) -> Tensor:
    """(masked,) of each known masked patch, apart from all others."""
    there = known(equations, visible, masked)
    with_attention = attended_in_full(equations, there)
    cost = _cost_and_noise(equations, masked, equations.hole[:1].expand(len(masked)), with_attention)[0]
    rows = torch.arange(len(masked), device=masked.device)
    return Apart.of(equations, there, with_attention).among(there).value(cost, masked, rows)


def _repaired(
    equations: Equations, naturalness: Naturalness, visible: Visible, masked: Tensor, generator: torch.Generator
) -> tuple[Visible, Tensor]:
    """Start visible patches again that do not fit, and polish all if there were any."""
    with_attention = attended_in_full(equations, known(equations, visible, masked))
    cost, noise = _cost_and_noise(equations, visible.coefficients, equations.visible, with_attention)
    relative = cost.sqrt() / noise
    usual = relative < UNUSUAL * max(1.0, float(relative.median()))
    good = visible.good & usual & (naturalness.excess(visible.coefficients, equations.visible) < IMPOSSIBLE)
    if good.all() or equations.time_is_up():
        return visible, masked
    begun = Visible(visible.coefficients, cost.sqrt(), good)
    again = restarted(equations, naturalness, begun, masked, generator)
    impossible = naturalness.excess(begun.coefficients, equations.visible) >= IMPOSSIBLE
    better = (impossible | (again.residual < BETTER * begun.residual))[:, None]
    coefficients = torch.where(better, again.coefficients, begun.coefficients)
    possible = naturalness.excess(coefficients, equations.visible) < IMPOSSIBLE
    return _polished(equations, Visible(coefficients, begun.residual, possible), masked)


def _relative(equations: Equations, there: Known, with_attention: Attended) -> Tensor:
    """(visible,) residuals in units of what rounding makes of them."""
    cost, noise = _cost_and_noise(equations, there.visible, there.places, with_attention)
    return cost.sqrt() / noise


def _cost_and_noise(
    equations: Equations, coefficients: Tensor, places: Tensor, with_attention: Attended
) -> tuple[Tensor, Tensor]:
    """(rows,) cost of patches, and the length that rounding makes of their residual."""
    point = equations.at(with_attention(equations.tokens(coefficients, places)))
    return point.cost, equations.noise(point)
