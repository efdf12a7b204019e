"""Rows of a matrix that point the same way, or opposite ones."""

import torch
from torch import Tensor

COSINE = 0.999  # |cosine| of rows that are parallel
SCREENED = 16  # columns that tell most rows apart
ROUNDING = 1e-4  # of squared distances in float32


def directions_of(matrix: Tensor) -> Tensor:
    """Rows in unit length, float32; those of zeros stay zero."""
    rows = matrix.detach().float()
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths.clamp(min=torch.finfo(torch.float32).tiny)


def may_have_parallel_rows(directions: Tensor) -> bool:
    """Whether rows of unit length can be parallel: never False where two are.

    Of parallel rows every few columns are near each other, up to the sign: distances of parts are no longer than those
    of the whole. It costs a fraction of all cosines.
    """
    part = directions[:, :SCREENED]
    squares = part.square().sum(dim=1)
    distances = squares[:, None] + squares - 2 * (part @ part.mT).abs()
    near = distances <= 2 * (1 - COSINE) + ROUNDING
    return int(near.count_nonzero()) > len(directions)
