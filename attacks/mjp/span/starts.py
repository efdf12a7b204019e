"""Where the search for masked patches starts. All starts satisfy level.c = 1, as every masked patch does."""

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["anywhere", "outside", "mixed"]


def starts(kind: Kind, count: int, level: Tensor, found: Tensor, generator: torch.Generator) -> Tensor:
    """Draw start points.

    Args:
        kind: "anywhere" is isotropic. "outside" is isotropic in the Euclidean complement of the patches
            found, where the missing ones have parts that no combination of the found ones has. "mixed"
            lies on and beyond the line between such a point and a found patch.
        count: How many.
        level: (unknowns,).
        found: (found, unknowns), coefficients of the masked patches found so far.
        generator: Source of randomness.
    """
    drawn = _normal(3 * count, len(level), generator).to(level)
    if kind == "anywhere" or not len(found) or len(found) >= len(level):
        return _short(drawn, count, level, generator)
    complement = torch.linalg.qr(found.T, mode="complete")[0][:, len(found) :]
    outside = _short((drawn @ complement) @ complement.T, count, level, generator)
    if kind == "outside":
        return outside
    anchors = found[torch.randint(len(found), (count,), generator=generator).to(found.device)]
    along = torch.rand(count, 1, generator=generator, dtype=torch.float64).to(level) * 2.5 - 0.75
    scattered = _short(_normal(3 * count, len(level), generator).to(level), count, level, generator)
    return anchors + along * (outside - anchors) + 0.3 * (scattered - outside)


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def _short(drawn: Tensor, count: int, level: Tensor, generator: torch.Generator) -> Tensor:
    """Scale to level.c = 1; directions that this makes long, being nearly orthogonal to the level, are left out."""
    scaled = drawn / (drawn @ level)[:, None]
    shortest = scaled.norm(dim=1).argsort()[: 2 * len(drawn) // 3]
    chosen: Tensor = scaled[shortest[torch.randperm(len(shortest), generator=generator)[:count].to(shortest.device)]]
    return chosen
