"""Descent of many candidates at once, each for itself, until a budget is used up."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Found:
    """What a search ends with.

    Attributes:
        images: Like the start, the iterate of each candidate with the lowest loss.
        losses: (candidates,) those losses; infinite for a candidate that diverged.
        iterations: Evaluations of the loss per candidate.
    """

    images: Tensor
    losses: Tensor
    iterations: int


def search(
    start: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    iterations: int,
    seconds: float | None = None,
    step_size: float,
    on_step: Callable[[int, Tensor], None],
) -> Found:
    """Minimise by Adam on the sign of the gradient, within the box [0, 1].

    The step size falls to zero along half a cosine over the budget. The start is the first iterate, so
    the result is never worse than it. A candidate with a loss or gradient that is not finite has diverged
    and is out.

    Args:
        start: (candidates, batch, 3, size, size) in [0, 1].
        loss: Candidates to (candidates,); each loss depends on its own candidate only.
        iterations: When to stop: after so many, or so many ``seconds`` where that comes first; one is always made.
        seconds: None for any.
        step_size: First step, in units of the pixels' range.
        on_step: Called after every iteration with their number and the lowest losses so far.

    References:
        Geiping et al., "Inverting Gradients", NeurIPS 2020 (signed gradients, Adam, box); there
        the step size falls in three jumps.
    """
    images = start.clone()
    optimiser = torch.optim.Adam([images], lr=step_size)
    best, lowest = images.clone(), torch.full((len(images),), math.inf, device=images.device)
    alive = torch.ones_like(lowest, dtype=torch.bool)
    started, done = time.monotonic(), 0
    while True:
        values, slopes = _evaluate(images, loss)
        finite = torch.isfinite(values) & torch.isfinite(slopes.flatten(1)).all(dim=1)
        alive &= finite
        better = alive & (values < lowest)
        lowest = torch.where(better, values, lowest)
        best[better] = images[better]
        done += 1
        on_step(done, lowest)
        used = done / iterations
        if seconds is not None:
            used = max(used, (time.monotonic() - started) / seconds) if seconds > 0 else 1
        if used >= 1 or not bool(alive.any()):
            break
        optimiser.param_groups[0]["lr"] = step_size * (1 + math.cos(math.pi * used)) / 2
        images.grad = torch.where(finite.view(-1, *[1] * (slopes.ndim - 1)), slopes, 0).sign()
        optimiser.step()
        images.clamp_(0, 1)
    return Found(best, lowest, done)  # infinite only where no finite loss ever came


def _evaluate(images: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    leaf = images.detach().requires_grad_()
    with torch.enable_grad():
        values = loss(leaf)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slopes
