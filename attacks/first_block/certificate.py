"""Whether tokens are right: passed through the network, they must give the gradients that were uploaded."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

EMBEDDINGS = (names.PATCH_WEIGHT, names.PATCH_BIAS, names.POSITION_EMBEDDING, names.CLASS_TOKEN)
CERTAIN = 1e-4  # relative distance of every gradient behind the tokens that certifies them


def body_tensors(model: VitClassifier) -> list[str]:
    """List the names of all parameters behind the tokens."""
    return [name for name, _ in model.named_parameters() if name not in EMBEDDINGS]


@dataclass(frozen=True)
class NetworkPass:
    """What the network makes of tokens."""

    slopes: Tensor  # (tokens, dim), the loss's gradient at each
    residual: float  # largest relative distance of a gradient behind the tokens from the uploaded one

    @property
    def certifies(self) -> bool:
        """Tell whether these are the tokens behind the upload, as a set."""
        return self.residual <= CERTAIN


def pass_tokens(
    model: VitClassifier, gradients: Mapping[str, Tensor], tokens: Tensor, label: int, smoothing: float
) -> NetworkPass:
    """Pass tokens through the network in float64 and back, and compare the gradients with the uploaded ones.

    Args:
        model: With the weights of the upload; not changed.
        gradients: The uploaded ones, of ``body_tensors``.
        tokens: (1 + patches, dim), the class token first.
        label: Of the picture.
        smoothing: Label smoothing of the clients' loss.
    """
    network = copy.deepcopy(model).double().requires_grad_(requires_grad=True)
    backbone, leaf = network.backbone, tokens.detach().clone().requires_grad_()
    compared = body_tensors(model)
    with torch.enable_grad():
        logits = backbone.forward_head(backbone.norm(backbone.blocks(leaf[None])))
        target = torch.tensor([label], device=tokens.device)
        loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
        slopes, *computed = torch.autograd.grad(loss, [leaf, *(network.get_parameter(name) for name in compared)])
    distances = [
        float((tensor - gradients[name]).norm() / gradients[name].norm().clamp(min=torch.finfo(tensor.dtype).tiny))
        for name, tensor in zip(compared, computed, strict=True)
    ]
    return NetworkPass(slopes, max(distances))
