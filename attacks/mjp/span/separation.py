"""Masked patches that resemble one another, told apart.

A search from random points meets the patches that stand alone. What it leaves is nearly alike to something that is
known, or it is known as a mixture. Here every known token is first minimised apart from all others (``apart``), which
takes mixtures to one of what they mix; then new ones are sought beside the known ones (``tangents``) and among what is
seen of the picture. Each must fit, and must add to the known ones more than its residual. What is still missing has
stand-ins in the attention (``unseen``).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedmjp.attacks.mjp.span.apart import SeparationMerit
from fedmjp.attacks.mjp.span.counts import with_copies
from fedmjp.attacks.mjp.span.equations import Attended, PatchEquations, PatchSet
from fedmjp.attacks.mjp.span.minimise import Steps, minimise
from fedmjp.attacks.mjp.span.naturalness import Naturalness
from fedmjp.attacks.mjp.span.starts import Kind, starts
from fedmjp.attacks.mjp.span.tangents import starts_beside
from fedmjp.attacks.mjp.span.unseen import CompletePatches, fitted
from fedmjp.attacks.mjp.span.visible import IMPOSSIBLE, VisiblePatches, known, restarted

STARTS, VALUES = 192, 10_000  # most starts of a round, and most unknowns of all of them
FAR, MASKED = Steps(25, damping=1e-2), Steps(6, damping=1e-3)
KINDS: tuple[Kind | Literal["beside"], ...] = ("beside", "seen", "outside")  # of starts, in turn until one adds
FITTED = 3  # steps of the others, each time
STIRRED = 0.01  # of the length of a copy
SPARE = 3.0  # times the merit of its level: a known token with more adds nothing to the others
UNLIKE = 10.0  # times the median merit: nor has it less than this, or attention is to blame
BETTER = 0.5  # of its residual: a visible patch is replaced by one with less
UNUSUAL = 3.0  # times the median of the residuals, in units of rounding's: more is wrong


@dataclass(frozen=True)
class AcceptanceLevel:
    """What a new token must fulfil."""

    merit: float
    noise: float  # its residual, in units of rounding's, or of the visible ones' median if attention is not that good


LEVELS = (AcceptanceLevel(0.01, 2.0), AcceptanceLevel(0.03, 4.0))


def separate(
    equations: PatchEquations,
    naturalness: Naturalness,
    visible: VisiblePatches,
    masked: Tensor,
    natural: Tensor,
    generator: torch.Generator,
) -> CompletePatches:
    """All tokens, the masked ones that are found told apart, from visible ones and some masked ones.

    ``natural`` (visible, unknowns) are in the place of visible patches that no picture has.
    """
    visible = _as_pictures_are(equations, naturalness, visible, natural)
    masked = masked[_possible(equations, naturalness, masked)]
    tokens = polished(equations, _with_copies(equations, visible, masked, generator))
    tokens = tokens.without(~_possible(equations, naturalness, tokens.masked))
    for level in LEVELS:
        tokens = _repaired(equations, naturalness, tokens, natural, generator)
        dry = 0
        while 0 < len(tokens.masked) < equations.unknowns and dry < len(KINDS) and not equations.time_is_up():
            new = _round(equations, naturalness, tokens, level, KINDS[dry], generator)
            if len(new):
                masked = torch.cat([tokens.masked, new])
                tokens = polished(equations, _with_copies(equations, tokens.visible, masked, generator))
                merits = _merits(equations, tokens)
                useful = merits < max(SPARE * level.merit, UNLIKE * float(merits.median()))
                tokens = tokens.without(~(useful & _possible(equations, naturalness, tokens.masked)))
            dry = 0 if len(new) else dry + 1
    return _repaired(equations, naturalness, tokens, natural, generator)


def _with_copies(
    equations: PatchEquations, visible: VisiblePatches, masked: Tensor, generator: torch.Generator
) -> CompletePatches:
    """With copies of these masked patches, stirred as equal ones would stay equal, as stand-ins for the others."""
    copies = with_copies(equations, known(equations, visible, masked)).masked[len(masked) :]
    noise = torch.randn(copies.shape, generator=generator, dtype=torch.float64).to(copies)
    size = STIRRED * copies.norm(dim=1, keepdim=True) / copies.shape[1] ** 0.5
    return CompletePatches(visible, masked, copies + size * noise, copies)


def _round(
    equations: PatchEquations,
    naturalness: Naturalness,
    tokens: CompletePatches,
    level: AcceptanceLevel,
    kind: Kind | Literal["beside"],
    generator: torch.Generator,
) -> Tensor:
    """(new, unknowns) masked patches that one set of starts leads to."""
    there, masked, with_attention = tokens.found(equations), tokens.masked, tokens.attended(equations)
    apart = SeparationMerit.of(equations, there, with_attention)
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
        apart = SeparationMerit.of(
            equations, known(equations, tokens.visible, torch.cat([masked, new])), with_attention
        )
    return new


def polished(equations: PatchEquations, tokens: CompletePatches) -> CompletePatches:
    """Masked patches minimised one by one, apart from all others, and before and after it all others fitted to them."""
    tokens = fitted(equations, tokens, FITTED)
    there, with_attention = tokens.found(equations), tokens.attended(equations)
    apart = SeparationMerit.of(equations, there, with_attention).among(there)
    places = equations.hole[:1].expand(len(tokens.masked))
    masked = minimise(equations, tokens.masked, places, with_attention, MASKED, apart).coefficients
    return fitted(equations, replace(tokens, masked=masked), FITTED)


def _possible(equations: PatchEquations, naturalness: Naturalness, masked: Tensor) -> Tensor:
    """(masked,) bool: which masked patches some picture may have."""
    return naturalness.excess(masked, equations.hole[:1].expand(len(masked))) < IMPOSSIBLE


def _merits(equations: PatchEquations, tokens: CompletePatches) -> Tensor:
    """(found,) of each known masked patch, apart from all others."""
    masked, there, with_attention = tokens.masked, tokens.found(equations), tokens.attended(equations)
    cost = _cost_and_noise(equations, masked, equations.hole[:1].expand(len(masked)), with_attention)[0]
    rows = torch.arange(len(masked), device=masked.device)
    return SeparationMerit.of(equations, there, with_attention).among(there).value(cost, masked, rows)


def _repaired(
    equations: PatchEquations,
    naturalness: Naturalness,
    tokens: CompletePatches,
    natural: Tensor,
    generator: torch.Generator,
) -> CompletePatches:
    """Start visible patches again that do not fit, and polish all if there were any."""
    visible, with_attention = tokens.visible, tokens.attended(equations)
    cost, noise = _cost_and_noise(equations, visible.coefficients, equations.visible, with_attention)
    relative = cost.sqrt() / noise
    usual = relative < UNUSUAL * max(1.0, float(relative.median()))
    good = visible.good & usual & (naturalness.excess(visible.coefficients, equations.visible) < IMPOSSIBLE)
    if good.all() or equations.time_is_up():
        return tokens
    begun = VisiblePatches(visible.coefficients, cost.sqrt(), good)
    again = restarted(equations, naturalness, begun, with_attention, generator)
    impossible = naturalness.excess(begun.coefficients, equations.visible) >= IMPOSSIBLE
    better = (impossible | (again.residual < BETTER * begun.residual))[:, None]
    repaired = replace(begun, coefficients=torch.where(better, again.coefficients, begun.coefficients))
    repaired = _as_pictures_are(equations, naturalness, replace(repaired, good=torch.ones_like(good)), natural)
    return polished(equations, replace(tokens, visible=repaired))


def _as_pictures_are(
    equations: PatchEquations, naturalness: Naturalness, visible: VisiblePatches, natural: Tensor
) -> VisiblePatches:
    """With natural patches in place of what no picture has, which is not good."""
    possible = naturalness.excess(visible.coefficients, equations.visible) < IMPOSSIBLE
    coefficients = torch.where(possible[:, None], visible.coefficients, natural)
    return VisiblePatches(coefficients, visible.residual, visible.good & possible)


def _relative(equations: PatchEquations, there: PatchSet, with_attention: Attended) -> Tensor:
    """(visible,) residuals in units of what rounding makes of them."""
    cost, noise = _cost_and_noise(equations, there.visible, there.places, with_attention)
    return cost.sqrt() / noise


def _cost_and_noise(
    equations: PatchEquations, coefficients: Tensor, places: Tensor, with_attention: Attended
) -> tuple[Tensor, Tensor]:
    """(rows,) cost of patches, and the length that rounding makes of their residual."""
    point = equations.at(with_attention(equations.tokens(coefficients, places)))
    return point.cost, equations.noise(point)
