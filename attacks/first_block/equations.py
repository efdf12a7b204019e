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
    turned towards every direction outside by s / S times a standard normal number. What is then left of a
    true a outside of the span has, per outside direction, the variance sum_i (s / S_i)^2 (a . v_i)^2. It is
    the upload itself that tells s: what no sum over so many tokens can explain.
    """

    columns: Tensor  # (values, tokens), the v_i, orthonormal
    turned: Tensor  # (tokens,), s / S_i

    @staticmethod
    def of(gradient: Tensor, tokens: int) -> "Span":
        """From a gradient (outputs, values) summed over tokens, fewer than outputs and values."""
        _, singular, right = torch.linalg.svd(gradient, full_matrices=False)
        free = (gradient.shape[0] - tokens) * (gradient.shape[1] - tokens)
        noise = (singular[tokens:].square().sum() / max(free, 1)).sqrt()
        return Span(right[:tokens].T.contiguous(), noise / singular[:tokens])

    @property
    def outside(self) -> int:
        """Directions outside."""
        return self.columns.shape[0] - self.columns.shape[1]

    def remainder(self, rows: Tensor) -> Tensor:
        """What of rows (rows, values) lies outside."""
        return rows - (rows @ self.columns) @ self.columns.T

    def expected(self, rows: Tensor) -> Tensor:
        """(rows,) squared length of the remainder that rounding alone makes of true rows."""
        return self.outside * (rows @ self.columns * self.turned).square().sum(dim=1)


@dataclass(frozen=True)
class MlpPoint:
    """The equations at some whitened tokens."""

    inputs: Tensor
    before_gelu: Tensor
    activations: Tensor
    outside_inputs: Tensor
    outside_activations: Tensor

    @property
    def cost(self) -> Tensor:
        """(rows,) sum of squares."""
        return self.outside_inputs.square().sum(1) + self.outside_activations.square().sum(1)


@dataclass(frozen=True)
class TokenEquations:
    """Of one pair of gradients."""

    block: FirstBlock
    fc2: Linear
    first: Tensor  # (hidden, dim) G1
    second: Tensor  # (dim, hidden) G2
    count: int  # tokens that the gradients are sums over
    until: float = math.inf  # of time.thread_time(): searches that are at work then end where they are

    def time_is_up(self) -> bool:
        """Whether searches are to end. This thread's work counts: another job on the machine changes no result."""
        return time.thread_time() > self.until

    @cached_property
    def inputs(self) -> Span:
        """Of the h_t."""
        return Span.of(self.first, self.count)

    @cached_property
    def activations(self) -> Span:
        """Of the a_t."""
        return Span.of(self.second, self.count)

    @cached_property
    def basis(self) -> Tensor:
        """(unknowns, dim), orthonormal: what whitened tokens are made of."""
        norm = self.block.norm2
        rows = torch.cat([self.inputs.columns.mT / norm.gain, (norm.bias / norm.gain)[None]])
        _, singular, right = torch.linalg.svd(rows - rows.mean(1, keepdim=True), full_matrices=False)
        allowed: Tensor = right[singular > NEGLIGIBLE * singular[0]]
        return allowed

    @cached_property
    def _gained(self) -> Tensor:
        """(dim, unknowns): h by the unknowns."""
        return (self.basis * self.block.norm2.gain).mT

    @cached_property
    def _expanded(self) -> Tensor:
        """(hidden, unknowns): fc1 h by the unknowns."""
        return self.block.fc1.weight @ self._gained

    @cached_property
    def _still(self) -> Tensor:
        """(unknowns, unknowns): what the span of inputs, which is linear, adds to every normal matrix."""
        inside = self.inputs.columns.mT @ self._gained
        return self._gained.mT @ self._gained - inside.mT @ inside

    @property
    def radius(self) -> float:
        """Length of a whitened token, but for the LayerNorm's epsilon."""
        return math.sqrt(self.basis.shape[1])

    def at(self, whitened: Tensor) -> MlpPoint:
        """The equations at whitened tokens (rows, dim)."""
        inputs = whitened * self.block.norm2.gain + self.block.norm2.bias
        before = self.block.fc1(inputs)
        after = gelu(before)
        return MlpPoint(inputs, before, after, self.inputs.remainder(inputs), self.activations.remainder(after))

    def normal(self, point: MlpPoint) -> tuple[Tensor, Tensor]:
        """Gauss-Newton matrices (rows, unknowns, unknowns) and gradients (rows, unknowns).

        Gradients decide where a search ends, and are exact. Matrices decide how fast it gets there, and are formed in
        float32, in half the time.
        """
        slopes = gelu_slope(point.before_gelu)
        jacobian = slopes[:, :, None].float() * self._expanded.float()
        inside = self.activations.columns.mT.float() @ jacobian
        gradient = (point.outside_activations * slopes) @ self._expanded + point.outside_inputs @ self._gained
        return (jacobian.mT @ jacobian - inside.mT @ inside).double() + self._still, gradient

    def excess(self, point: MlpPoint) -> Tensor:
        """(rows,) length of what is left over that which rounding leaves of a true token: about 1 for one."""
        rounded = (ROUNDED * point.activations.norm(dim=1)).square()
        expected = self.inputs.expected(point.inputs) + self.activations.expected(point.activations) + rounded
        excess: Tensor = (point.cost / expected).sqrt()
        return excess

    def slopes(self, whitened: Tensor) -> tuple[Tensor, Tensor]:
        """s_t (rows, dim) and f_t (rows, hidden) of true tokens, each by itself."""
        point = self.at(whitened)
        columns_first = torch.linalg.svd(self.first, full_matrices=False)[0][:, : self.count]
        left, singular, right = torch.linalg.svd(self.second, full_matrices=False)
        left, singular, right = left[:, : self.count], singular[: self.count], right[: self.count]
        bent = gelu_slope(point.before_gelu)
        possible = bent[:, :, None] * (self.fc2.weight.mT @ left)
        inside = columns_first.mT @ possible
        direction = torch.linalg.eigh(possible.mT @ possible - inside.mT @ inside).eigenvectors[:, :, 0]
        length = 1 / ((point.activations @ right.mT / singular) * direction).sum(1, keepdim=True)
        at_outputs = length * direction @ left.mT
        return at_outputs, bent * (at_outputs @ self.fc2.weight)

    def without(self, whitened: Tensor) -> "TokenEquations":
        """The equations of the tokens that are left when these are taken out of both sums."""
        if not len(whitened):
            return self
        point, (at_outputs, at_inner) = self.at(whitened), self.slopes(whitened)
        first = self.first - at_inner.mT @ point.inputs
        second = self.second - at_outputs.mT @ point.activations
        return replace(self, first=first, second=second, count=self.count - len(whitened))
