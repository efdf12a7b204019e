"""Equations that single out each token from the gradients of the first MLP alone.

The weight gradients of an MLP are sums over tokens of (slope at the output) x (input)^T:

    G1 = sum_t f_t h_t^T  of fc1,     G2 = sum_t s_t a_t^T  of fc2,     h = norm2(u),  a = GELU(fc1 h),

so that each h_t lies in the row space of G1, and each a_t in that of G2, both of as many dimensions as there are
tokens. With fewer tokens than dimensions the first leaves a whitened token k, h = gain k + bias, a few unknowns y, and
the second is hundreds of equations in them. GELU does not commute with mixing: every true token is an isolated zero.

Each zero also states its own slopes, without the others. f_t = GELU'(fc1 h_t) * (W2^T s_t) for the weight W2 of fc2;
f_t lies in the column space of G1 and s_t in that of G2. These are as many linear equations as the MLP is wide, of
which one direction of s_t is the only solution. Its length makes G2 - s_t a_t^T lose a rank.
"""

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedmjp.attacks.first_block.block import FirstBlock, Linear, gelu, gelu_slope
from fedmjp.attacks.linear_systems import NEGLIGIBLE

ROUNDED = 1e-5  # of an activation's length: what float32 moves the loudest tokens by, which the spans do not tell


@dataclass(frozen=True)
class Span:
    """Row space of a gradient sum_t e_t a_t^T, and how far rounding has turned it.

    With noise of standard deviation s in every entry of the gradient, the singular direction of value S is
    turned towards every direction outside by s / S times a standard normal number. The remainder of a true a
    outside of the span then has, per outside direction, the variance sum_i (s / S_i)^2 (a . v_i)^2. The upload
    itself shows s: the part of the gradient that no sum over so many tokens can explain.
    """

    columns: Tensor  # (values, tokens), the v_i, orthonormal
    turned: Tensor  # (tokens,), s / S_i

    @staticmethod
    def of(gradient: Tensor, tokens: int) -> "Span":
        """Compute the span of a weight gradient.

        Args:
            gradient: (outputs, values).
            tokens: How many it is summed over, fewer than outputs and values.
        """
        _, singular, right = torch.linalg.svd(gradient, full_matrices=False)
        free = (gradient.shape[0] - tokens) * (gradient.shape[1] - tokens)
        noise = (singular[tokens:].square().sum() / max(free, 1)).sqrt()
        return Span(right[:tokens].T.contiguous(), noise / singular[:tokens])

    @property
    def outside(self) -> int:
        """Count the directions outside."""
        return self.columns.shape[0] - self.columns.shape[1]

    def remainder(self, rows: Tensor) -> Tensor:
        """Return the part of rows that lies outside.

        Args:
            rows: (rows, values).
        """
        return rows - (rows @ self.columns) @ self.columns.T

    def expected(self, rows: Tensor) -> Tensor:
        """Return (rows,) the squared length of the remainder that rounding alone gives true rows.

        Args:
            rows: (rows, values).
        """
        return self.outside * (rows @ self.columns * self.turned).square().sum(dim=1)


@dataclass(frozen=True)
class MlpPoint:
    """What the first MLP makes of some whitened tokens, and what of it lies outside of the upload's spans."""

    whitened: Tensor  # (rows, dim)
    inputs: Tensor  # (rows, dim), h
    before_gelu: Tensor  # (rows, hidden)
    activations: Tensor  # (rows, hidden), a
    outside_inputs: Tensor  # like the inputs
    outside_activations: Tensor  # like the activations

    @staticmethod
    def of(whitened: Tensor, block: FirstBlock, inputs: Span, activations: Span) -> "MlpPoint":
        """Evaluate the first MLP.

        Args:
            whitened: (rows, dim) tokens.
            block: With the MLP.
            inputs: Span of the MLP's inputs.
            activations: Span of its activations.
        """
        rows = whitened * block.norm2.gain + block.norm2.bias
        before_gelu = block.fc1(rows)
        activated = gelu(before_gelu)
        outside = inputs.remainder(rows), activations.remainder(activated)
        return MlpPoint(whitened, rows, before_gelu, activated, *outside)

    @property
    def remainders(self) -> Tensor:
        """Concatenate both remainders, (rows, dim + hidden): zero for true tokens."""
        return torch.cat([self.outside_inputs, self.outside_activations], dim=1)

    @property
    def cost(self) -> Tensor:
        """Sum the squares, (rows,)."""
        return self.outside_inputs.square().sum(1) + self.outside_activations.square().sum(1)


