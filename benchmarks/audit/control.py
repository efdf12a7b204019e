"""The control: the app's own network, the undefended gradient of one known picture. Attacks must succeed on it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.benchmarks.audit.evaluating import Private
from fedmjp.benchmarks.audit.network import Network
from fedmjp.errors import BadInputError
from fedmjp.facade import bundled_pictures
from fedmjp.models.probing import tensors_of
from fedmjp.threat import ThreatModel


@dataclass(frozen=True)
class Control:
    """An update of one picture that nobody needs to protect, and the picture."""

    update: Mapping[str, Tensor]
    threat: ThreatModel
    private: Private


def make_control(network: Network, *, side: int, channels: int, number: int = 0) -> Control:
    """Compute the gradient of a bundled picture; BadInputError if the network does not take it.

    Args:
        network: With the weights that the server sent.
        side: Pixels per side of the app's pictures.
        channels: One or three.
        number: Which of the bundled pictures, from 0; its label is the next number.
    """
    if side == 0:
        raise BadInputError("the app's network takes no pictures, and the control is of one")
    picture = bundled_pictures(number + 1, size=side)[number].image[None]
    if channels == 1:
        picture = picture.mean(dim=1, keepdim=True)
    view = network.seen
    entered = (picture - view.mean[:channels]) / view.std[:channels]
    parameters = {name: value for name, value in network.module.named_parameters() if value.is_floating_point()}
    for value in parameters.values():
        value.requires_grad_(True)
    try:
        logits = next(iter(tensors_of(network.module(entered))))
        labels = torch.tensor([min(number + 1, logits.shape[1] - 1)])
        loss = F.cross_entropy(logits, labels)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except Exception as error:  # noqa: BLE001 (somebody else's module)
        raise BadInputError(f"the app's network does not take a picture of {side} x {side}: {error}") from None
    update = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    return Control(update, ThreatModel(), Private((entered,), picture, labels))
