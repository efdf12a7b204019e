"""What uploads leave open of a picture: every patch lies in a known affine subspace."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.mjp.facts import LinearFacts

NEGLIGIBLE = 1e-12  # of an eigenvalue of a projector, which is 0 or 1: float64 rounding


@dataclass(frozen=True)
class Level:
    """A linear equation that some patches satisfy: x_t^T vector = 1 at ``places``.

    Attributes:
        places: (patches,) bool.
        vector: (values,) float64.
    """

    places: Tensor
    vector: Tensor


@dataclass(frozen=True)
class AffinePatches:
    """Patch t of the clean picture, in its true place, is ``known[t] + c_t^T basis`` for some c_t.

    Attributes:
        known: (patches, values) float64, in the network's input space, orthogonal to ``basis``.
        basis: (unknowns per patch, values) float64, orthonormal rows; empty where nothing is open.
        levels: Equations that hold besides.
    """

    known: Tensor
    basis: Tensor
    levels: tuple[Level, ...]


def of_one_upload(facts: LinearFacts) -> AffinePatches:
    """What the facts of one upload leave open: coefficients in the span of the masked patches."""
    levels = (Level(facts.mask, facts.level),) if facts.level.any() else ()
    return AffinePatches(facts.known, facts.basis, levels)


@dataclass(frozen=True)
class Stack:
    """What uploads of one picture state together: A x_t = right_t for every patch t.

    Upload r says (I - P_r) x_t = e_t^(r) (facts 3 and 4). Summed over the uploads, A = sum_r (I - P_r) is
    positive semidefinite. Its null space is the intersection of the spans, the span of the patches that
    were masked in every upload; elsewhere its eigenvalues solve it. Weights for the uploads are not worth
    their while: those of one picture are about equally well conditioned.

    Attributes:
        right: (patches, values) float64, the sum of e_t^(r).
        strengths: (values,) float64, eigenvalues of A, ascending.
        directions: (values, values) float64, its eigenvectors in columns.
    """

    right: Tensor
    strengths: Tensor
    directions: Tensor

    @staticmethod
    def of(facts: Sequence[LinearFacts]) -> "Stack":
        """The sums, solved for their eigenvectors."""
        basis = torch.cat([each.basis for each in facts])
        whole = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
        strengths, directions = torch.linalg.eigh(len(facts) * whole - basis.mT @ basis)
        return Stack(torch.stack([each.known for each in facts]).sum(dim=0), strengths, directions)

    def solve(self, open_: Tensor) -> tuple[Tensor, Tensor]:
        """Solution where it is not left open, and basis of what is.

        Args:
            open_: (values,) bool, per direction.

        Returns:
            (patches, values), and (open, values) with orthonormal rows.
        """
        solved = self.directions[:, ~open_]
        known = (self.right @ solved / self.strengths[~open_]) @ solved.mT
        return known, self.directions[:, open_].mT.contiguous()


def of_several_uploads(facts: Sequence[LinearFacts]) -> AffinePatches:
    """What uploads of one picture leave open together.

    Spans are known up to noise, which lifts the eigenvalues of their intersection to what of it leaks
    out of each (fact 7). A direction counts as known if more than that is left of its eigenvalue.
    """
    stack = Stack.of(facts)
    basis, leak = torch.cat([each.basis for each in facts]), torch.cat([each.leak for each in facts])
    leaked = ((basis @ stack.directions).square() * leak[:, None]).sum(dim=0)
    open_ = stack.strengths <= (2 * leaked).clamp(min=NEGLIGIBLE * len(facts))
    levels = tuple(Level(each.mask, each.level) for each in facts if each.level.any())
    return AffinePatches(*stack.solve(open_), levels)
