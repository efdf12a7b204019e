"""Where searches for masked patches start: all with level.c = 1, as every masked patch has it.

Some starts lie beside known patches, where a missing token may be that is nearly alike. Next to a known patch, to first
order, the cost is d^T Q d, and what is added to the known tokens d^T R d. Directions d in which the first is small
against the sum of both lead to a missing token, or at least to a mixture with one.
"""

from typing import Literal

import torch
from torch import Tensor

from fedmjp.attacks.mjp.span.apart import SeparationMerit
from fedmjp.attacks.mjp.span.equations import PatchEquations

Kind = Literal["anywhere", "outside", "mixed", "seen"]


def starts(
    kind: Kind, count: int, level: Tensor, visible: Tensor, masked: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw starts (at most count, unknowns) of one kind.

    "seen" are like visible ones, which pictures repeat where they mask. "anywhere" is isotropic. "outside" is isotropic
    in the Euclidean complement of the masked ones, where missing ones have parts that no combination of these has.
    "mixed" lies on and beyond the line between such a point and a masked one.

    Args:
        kind: As above.
        count: At most so many.
        level: (unknowns,), l.
        visible: (patches, unknowns) known visible patches.
        masked: (patches, unknowns) known masked patches.
        generator: On the CPU.
    """
    if kind == "seen":
        selected = visible[torch.randperm(len(visible), generator=generator)[:count].to(visible.device)]
        return selected / (selected @ level)[:, None]
    drawn = _normal(3 * count, len(level), generator).to(level)
    if kind == "anywhere" or not len(masked) or len(masked) >= len(level):
        return _short(drawn, count, level, generator)
    complement = torch.linalg.qr(masked.T, mode="complete")[0][:, len(masked) :]
    outside = _short((drawn @ complement) @ complement.T, count, level, generator)
    if kind == "outside":
        return outside
    anchors = masked[torch.randint(len(masked), (count,), generator=generator).to(masked.device)]
    along = torch.rand(count, 1, generator=generator, dtype=torch.float64).to(level) * 2.5 - 0.75
    scattered = _short(_normal(3 * count, len(level), generator).to(level), count, level, generator)
    return anchors + along * (outside - anchors) + 0.3 * (scattered - outside)


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _short(drawn: Tensor, count: int, level: Tensor, generator: torch.Generator) -> Tensor:
    """Scale to level.c = 1, without directions that this makes long, being nearly orthogonal to the level."""
    scaled = drawn / (drawn @ level)[:, None]
    shortest = scaled.norm(dim=1).argsort()[: 2 * len(drawn) // 3]
    selected: Tensor = scaled[shortest[torch.randperm(len(shortest), generator=generator)[:count].to(shortest.device)]]
    return selected


DIRECTIONS = 6  # per patch
NEAREST, FARTHEST = 0.01, 0.1  # root mean square that starts are away, of 1
FLOAT32 = 2.0**-20  # of the largest strength: what matrices formed in float32 resolve


def starts_beside(
    equations: PatchEquations,
    merit: SeparationMerit,
    masked: Tensor,
    pixel: float,
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Return starts (at most count, unknowns), both ways along the most promising directions from known patches.

    Args:
        equations: Of one upload.
        merit: That keeps patches apart.
        masked: (masked, unknowns) known ones.
        pixel: What 1 in [0, 1] is in the network's input space.
        count: At most so many.
        generator: On the CPU.
    """
    promise, directions = directions_from(equations, merit, masked)
    promise, directions = promise[:, :DIRECTIONS], directions[:, :, :DIRECTIONS].mT
    size = pixel * equations.values**0.5
    both = torch.stack([directions, -directions], dim=2)
    drawn = torch.rand(both.shape[:-1], generator=generator, dtype=torch.float64).to(masked)
    away = size * NEAREST * (FARTHEST / NEAREST) ** drawn
    starts = masked[:, None, None] + both * away[..., None]
    order = promise[:, :, None].expand(starts.shape[:-1]).flatten().argsort()[:count]
    selected: Tensor = starts.flatten(0, 2)[order]
    return selected


def directions_from(equations: PatchEquations, merit: SeparationMerit, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Return (masked, unknowns) shares of the cost in the sum, ascending, and their unit directions, a row each.

    Args:
        equations: Of one upload.
        merit: That keeps patches apart.
        masked: (masked, unknowns) known ones.
    """
    places = equations.hole[:1].expand(len(masked))
    point = equations.at(merit.attended(equations.tokens(masked, places)))
    cost, _ = equations.normal(point, masked, places)
    whole = torch.empty_like(cost)
    for row in range(len(masked)):
        inputs, activations = equations.jacobians(point[torch.tensor([row], device=masked.device)])
        added = torch.cat(
            [merit.inputs.free.mT.float() @ inputs[:, 0], merit.activations.free.mT.float() @ activations[:, 0]]
        )
        whole[row] = cost[row] + (added.mT @ added).double()
    strengths, axes = torch.linalg.eigh(whole)
    # Matrices are formed in float32: what it does not resolve may be negative, and counts as hardly determined.
    white = axes / strengths.clamp(min=FLOAT32 * strengths[:, -1:]).sqrt()[:, None]
    shares, vectors = torch.linalg.eigh(white.mT @ cost @ white)
    directions = white @ vectors
    return shares, directions / directions.norm(dim=1, keepdim=True)
