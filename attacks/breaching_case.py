"""An upload in the terms in which breaching's user and server would have handed it over."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attacks.breaching_watch import CurrentLabels
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

PREFIX = "backbone."


@dataclass(frozen=True)
class Metadata:
    """Facts about the data that breaching reads as attributes and as items."""

    shape: tuple[int, int, int]
    mean: list[float]
    std: list[float]
    classes: int
    modality: str = "vision"
    task: str = "classification"

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


@dataclass(frozen=True)
class Case:
    """An upload and the model that it was computed with, in breaching's terms.

    Attributes:
        network: Takes normalised pictures; a copy.
        payload: What breaching's server sends.
        shared: What breaching's user sends.
        setup: Device and precision.
    """

    network: nn.Module
    payload: dict[str, Any]
    shared: dict[str, Any]
    setup: dict[str, Any]


def case_of(
    upload: Upload,
    model: VitClassifier,
    threat: ThreatModel,
    *,
    labels: Sequence[int] | None,
    container: Callable[[nn.Module], nn.Module],
) -> Case:
    """Put an upload into breaching's terms.

    A delta keeps its sign: breaching's user, too, sends weights after minus weights before.

    Args:
        upload: Of gradients or of weight changes.
        model: The model that the server had sent; it is copied.
        threat: Learning rate and steps behind a weight change.
        labels: None where breaching finds them itself.
        container: breaching's own for a network.
    """
    device = model.mean.device
    backbone = twice_differentiable(model)
    network = container(backbone).eval()
    given = None if labels is None else torch.tensor(labels, device=device)
    gradients = [
        upload.tensors[name].to(device, copy=True)
        for name in (PREFIX + name for name, _ in backbone.named_parameters())
    ]
    metadata = Metadata(
        shape=(3, model.image_size, model.image_size),
        mean=model.mean.flatten().tolist(),
        std=model.std.flatten().tolist(),
        classes=int(model.backbone.num_classes),
    )
    parameters = [parameter.detach() for parameter in network.parameters()]
    payload = {"parameters": parameters, "buffers": list(network.buffers()), "metadata": metadata}
    about = {
        "num_data_points": upload.num_examples,
        "labels": given,
        "local_hyperparams": _local_steps(upload, threat, given),
        "data_key": "inputs",
    }
    shared = {"gradients": gradients, "buffers": None, "metadata": about}
    return Case(network, payload, shared, {"device": device, "dtype": torch.float32})


def twice_differentiable(model: VitClassifier) -> nn.Module:
    """A copy of the backbone, which takes normalised pictures, without timm's fused attention."""
    backbone: nn.Module = copy.deepcopy(model.backbone).eval().requires_grad_()
    for module in backbone.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010
    return backbone


def _local_steps(upload: Upload, threat: ThreatModel, labels: Tensor | None) -> dict[str, Any] | None:
    if upload.kind == "gradient":
        return None
    return {
        "lr": threat.local_learning_rate,
        "steps": threat.local_steps,
        "data_per_step": upload.num_examples,
        "labels": CurrentLabels() if labels is None else [labels] * threat.local_steps,
    }
