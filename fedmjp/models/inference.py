"""A model as it is evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedmjp.arithmetic import computing

UNDECIDED = -1  # no class


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Set a model to float32 without dropout and gradients; restore the mode of every module afterwards.

    Args:
        model: Any.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with computing("float32", next(model.parameters()).device), torch.inference_mode():
            yield
    finally:
        for module, training in modes:
            module.training = training


def predictions(logits: Tensor) -> Tensor:
    """Choose the class of each picture; ``UNDECIDED`` where a logit is not finite.

    ``argmax`` alone would take the first NaN for the greatest value, which may be the right class.

    Args:
        logits: (batch, classes).

    Returns:
        (batch,) int64.
    """
    decided = logits.isfinite().all(dim=1)
    return torch.where(decided, logits.argmax(dim=1), UNDECIDED)
