"""Solvers of linear systems, against numpy's pseudo-inverse."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmjp.attacks.linear_systems import GaussianPrior, minimum_norm, positive_solution


def by_pseudo_inverse(rows: Tensor, right: Tensor) -> Tensor:
    pairs = zip(rows.mT.numpy(), right.numpy(), strict=True)
    return torch.stack([torch.from_numpy(np.linalg.pinv(matrix, rcond=1e-13) @ values) for matrix, values in pairs])


@pytest.mark.parametrize(("unknowns", "equations"), [(5, 9), (9, 5), (6, 6)])
@pytest.mark.parametrize("rank", ["full", "lacking", "one of the stack"])
def test_minimum_norm_is_the_pseudo_inverse(
    unknowns: int, equations: int, rank: str, generator: torch.Generator
) -> None:
    rows = torch.randn(3, unknowns, equations, generator=generator, dtype=torch.float64)
    right = torch.randn(3, equations, 4, generator=generator, dtype=torch.float64)
    lacking = {"full": slice(0), "lacking": slice(None), "one of the stack": slice(1)}[rank]
    rows[lacking, 0] = rows[lacking, 1]
    if unknowns > equations:
        rows[lacking, :, 0] = rows[lacking, :, 1]
    torch.testing.assert_close(minimum_norm(rows, right), by_pseudo_inverse(rows, right), rtol=1e-9, atol=1e-9)


def test_positive_systems_are_solved_and_those_that_rounding_made_indefinite(generator: torch.Generator) -> None:
    roots = torch.randn(5, 12, 12, generator=generator, dtype=torch.float64)
    matrices, right = roots @ roots.mT, torch.randn(5, 12, generator=generator, dtype=torch.float64)
    matrices[3] -= 5 * torch.eye(12)
    assert int((torch.linalg.eigvalsh(matrices)[:, 0] < 0).sum()) == 1
    expected = np.linalg.solve(matrices.numpy(), right.numpy()[:, :, None])[:, :, 0]
    torch.testing.assert_close(positive_solution(matrices, right), torch.from_numpy(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rank", [9, 4])
def test_a_precision_is_the_pseudo_inverse_of_the_covariance(rank: int, generator: torch.Generator) -> None:
    root = torch.randn(9, rank, generator=generator, dtype=torch.float64)
    expected = np.linalg.pinv((root @ root.T).numpy(), rcond=1e-13, hermitian=True)
    found = GaussianPrior(torch.zeros(9, dtype=torch.float64), root @ root.T).precision
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-8, atol=1e-8)
