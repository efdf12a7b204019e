"""The local computation: what a client computes from its pictures before anything leaves it.

Federated clients and direct mode both call ``local_update`` and ``leaving``; that they agree is tested.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedmjp.config import FederationConfig, UpdateKind
from fedmjp.degradation import degrade
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.seeds import torch_generator


class LocalTraining(Protocol):
    """The recipe of the local computation, as ``FederationConfig`` and ``ThreatModel`` state it."""

    @property
    def update(self) -> UpdateKind:
        """FedSGD gradient or FedAvg weight delta."""

    @property
    def local_steps(self) -> int:
        """SGD steps behind a delta."""

    @property
    def local_learning_rate(self) -> float:
        """Of these steps."""


def local_update(model: VitClassifier, batch: PrivateBatch, recipe: LocalTraining) -> dict[str, Tensor]:
    """What the client uploads: ``gradient`` or ``delta``, as the recipe asks."""
    if recipe.update == "gradient":
        return gradient(model, batch)
    return delta(model, batch, steps=recipe.local_steps, learning_rate=recipe.local_learning_rate)


def leaving(
    update: Mapping[str, Tensor], batch: PrivateBatch, config: FederationConfig, number: int
) -> dict[str, Tensor]:
    """An update as it leaves the client: degraded as the configuration asks.

    Args:
        update: Of the batch, or some tensors of it.
        batch: Its noise depends on the pictures' names.
        config: Of the run.
        number: How many uploads of the batch, in this version, were made before it: their noise is another.
    """
    return degrade(update, config, generator=torch_generator(config.seed, "degradation", *batch.pictures, number))


def gradient(model: VitClassifier, batch: PrivateBatch) -> dict[str, Tensor]:
    """FedSGD: the gradient of the mean cross-entropy over the batch.

    The pictures are those that ``batch.gradient_of`` names. A defended model also gets the mask,
    so that masked patches use the unknown embedding; on clean pictures this is "mask without
    shuffle". An undefended model sees the pictures only.

    Args:
        model: The model with the weights that the server sent. It is not changed.
        batch: The client's pictures.

    Returns:
        Parameter name to gradient, float32, on the model's device.
    """
    return _gradient_at(model, dict(model.named_parameters()), batch)


def delta(model: VitClassifier, batch: PrivateBatch, *, steps: int, learning_rate: float) -> dict[str, Tensor]:
    """FedAvg: the change of the weights after some steps of plain SGD on the batch.

    Every step sees the whole batch with the same mask. The steps are taken in the weights'
    precision, so a small learning rate loses digits of the gradient to rounding, as it does on a
    real client.

    Args:
        model: The model with the weights that the server sent. It is not changed.
        batch: The client's pictures.
        steps: Number of steps.
        learning_rate: Of each step.

    Returns:
        Parameter name to weight after minus weight before, float32, on the model's device.

    References:
        McMahan et al., "Communication-efficient learning of deep networks", AISTATS 2017, FedAvg.
    """
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = before
    for _ in range(steps):
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        gradients = _gradient_at(model, leaves, batch)
        weights = {name: weight - learning_rate * gradients[name] for name, weight in weights.items()}
    return {name: weight - before[name] for name, weight in weights.items()}


def _gradient_at(model: VitClassifier, weights: dict[str, Tensor], batch: PrivateBatch) -> dict[str, Tensor]:
    device = model.mean.device
    mask = batch.mask.to(device) if model.defended else None
    images = batch.version(batch.gradient_of).to(device)
    with torch.enable_grad():
        loss = F.cross_entropy(functional_call(model, weights, (images, mask)), batch.labels.to(device))
        # A localisation regressor has no part in it.
        found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        return dict(zip(weights, found, strict=True))
