"""All patches at once: Gauss-Newton on what the first block's spans say of tokens, and on the prior.

Token by token the equations lose what the loudest tokens' rounding drowns. Together they keep it, because attention
carries every patch into every token: u = z + o(z) for z = E x + b + e, with the exact derivative of o. Residuals are
divided by the noise that the spans themselves show, patches have their prior, and so the least cost is the most likely
picture.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import jvp, vmap

from fedmjp.attacks.first_block.block import Norm, gelu_slope
from fedmjp.attacks.first_block.equations import ROUNDED, Span, TokenEquations
from fedmjp.attacks.linear_systems import GaussianPrior

CHUNK = 128  # directions that are differentiated at a time
ROWS = 8  # tokens whose MLP is differentiated at a time
FIRST_DAMPING, LEAST_DAMPING, FACTOR, TRIES = 1e-3, 1e-12, 10.0, 6
GAIN = 2e-3  # of the cost: a step that gains less is the last


@dataclass(frozen=True)
class JointCost:
    """The cost of a picture."""

    equations: TokenEquations
    queries: Span  # of norm1 of the tokens, from the gradient of the first attention's weight
    weight: Tensor  # (dim, values) of the patch embedding
    fixed: Tensor  # (1 + patches, dim): the class token, and what a patch of zeros is in each place
    prior: GaussianPrior

    @cached_property
    def precision(self) -> Tensor:
        """Return the prior's precision (values, values) of a patch."""
        precision: Tensor = torch.linalg.inv(self.prior.covariance)
        return precision

    def tokens(self, patches: Tensor) -> Tensor:
        """Embed patches: (1 + patches, dim) tokens that enter the block.

        Args:
            patches: (patches, values) in the network's input space.
        """
        return self.fixed + torch.cat([self.fixed.new_zeros(1, len(self.weight)), patches @ self.weight.mT])

    def attended(self, patches: Tensor) -> Tensor:
        """Return (1 + patches, dim) tokens behind the attention.

        Args:
            patches: (patches, values) in the network's input space.
        """
        tokens = self.tokens(patches)
        attention: Tensor = self.equations.block.attention(tokens, self.equations.block.keys_values(tokens))
        return tokens + attention

    def variances(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Return (1 + patches,) variances of an equation of the MLP and of the attention's weight, from rounding.

        Args:
            patches: (patches, values) near the true ones.
        """
        equations = self.equations
        point = equations.at(equations.block.norm2.whiten(self.attended(patches))[0])
        mlp = equations.expected(point, ROUNDED / 10)
        normed = equations.block.norm1(self.tokens(patches))
        queries = self.queries.expected(normed) + (ROUNDED / 10 * normed.norm(dim=1)).square()
        return mlp / (equations.inputs.outside + equations.activations.outside), queries / self.queries.outside

    def cost(self, patches: Tensor, mlp: Tensor, queries: Tensor) -> float:
        """Sum the squared residuals over their variances, and the prior.

        Args:
            patches: (patches, values).
            mlp: (1 + patches,) variances of the MLP's equations.
            queries: (1 + patches,) variances of the attention's.
        """
        block = self.equations.block
        point = self.equations.at(block.norm2.whiten(self.attended(patches))[0])
        normed = self.queries.remainder(block.norm1(self.tokens(patches)))
        moved = patches - self.prior.mean
        prior = (moved @ self.precision * moved).sum()
        return float((point.cost / mlp).sum() + (normed.square().sum(1) / queries).sum() + prior)

    def normal(self, patches: Tensor, mlp: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Gauss-Newton matrix (unknowns, unknowns) and gradient (unknowns,) over all values of all patches.

        Args:
            patches: (patches, values).
            mlp: (1 + patches,) variances of the MLP's equations.
            queries: (1 + patches,) variances of the attention's.
        """
        roots, gradients = self._by_attended(patches, mlp)
        moves = _derivative(self.attended, patches)
        rows = (roots @ moves).flatten(0, 1)
        matrix, gradient = rows.mT @ rows, torch.einsum("td,tdx->x", gradients, moves)
        whitened, deviation = self.equations.block.norm1.whiten(self.tokens(patches)[1:])
        slopes = _norm_slopes(self.equations.block.norm1, whitened, deviation) @ self.weight
        outside = slopes - self.queries.columns @ (self.queries.columns.mT @ slopes)
        remainder = self.queries.remainder(self.equations.block.norm1(self.tokens(patches)[1:]))
        values = patches.shape[1]
        for place in range(len(patches)):
            own_values = slice(place * values, (place + 1) * values)
            matrix[own_values, own_values] += outside[place].mT @ outside[place] / queries[place + 1] + self.precision
            gradient[own_values] += outside[place].mT @ remainder[place] / queries[place + 1]
            gradient[own_values] += self.precision @ (patches[place] - self.prior.mean)
        return matrix, gradient

    def _by_attended(self, patches: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
        """Compute roots (tokens, dim, dim) of Gauss-Newton matrices by tokens behind the attention, and gradients."""
        equations, block = self.equations, self.equations.block
        whitened, deviation = block.norm2.whiten(self.attended(patches))
        point, slopes = equations.at(whitened), _norm_slopes(block.norm2, whitened, deviation)
        roots, gradients = [], []
        for some in torch.split(torch.arange(len(whitened)), ROWS):
            inner = slopes[some]
            outer = gelu_slope(point.before_gelu[some])[:, :, None] * (block.fc1.weight @ inner)
            of_inputs, of_outputs = equations.inputs.columns.mT @ inner, equations.activations.columns.mT @ outer
            gram = inner.mT @ inner - of_inputs.mT @ of_inputs + outer.mT @ outer - of_outputs.mT @ of_outputs
            strengths, directions = torch.linalg.eigh(gram / variances[some, None, None])
            roots.append(strengths.clamp(min=0).sqrt()[:, :, None] * directions.mT)
            back = inner.mT @ point.outside_inputs[some, :, None] + outer.mT @ point.outside_activations[some, :, None]
            gradients.append(back[:, :, 0] / variances[some, None])
        return torch.cat(roots), torch.cat(gradients)


def refine(joint: JointCost, patches: Tensor, steps: int, on_step: Callable[[int, float], None]) -> tuple[Tensor, int]:
    """Find the most likely picture near a start, by Levenberg-Marquardt; return it and the number of steps.

    Args:
        joint: The cost.
        patches: (patches, values) where the search starts.
        steps: At most.
        on_step: Called with the number of steps and the cost.
    """
    damping, step_count = FIRST_DAMPING, 0
    for step_count in range(1, steps + 1):
        variances = joint.variances(patches)
        matrix, gradient = joint.normal(patches, *variances)
        cost = new_cost = joint.cost(patches, *variances)
        diagonal = torch.diag(matrix.diagonal())
        for _ in range(TRIES):
            factor, failed = torch.linalg.cholesky_ex(matrix + damping * diagonal)
            step = torch.cholesky_solve(gradient[:, None], factor).view_as(patches)
            new_cost = math.inf if failed else joint.cost(patches - step, *variances)
            if new_cost < cost:
                patches, damping = patches - step, max(damping / FACTOR, LEAST_DAMPING)
                break
            damping *= FACTOR
        on_step(step_count, min(cost, new_cost))
        if not new_cost < (1 - GAIN) * cost:
            break
    return patches, step_count


def _derivative(function: Callable[[Tensor], Tensor], patches: Tensor) -> Tensor:
    """Differentiate a function of patches: (rows, dim, unknowns)."""

    def along(direction: Tensor) -> Tensor:
        slope: Tensor = jvp(function, (patches,), (direction.view_as(patches),))[1]
        return slope

    directions = torch.eye(patches.numel(), dtype=patches.dtype, device=patches.device)
    return torch.cat([vmap(along)(some) for some in torch.split(directions, CHUNK)]).permute(1, 2, 0)


def _norm_slopes(norm: Norm, whitened: Tensor, deviation: Tensor) -> Tensor:
    """Differentiate a LayerNorm by its inputs: (rows, dim, dim)."""
    dim = whitened.shape[1]
    whole = torch.eye(dim, dtype=whitened.dtype, device=whitened.device) - 1 / dim
    outer = whitened[:, :, None] * whitened[:, None] / dim
    return norm.gain[:, None] * (whole - outer) / deviation[:, :, None]
