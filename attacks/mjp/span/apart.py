"""A merit that keeps tokens apart from those that are known, however alike they are.

Two tokens that are nearly alike span a plane in which their mixtures leave a residual of second order, which rounding
drowns: from anywhere near, a search ends at one of the two or between them. Seen from a known token, though, a mixture
is as far from being a zero as it is from the other one. So the cost is divided by n, the squared length of what a token
adds to the known ones within the spans, where their sums leave room for as many tokens as are missing:

    merit(c) = |r(c)|^2 / n(c),    n(c) = |N1^T h(c)|^2 + |N2^T a(c)|^2,

with orthonormal N1, N2 that complete the known tokens' h and a to the spans of all. It has no zero at a known token,
none at mixtures of known ones, and next to a known token it is small in those directions alone where another one lies.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmjp.attacks.first_block.equations import Span
from fedmjp.attacks.mjp.span.equations import Attended, PatchEquations, PatchPoint, PatchSet

DEPENDENT = 1e-10  # of the largest singular value: known tokens that differ by less are one


@dataclass(frozen=True)
class FreeSpace:
    """What known rows leave free of a span, and what each of them holds alone."""

    free: Tensor  # (values, missing), orthonormal
    duals: Tensor  # (known, values) unit vectors of the span, each orthogonal to all other known rows

    @staticmethod
    def of(span: Span, known_rows: Tensor) -> "FreeSpace":
        """Build from known rows of a span.

        Args:
            span: Of the upload.
            known_rows: (known, values), in the span.
        """
        inside = known_rows @ span.columns
        complete, _ = torch.linalg.qr(inside.mT, mode="complete")
        duals = torch.linalg.pinv(inside, rtol=DEPENDENT).mT
        unit_duals = (duals / duals.norm(dim=1, keepdim=True)) @ span.columns.mT
        return FreeSpace(span.columns @ complete[:, len(known_rows) :], unit_duals)

    def added(self, rows: Tensor, members: Tensor | None) -> Tensor:
        """Return what rows add to the known ones, (rows, values).

        Args:
            rows: (rows, values).
            members: (rows,) which known rows they are themselves; then all other known rows count.
        """
        added = rows @ self.free @ self.free.mT
        if members is None:
            return added
        duals = self.duals[members]
        return added + (rows * duals).sum(dim=1, keepdim=True) * duals


@dataclass(frozen=True)
class SeparationMerit:
    """The merit of masked patches, a ``Merit``: of new ones, or of ``members`` that are known, against all others."""

    equations: PatchEquations
    attended: Attended
    inputs: FreeSpace
    activations: FreeSpace
    members: Tensor | None = None  # (rows,) which known tokens the rows stand for

    @staticmethod
    def of(equations: PatchEquations, patches: PatchSet, attended: Attended) -> "SeparationMerit":
        """Build the merit apart from the class token and all known patches.

        Args:
            equations: Of one upload.
            patches: The known ones.
            attended: Adds the attention.
        """
        entering = torch.cat(
            [equations.class_token, equations.tokens(patches.coefficients, patches.all_places(equations))]
        )
        point = equations.at(attended(entering))
        return SeparationMerit(
            equations,
            attended,
            FreeSpace.of(equations.inputs, point.inputs),
            FreeSpace.of(equations.activations, point.activations),
        )

    def among(self, patches: PatchSet) -> "SeparationMerit":
        """Build the merit of the known masked patches themselves, each against all others."""
        first = 1 + len(patches.visible)
        return replace(self, members=torch.arange(first, first + len(patches.masked), device=patches.masked.device))

    def value(self, cost: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        """Compute the merit.

        Args:
            cost: (rows,) at the coefficients.
            coefficients: (rows, unknowns).
            rows: (rows,) which problems these are.
        """
        return cost / self._added(self._point(coefficients), rows).cost

    def adapt(self, matrices: Tensor, gradients: Tensor, cost: Tensor, coefficients: Tensor, rows: Tensor) -> None:
        """Adapt to the merit divided by 1 / n, which changes no step: with v = gradient of log sqrt(1 / n)."""
        added = self._added(self._point(coefficients), rows)
        slope = -self.equations.gradient(added) / added.cost[:, None]
        mixed = gradients[:, :, None] * slope[:, None]
        matrices += mixed + mixed.mT + cost[:, None, None] * slope[:, :, None] * slope[:, None]
        gradients += cost[:, None] * slope

    def _point(self, coefficients: Tensor) -> PatchPoint:
        places = self.equations.hole[:1].expand(len(coefficients))
        return self.equations.at(self.attended(self.equations.tokens(coefficients, places)))

    def _added(self, point: PatchPoint, rows: Tensor) -> PatchPoint:
        """Return the point with what tokens add to the known ones, so that its cost is n."""
        members = None if self.members is None else self.members[rows]
        return replace(
            point,
            outside_inputs=self.inputs.added(point.inputs, members),
            outside_activations=self.activations.added(point.activations, members),
        )
