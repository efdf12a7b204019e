"""An upload in the terms in which breaching's user and server would have handed it over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from fedmjp.attacks.matching_gradients import twice_differentiable
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

PREFIX = "backbone."


@dataclass(frozen=True)
class Case:
    """An upload and the model that it was computed with, in breaching's terms.

    Attributes:
        network: A copy that takes normalised pictures.
        payload: The message of breaching's server.
        shared: The message of its user.
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
        upload: With all tensors of the network.
        model: With the weights that the server had sent.
        threat: States the recipe of local steps.
        labels: The pictures' labels; None where breaching finds them itself.
        container: breaching's own wrapper of a network.
    """
    device = model.mean.device
    backbone = twice_differentiable(model.backbone).eval().requires_grad_()
    network = container(backbone).eval()
    known_labels = None if labels is None else torch.tensor(labels, device=device)
    facts = {
        "shape": [3, model.image_size, model.image_size],
        "mean": model.mean.flatten().tolist(),
        "std": model.std.flatten().tolist(),
        "classes": int(model.backbone.num_classes),
        "modality": "vision",
        "task": "classification",
    }
    steps = {
        "lr": threat.local_learning_rate,
        "steps": threat.local_steps,
        "data_per_step": upload.num_examples,
        "labels": [known_labels] * threat.local_steps,
    }
    payload = {
        "parameters": [parameter.detach() for parameter in network.parameters()],
        "buffers": list(network.buffers()),
        "metadata": OmegaConf.create(facts),
    }
    shared = {
        "gradients": [upload.tensors[PREFIX + name].to(device, copy=True) for name, _ in backbone.named_parameters()],
        "buffers": None,
        "metadata": {
            "num_data_points": upload.num_examples,
            "labels": known_labels,
            "local_hyperparams": None if upload.kind == "gradient" else steps,
            "data_key": "inputs",
        },
    }
    return Case(network, payload, shared, {"device": device, "dtype": torch.float32})
