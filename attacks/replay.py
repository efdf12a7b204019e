"""A loss and its slope, for a search that evaluates them again and again."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

LossOf = Callable[[Tensor], Tensor]  # candidates to (candidates,), each its own
Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]
WARM_UPS = 2  # libraries set themselves up in the first


def slopes_of(loss: LossOf, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of candidates, and the slope of each by its candidate.

    Args:
        loss: Of candidates, each its own.
        images: Candidates.
    """
    leaf = images.detach().requires_grad_()
    with torch.enable_grad():
        values = loss(leaf)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slopes


def replayed(loss: LossOf, like: Tensor) -> Slopes:
    """Return ``slopes_of`` for candidates of the shape and device of ``like``.

    On CUDA it is recorded once, as a graph, which is launched as a whole: to launch its thousands of kernels one by one
    takes longer than they run. Results hold until the next call there.

    Args:
        loss: Of candidates; it must not read values off the device.
        like: Candidates.
    """
    if like.device.type != "cuda":
        return partial(slopes_of, loss)
    inputs, aside = like.clone(), torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            slopes_of(loss, inputs)
    torch.cuda.current_stream(like.device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = slopes_of(loss, inputs)

    def again(images: Tensor) -> tuple[Tensor, Tensor]:
        inputs.copy_(images)
        graph.replay()
        return outputs

    return again