@dataclass(frozen=True)
class TokenEquations:
    """The equations for whitened tokens from one pair of gradients of the first MLP."""

    block: FirstBlock
    fc2: Linear
    first: Tensor  # (hidden, dim) G1
    second: Tensor  # (dim, hidden) G2
    count: int  # tokens that the gradients are sums over
    until: float = math.inf  # of time.thread_time(): searches that are at work then end where they are

    def time_is_up(self) -> bool:
        """Tell whether searches are to end. Only this thread's work counts, so other jobs change no result."""
        return time.thread_time() > self.until

    @cached_property
    def inputs(self) -> Span:
        """Return the span of the h_t."""
        return Span.of(self.first, self.count)

    @cached_property
    def activations(self) -> Span:
        """Return the span of the a_t."""
        return Span.of(self.second, self.count)

    @cached_property
    def basis(self) -> Tensor:
        """Return an orthonormal basis (unknowns, dim) of possible whitened tokens."""
        norm = self.block.norm2
        rows = torch.cat([self.inputs.columns.mT / norm.gain, (norm.bias / norm.gain)[None]])
        _, singular, right = torch.linalg.svd(rows - rows.mean(1, keepdim=True), full_matrices=False)
        allowed: Tensor = right[singular > NEGLIGIBLE * singular[0]]
        return allowed

    @cached_property
    def _gained(self) -> Tensor:
        """Return (dim, unknowns): h by the unknowns."""
        return (self.basis * self.block.norm2.gain).mT

    @cached_property
    def _expanded(self) -> Tensor:
        """Return (hidden, unknowns): fc1 h by the unknowns."""
        return self.block.fc1.weight @ self._gained

    @cached_property
    def _constant(self) -> Tensor:
        """Return (unknowns, unknowns): what the span of inputs, being linear, adds to every normal matrix."""
        inside = self.inputs.columns.mT @ self._gained
        return self._gained.mT @ self._gained - inside.mT @ inside

    @property
    def radius(self) -> float:
        """Return the length of a whitened token, but for the LayerNorm's epsilon."""
        return math.sqrt(self.basis.shape[1])

    def at(self, whitened: Tensor) -> MlpPoint:
        """Evaluate the equations.

        Args:
            whitened: (rows, dim) tokens.
        """
        return MlpPoint.of(whitened, self.block, self.inputs, self.activations)

    def normal(self, point: MlpPoint) -> tuple[Tensor, Tensor]:
        """Compute Gauss-Newton matrices (rows, unknowns, unknowns) and gradients (rows, unknowns).

        Gradients decide where a search ends, and are exact. Matrices decide only how fast it gets there, and are
        formed in float32, in half the time.
        """
        slopes = gelu_slope(point.before_gelu)
        jacobian = slopes[:, :, None].float() * self._expanded.float()
        inside = self.activations.columns.mT.float() @ jacobian
        gradient = (point.outside_activations * slopes) @ self._expanded + point.outside_inputs @ self._gained
        return (jacobian.mT @ jacobian - inside.mT @ inside).double() + self._constant, gradient

    def expected(self, point: MlpPoint, rounded: float = ROUNDED) -> Tensor:
        """Return (rows,) the cost that rounding leaves of true tokens.

        Args:
            point: The equations at some tokens.
            rounded: Share of an activation's length by which float32 moves it.
        """
        spans = self.inputs.expected(point.inputs) + self.activations.expected(point.activations)
        expected: Tensor = spans + (rounded * point.activations.norm(dim=1)).square()
        return expected

    def excess(self, point: MlpPoint) -> Tensor:
        """Return (rows,) the residual's length in units of what rounding leaves of a true token: about 1 for one."""
        excess: Tensor = (point.cost / self.expected(point)).sqrt()
        return excess

    def slopes(self, whitened: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the slopes s_t (rows, dim) and f_t (rows, hidden), each token by itself.

        Args:
            whitened: (rows, dim) true tokens.
        """
        point = self.at(whitened)
        columns_first = torch.linalg.svd(self.first, full_matrices=False)[0][:, : self.count]
        columns, singular, right = torch.linalg.svd(self.second, full_matrices=False)
        columns, singular, right = columns[:, : self.count], singular[: self.count], right[: self.count]
        bent = gelu_slope(point.before_gelu)
        possible = bent[:, :, None] * (self.fc2.weight.mT @ columns)
        inside = columns_first.mT @ possible
        direction = torch.linalg.eigh(possible.mT @ possible - inside.mT @ inside).eigenvectors[:, :, 0]
        length = 1 / ((point.activations @ right.mT / singular) * direction).sum(1, keepdim=True)
        at_outputs = length * direction @ columns.mT
        return at_outputs, bent * (at_outputs @ self.fc2.weight)

    def without(self, whitened: Tensor) -> "TokenEquations":
        """Return the equations of the remaining tokens, with these taken out of both sums.

        Args:
            whitened: (rows, dim) true tokens.
        """
        if not len(whitened):
            return self
        point, (at_outputs, at_inner) = self.at(whitened), self.slopes(whitened)
        first = self.first - at_inner.mT @ point.inputs
        second = self.second - at_outputs.mT @ point.activations
        return replace(self, first=first, second=second, count=self.count - len(whitened))
