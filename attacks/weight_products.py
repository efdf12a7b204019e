"""Inner products of layers' weight gradients, from what goes into a layer and the gradients at what comes out.

With A (rows, in) and B (rows, out) of a candidate, its weight gradient is B^T A.
"""

from typing import Any

import torch
from torch import Tensor


def weight_products(inputs: Tensor, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Compute <B^T A, target> and |B^T A|^2 per candidate, differentiable once in A and B.

    Where a weight gradient is larger than A and B multiplied by a row each, it is never formed.

    Args:
        inputs: A, (candidates, rows, in).
        outputs: B, (candidates, rows, out).
        target: (candidates, out, in).

    References:
        Goodfellow, "Efficient per-example gradient computations", 2015 (B^T A); Li et al., "Large Language Models Can
        Be Strong Differentially Private Learners", ICLR 2022 ("ghost clipping": the norm from products of rows).
    """
    rows, width, height = inputs.shape[1], inputs.shape[2], outputs.shape[2]
    function = _FromRows if rows * (width + height) < width * height else _Formed
    terms: tuple[Tensor, Tensor] = function.apply(inputs, outputs, target)
    return terms


def compare(gradient: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inner product of a gradient with its target and with itself, over the last axis.

    Args:
        gradient: (..., entries).
        target: Like it.
    """
    return torch.linalg.vecdot(gradient, target), torch.linalg.vecdot(gradient, gradient)


class _Formed(torch.autograd.Function):
    """The products by way of B^T A, without a graph over it.

    With c and d the derivatives of the loss by the two, and V = c target + 2 d B^T A, the derivatives by A and
    B are B V and A V^T.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        gradient = outputs.mT @ inputs
        ctx.save_for_backward(inputs, outputs, target, gradient)
        return compare(gradient.flatten(1), target.flatten(1))

    @staticmethod
    def backward(ctx: Any, *derivatives: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, outputs, target, gradient = ctx.saved_tensors
        by_product, by_square = (derivative[:, None, None] for derivative in derivatives)
        direction = (2 * by_square * gradient).addcmul_(by_product, target)
        return outputs @ direction, inputs @ direction.mT, None


class _FromRows(torch.autograd.Function):
    """The products as <B, A target^T> and <A A^T, B B^T>.

    With c and d the derivatives of the loss by the two, the derivatives by A and B are c B target + 2 d B B^T A and
    c A target^T + 2 d A A^T B.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        moved = inputs @ target.mT
        among_inputs, among_outputs = inputs @ inputs.mT, outputs @ outputs.mT
        ctx.save_for_backward(inputs, outputs, target, moved, among_inputs, among_outputs)
        product = torch.linalg.vecdot(outputs.flatten(1), moved.flatten(1))
        return product, torch.linalg.vecdot(among_inputs.flatten(1), among_outputs.flatten(1))

    @staticmethod
    def backward(ctx: Any, *derivatives: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, outputs, target, moved, among_inputs, among_outputs = ctx.saved_tensors
        by_product, by_square = (derivative[:, None, None] for derivative in derivatives)
        by_inputs = torch.baddbmm((2 * by_square * among_outputs) @ inputs, by_product * outputs, target)
        by_outputs = torch.baddbmm(by_product * moved, 2 * by_square * among_inputs, outputs)
        return by_inputs, by_outputs, None
