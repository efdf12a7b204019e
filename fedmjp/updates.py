"""The local computation: what a client computes from its pictures before anything leaves it.

Federated clients and direct mode both call ``gradient``; that they agree is tested.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch


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
    device = model.mean.device
    mask = batch.mask.to(device) if model.defended else None
    with torch.enable_grad():
        logits = model(batch.version(batch.gradient_of).to(device), mask)
        loss = F.cross_entropy(logits, batch.labels.to(device))
        names, parameters = zip(*model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
