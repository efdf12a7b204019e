"""Which part of an app's network the server sent, and whether an answer is the change of its weights."""

import math
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor, nn

# An answer is a change of the weights from this cosine on; noise lengthens it, and rounding, but nothing else does.
ALONG, LONGER = 0.3, 1.2
WEIGHTS = 0.5  # relative distance from what was sent up to which an answer is weights
ALIKE = 0.99  # cosine with the last gradient from which on an answer is a multiple of it


def change_sent(module: nn.Module, message: Message, reply: Message) -> int | None:
    """Tell whether an answer is the change of the weights: 1, or -1 if its sign is the opposite.

    What is shorter than the change, or noisy, is still one; a gradient has another length or direction. 0 if it is
    neither that nor a multiple of the last gradient; None if nobody can tell.

    Args:
        module: After training.
        message: That the client got.
        reply: Its answer.
    """
    if reply.has_error():
        return None
    state = {name: value.cpu() for name, value in module.state_dict().items() if value.is_floating_point()}
    parameters = dict(module.named_parameters())
    sent, answered = (_named(content, state, parameters) for content in (message.content, reply.content))
    names = [name for name in answered if name in sent]
    if not names:
        return None
    arrays, start, trained = (
        torch.cat([values[name].double().flatten() for name in names]) for values in (answered, sent, state)
    )
    if float((arrays - start).norm()) <= WEIGHTS * float(start.norm()):
        return None
    gradients = [parameters[name].grad if name in parameters else None for name in names]
    change = trained - start
    length = float(arrays.norm() * change.norm())
    cosine = float(arrays @ change) / length if length else 0.0
    is_change = abs(cosine) >= ALONG and float(arrays.norm()) <= LONGER * float(change.norm()) / abs(cosine)
    is_gradient = None
    if all(gradient is not None for gradient in gradients):
        gradient = torch.cat([value.detach().cpu().double().flatten() for value in gradients if value is not None])
        is_gradient = bool(arrays @ gradient >= ALIKE * arrays.norm() * gradient.norm())
        if is_change and (arrays - gradient).norm() < (arrays - math.copysign(1, cosine) * change).norm():
            return None
    if is_change:
        return 1 if cosine > 0 else -1
    return 0 if is_gradient is False else None


def _named(content: Any, state: dict[str, Tensor], parameters: dict[str, Any]) -> dict[str, Tensor]:
    """Name floating-point arrays as a network does: by name, else in the order of its state or of its parameters."""
    arrays = {name: array.numpy() for record in content.array_records.values() for name, array in record.items()}
    floating = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items() if array.dtype.kind == "f"}
    shapes = [tuple(value.shape) for value in floating.values()]
    for names in (list(floating), list(state), list(parameters)):
        if all(name in state for name in names) and shapes == [tuple(state[name].shape) for name in names]:
            return dict(zip(names, floating.values(), strict=True))
    return {}


def count_values(module: nn.Module) -> int:
    """Count a network's parameters, one number each.

    Args:
        module: The network.
    """
    return sum(parameter.numel() for parameter in module.parameters())


def matching_part(module: nn.Module, message: Message) -> nn.Module:
    """Find the outermost part whose state is what the server sent, by shapes in order; else the module itself.

    A part that is most of the module but not all, as a body without its head, is sent of a network and none itself.

    Args:
        module: That the client trains.
        message: That the client got.
    """
    sent = [list(array.shape) for record in message.content.array_records.values() for array in record.values()]
    for part in module.modules():
        if [list(value.shape) for value in part.state_dict().values()] == sent:
            return module if count_values(module) / 2 < count_values(part) < count_values(module) else part
    return module
