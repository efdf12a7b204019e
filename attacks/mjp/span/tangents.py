"""Where a missing token lies that is nearly alike to a known one.

Next to a known patch, to first order, the cost is d^T Q d and what is added to the known tokens d^T R d. Directions d
in which the first is small against the sum of both lead to a missing token, or at least to a mixture with one.
"""

import torch
from torch import Tensor

from fedmjp.attacks.mjp.span.apart import SeparationMerit
from fedmjp.attacks.mjp.span.equations import PatchEquations

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
