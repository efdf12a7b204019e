"""Masked patches that resemble one another, told apart.

A search from random points meets the patches that stand alone. What it leaves is nearly alike to something that is
known, or it is known as a mixture. Here every known token is first minimised apart from all others (``apart``), which
takes mixtures to one of what they mix; then new ones are sought beside the known ones (``starts``) and among what is
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
from fedmjp.attacks.mjp.span.starts import Kind, starts, starts_beside
from fedmjp.attacks.mjp.span.unseen import CompletePatches, fitted
from fedmjp.attacks.mjp.span.visible import IMPOSSIBLE, VisiblePatches, good_patches, restarted

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
    """Tell masked patches apart and find missing ones; return all patches.

    Args:
        equations: Of one upload.
        naturalness: What patches are possible.
        visible: Visible patches.
        masked: (masked, unknowns) some masked ones.
        natural: (visible, unknowns) in place of visible patches that no picture has.
        generator: On the CPU.
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
    """Add copies of these masked patches as stand-ins for missing ones, stirred, as equal ones would stay equal."""
    copies = with_copies(equations, good_patches(equations, visible, masked)).masked[len(masked) :]
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
    """Return (new, unknowns) masked patches that one set of starts leads to."""
    known_patches, masked, with_attention = tokens.found(equations), tokens.masked, tokens.attended(equations)
    merit = SeparationMerit.of(equations, known_patches, with_attention)
    count = min(STARTS, max(VALUES // equations.unknowns, 1))
    if kind == "beside":
        pixel = float((naturalness.white - naturalness.black).mean())
        begun = starts_beside(equations, merit, masked, pixel, count, generator)
    else:
        begun = starts(kind, count, equations.level, known_patches.visible, masked, generator)
    places = equations.hole[:1].expand(len(begun))
    ended = minimise(equations, begun, places, with_attention, FAR, merit)
    cost, noise = _cost_and_noise(equations, ended.coefficients, places, with_attention)
    usual = max(
        1.0, float(_relative(equations, known_patches, with_attention).median())
    )  # of no visible one the median is nan
    fits = ended.residual < level.noise * usual * noise
    fits &= _possible(equations, naturalness, ended.coefficients)
    candidates, cost = ended.coefficients[fits], cost[fits]
    new = masked[:0]
    while len(candidates) and len(masked) + len(new) < equations.unknowns:
        merits = merit.value(cost, candidates, torch.arange(len(candidates), device=candidates.device))
        best = int(merits.argmin())
        if not merits[best] < level.merit:
            break
        new = torch.cat([new, candidates[best][None]])
        merit = SeparationMerit.of(
            equations, good_patches(equations, tokens.visible, torch.cat([masked, new])), with_attention
        )
    return new


def polished(equations: PatchEquations, tokens: CompletePatches) -> CompletePatches:
    """Minimise masked patches one by one, apart from all others, and fit the others before and after."""
    tokens = fitted(equations, tokens, FITTED)
    known_patches, with_attention = tokens.found(equations), tokens.attended(equations)
    merit = SeparationMerit.of(equations, known_patches, with_attention).among(known_patches)
    places = equations.hole[:1].expand(len(tokens.masked))
    masked = minimise(equations, tokens.masked, places, with_attention, MASKED, merit).coefficients
    return fitted(equations, replace(tokens, masked=masked), FITTED)


def _possible(equations: PatchEquations, naturalness: Naturalness, masked: Tensor) -> Tensor:
    """Tell (masked,) which masked patches some picture may have."""
    return naturalness.excess(masked, equations.hole[:1].expand(len(masked))) < IMPOSSIBLE


def _merits(equations: PatchEquations, tokens: CompletePatches) -> Tensor:
    """Return (found,) the merit of each known masked patch, apart from all others."""
    masked, known_patches, with_attention = tokens.masked, tokens.found(equations), tokens.attended(equations)
    cost = _cost_and_noise(equations, masked, equations.hole[:1].expand(len(masked)), with_attention)[0]
    rows = torch.arange(len(masked), device=masked.device)
    return SeparationMerit.of(equations, known_patches, with_attention).among(known_patches).value(cost, masked, rows)


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
    new_visible = restarted(equations, naturalness, begun, with_attention, generator)
    impossible = naturalness.excess(begun.coefficients, equations.visible) >= IMPOSSIBLE
    better = (impossible | (new_visible.residual < BETTER * begun.residual))[:, None]
    repaired = replace(begun, coefficients=torch.where(better, new_visible.coefficients, begun.coefficients))
    repaired = _as_pictures_are(equations, naturalness, replace(repaired, good=torch.ones_like(good)), natural)
    return polished(equations, replace(tokens, visible=repaired))


def _as_pictures_are(
    equations: PatchEquations, naturalness: Naturalness, visible: VisiblePatches, natural: Tensor
) -> VisiblePatches:
    """Put natural patches in place of what no picture has, which is not good."""
    possible = naturalness.excess(visible.coefficients, equations.visible) < IMPOSSIBLE
    coefficients = torch.where(possible[:, None], visible.coefficients, natural)
    return VisiblePatches(coefficients, visible.residual, visible.good & possible)


def _relative(equations: PatchEquations, known_patches: PatchSet, with_attention: Attended) -> Tensor:
    """Return (visible,) residuals in units of what rounding makes of them."""
    cost, noise = _cost_and_noise(equations, known_patches.visible, known_patches.places, with_attention)
    return cost.sqrt() / noise


def _cost_and_noise(
    equations: PatchEquations, coefficients: Tensor, places: Tensor, with_attention: Attended
) -> tuple[Tensor, Tensor]:
    """Return (rows,) the cost of patches, and the length that rounding makes of their residual."""
    point = equations.at(with_attention(equations.tokens(coefficients, places)))
    return point.cost, equations.noise(point)
