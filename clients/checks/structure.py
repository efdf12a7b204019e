"""Whether weights have a form that training does not give them: constant lines, parallel rows, a collapsed rank."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedmjp.clients.checks.base import Finding, Incoming, make_finding, skip_finding
from fedmjp.clients.checks.parallel import COSINE, may_have_parallel_rows, unit_rows

CONSTANT = "constant lines"
PARALLEL = "parallel rows"
RANK = "stable rank"
FEWEST = 8  # rows and columns of a matrix that is looked at; rows of fewer columns than the next are parallel by chance
WIDEST_BY_CHANCE = 16
CHUNK = 1024  # rows that are compared at a time
POWERS = 30  # steps of the power method
ROWS_LIMIT = 0.05
RANK_LIMIT, RANK_FIRST = 4.0, 1 / 1.05
NARROW = 1.2  # stable rank; honest steps of large rates collapse wider ones as fast, to 1.7 in a round


def check_structure(incoming: Incoming) -> list[Finding]:
    """Examine every matrix W of at least eight rows and columns, a convolution's filters as rows.

    Args:
        incoming: The model and its history.
    """
    matrices = dict(_matrices(incoming.weights))
    previous = dict(_matrices(incoming.previous or {}))
    if not matrices:
        return [skip_finding(name, "the model has no matrix of that size") for name in (CONSTANT, PARALLEL, RANK)]
    constant, parallel, collapse = (0.0, ""), (0.0, ""), (0.0, "")
    for name, matrix in matrices.items():
        past = previous.get(name)
        lines, rows, rank = _constant(matrix), _parallel(matrix), _stable_rank(matrix)
        if past is not None:
            lines, rows = lines and lines - _constant(past), rows and rows - _parallel(past)
            rank = max(rank / _stable_rank(past), 0.0 if rank < NARROW else 1.0)
        constant, parallel = max(constant, (lines, name)), max(parallel, (rows, name))
        collapse = max(collapse, (1 / rank, name))
    limit = RANK_LIMIT if previous else RANK_FIRST
    return [
        make_finding(CONSTANT, constant[0], 0.0, _about("rows or columns that are constant", constant)),
        make_finding(PARALLEL, parallel[0], ROWS_LIMIT, _about("rows that are parallel to others", parallel)),
        make_finding(RANK, collapse[0], limit, _about("how far the rank of a matrix has collapsed", collapse)),
    ]


def _about(measure: str, worst: tuple[float, str]) -> str:
    return f"{measure}, at most in {worst[1]}" if worst[1] else measure


def _matrices(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        one_in = tensor.ndim == 4 and tensor.shape[1] == 1  # depthwise: filters of so few numbers resemble each other
        if tensor.ndim < 2 or one_in or not tensor.is_floating_point():
            continue
        matrix = tensor.detach().flatten(1).float()
        if min(matrix.shape) >= FEWEST:
            yield name, matrix


def _constant(matrix: Tensor) -> float:
    shares = [float((matrix.amax(dim) == matrix.amin(dim)).double().mean()) for dim in (0, 1)]
    return max(shares)


def _parallel(matrix: Tensor) -> float:
    if matrix.shape[1] < WIDEST_BY_CHANCE:
        return 0.0
    directions, count = unit_rows(matrix), 0
    if not may_have_parallel_rows(directions):
        return 0.0
    for start in range(0, len(matrix), CHUNK):
        near = (directions[start : start + CHUNK] @ directions.mT).abs() > COSINE
        count += int((near.sum(dim=1) > 1).sum())
    return count / len(matrix)


def _stable_rank(matrix: Tensor) -> float:
    """Estimate the stable rank by the power method; 1 for a matrix of zeros."""
    tiny = torch.finfo(torch.float32).tiny
    scaled = matrix / matrix.abs().max().clamp(min=tiny)
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix.device)
    for _ in range(POWERS):
        vector = scaled.mT @ (scaled @ vector)
        vector = vector / vector.norm().clamp(min=tiny)
    largest = float((scaled @ vector).norm())
    return max(float(scaled.norm()) ** 2 / largest**2, 1.0) if largest else 1.0
