"""What clients reply: whether it can be nothing but weights, and its mean over clients."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Training moves weights by far less than their length in a round; a gradient is as far off as zero is.
FARTHEST = 0.5


def are_weights(reply: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    """Whether a reply is so near to the weights that were sent that it can be nothing but weights."""
    names = [name for name, tensor in reply.items() if tensor.is_floating_point()]
    if not names or any(name not in sent or reply[name].shape != sent[name].shape for name in names):
        return False
    length = math.fsum(float(sent[name].double().square().sum()) for name in names)
    moved = math.fsum(float((reply[name].double() - sent[name].double()).square().sum()) for name in names)
    return length > 0 and moved <= FARTHEST**2 * length


def mean_of(updates: Sequence[Mapping[str, Tensor]], examples: Sequence[float] = ()) -> dict[str, Tensor]:
    """The mean over clients, in their order, by their numbers of pictures where these differ; counts are rounded."""
    if len(updates) == 1:
        return dict(updates[0])
    return {name: _mean(torch.stack([update[name] for update in updates]), examples) for name in updates[0]}


def _mean(stacked: Tensor, examples: Sequence[float]) -> Tensor:
    if stacked.is_floating_point() and len(set(examples)) <= 1:
        return stacked.mean(dim=0)
    weights = torch.tensor(examples or [1.0] * len(stacked), dtype=torch.float64, device=stacked.device)
    mean: Tensor = torch.tensordot(weights / weights.sum(), stacked.double(), dims=1)
    return (mean if stacked.is_floating_point() else mean.round()).to(stacked.dtype)
