"""Rows of a matrix that point the same way, or opposite ones."""

import torch
from torch import Tensor

COSINE = 0.999  # |cosine| of rows that are parallel
SCREENED = 16  # columns that tell most rows apart
ROUNDING = 1e-4  # of squared distances in float32


def unit_rows(matrix: Tensor) -> Tensor:
    """Scale rows to unit length, as float32; rows of zeros stay zero.

    Args:
        matrix: The rows (rows, columns).
    """
    rows = matrix.detach().float()
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths.clamp(min=torch.finfo(torch.float32).tiny)


def may_have_parallel_rows(directions: Tensor) -> bool:
    """Tell whether rows can be parallel; never False where two are.

    Args:
        directions: Rows of unit length (rows, columns).
    """
    part = directions[:, :SCREENED]
    squares = part.square().sum(dim=1)
    distances = squares[:, None] + squares - 2 * (part @ part.mT).abs()
    near = distances <= 2 * (1 - COSINE) + ROUNDING
    return int(near.count_nonzero()) > len(directions)
