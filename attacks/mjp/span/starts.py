"""Where searches for masked patches start: all with level.c = 1, as every masked patch has it."""

from typing import Literal

import torch
from torch import Tensor

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
