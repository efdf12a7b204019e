"""The subspaces that uploads leave open of a picture: every patch lies in a known affine subspace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmjp.attacks.mjp.facts import LinearFacts

NEGLIGIBLE = 1e-12  # of an eigenvalue of a projector, which is 0 or 1: float64 rounding
ROUNDS = 300
SETTLED = 1e-6  # change of a value from one round to the next


@dataclass(frozen=True)
class AffinePatches:
    """Subspaces that uploads leave open: patch t of the clean picture is ``fixed[t] + c_t^T basis`` for some c_t."""

    fixed: Tensor  # (patches, values) float64, in the network's input space, orthogonal to the basis
    basis: Tensor  # (unknowns per patch, values) float64, orthonormal rows; empty where nothing is open


def of_one_upload(facts: LinearFacts) -> AffinePatches:
    """Return what the facts of one upload leave open: coefficients in the span of the differences of masked patches.

    Args:
        facts: Those of one upload.
    """
    return AffinePatches(facts.stated, facts.open)


@dataclass(frozen=True)
class Stack:
    """The equations A x_t = right_t, for every patch t, that uploads of one picture state together.

    Upload r says (I - P_r) x_t = e_t^(r) (facts 3 and 4). Summed over the uploads, A = sum_r (I - P_r) is
    positive semidefinite. Its null space is the intersection of the spans, the span of the patches that
    were masked in every upload; elsewhere its eigenvalues solve it. Weights for the uploads are not worth
    their while: those of one picture are about equally well conditioned.
    """

    right: Tensor  # (patches, values) float64, the sum of e_t^(r)
    strengths: Tensor  # (values,) float64, eigenvalues of A, ascending
    directions: Tensor  # (values, values) float64, its eigenvectors in columns

    @staticmethod
    def of(facts: Sequence[LinearFacts]) -> "Stack":
        """Add up the equations of uploads and find their eigenvectors.

        Args:
            facts: Those of the uploads of one picture.
        """
        basis = torch.cat([upload.open for upload in facts])
        whole = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
        strengths, directions = torch.linalg.eigh(len(facts) * whole - basis.mT @ basis)
        return Stack(torch.stack([upload.stated for upload in facts]).sum(dim=0), strengths, directions)

    def solve(self, open_: Tensor) -> tuple[Tensor, Tensor]:
        """Solve the equations outside of the directions that are left open.

        Args:
            open_: (values,) bool, True for an open direction.

        Returns:
            The solution (patches, values), and orthonormal rows of the open directions.
        """
        solved = self.directions[:, ~open_]
        solution = (self.right @ solved / self.strengths[~open_]) @ solved.mT
        return solution, self.directions[:, open_].mT.contiguous()


def of_several_uploads(facts: Sequence[LinearFacts]) -> AffinePatches:
    """Return what one or several uploads of one picture leave open together.

    Spans are known up to noise, which lifts the eigenvalues of their intersection to what of it leaks
    out of each (fact 7). A direction counts as known if more than that is left of its eigenvalue.

    Args:
        facts: Those of the uploads of one picture.
    """
    if len(facts) == 1:
        return of_one_upload(facts[0])
    stack = Stack.of(facts)
    parts = [(upload.open @ stack.directions).mT @ upload.leak for upload in facts]
    leaked = torch.cat(parts, dim=1).square().sum(dim=1)
    open_ = stack.strengths <= (2 * leaked).clamp(min=NEGLIGIBLE * len(facts))
    return AffinePatches(*stack.solve(open_))


def complete(facts: Sequence[LinearFacts], patches: Tensor) -> list[LinearFacts]:
    """Open the direction that each upload of a picture lacks and errs in (fact 10), as the others tell it.

    With the picture known, upload r errs by g b^T, whose direction b its singular value decomposition gives; with all b
    known, the stack gives the picture. The two take turns.

    Args:
        facts: Those of the uploads of one picture.
        patches: A guess, (patches, values).
    """
    guess, completed = patches, list(facts)
    for _ in range(ROUNDS):
        completed = [_complete(upload, patches) if upload.errs else upload for upload in facts]
        affine = of_several_uploads(completed)
        previous, patches = patches, affine.fixed + guess @ affine.basis.mT @ affine.basis
        if (patches - previous).abs().max() <= SETTLED:
            break
    return completed


def _complete(upload: LinearFacts, patches: Tensor) -> LinearFacts:
    error = patches - (patches @ upload.open.mT) @ upload.open - upload.stated
    squares, directions = torch.linalg.eigh(error.mT @ error)
    direction = directions[:, -1]
    noise = upload.variance.mean() * (len(direction) - len(upload.open))
    leak = torch.nn.functional.pad(upload.leak, (0, 1, 0, 1))
    leak[-1, -1] = (noise / squares[-1]).sqrt()
    return replace(
        upload,
        open=torch.cat([upload.open, direction[None]]),
        stated=upload.stated - torch.outer(upload.stated @ direction, direction),
        leak=leak,
        errs=0,
    )
