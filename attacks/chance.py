"""The floor of attacks that tell labels and features: what anybody can say without an upload."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from fedmjp.attacks.base import Attack
from fedmjp.attacks.grey import LEVEL
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.inference import evaluated
from fedmjp.records import Features, Upload
from fedmjp.threat import ThreatModel


class Chance(Attack[VitClassifier, Features]):
    """A guess: labels drawn from all classes alike, and for every picture the features of a grey one.

    Who looks a picture up by features that are the same for all of a batch finds the nearest of N pictures, the right
    one for 1 of N: the chance level of rank 1. A label is right for 1 of the classes, and for about B of them where
    an upload is of B pictures.
    """

    name = "chance"
    paper = "floor, no attack"
    summary = "labels drawn alike from all classes, features of a grey picture: the floor of features and labels"
    requires = "nothing"
    exploits = "nothing"
    role = "floor"
    reveals = "features"
    takes_sums = True

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name no tensor."""
        del model
        return []

    @override
    def reconstruct_stack(
        self,
        uploads: Sequence[Upload],
        model: VitClassifier,
        threat: ThreatModel,
        *,
        generators: Sequence[torch.Generator],
    ) -> list[Features]:
        del threat
        picture = torch.full((1, 3, model.image_size, model.image_size), LEVEL, device=model.mean.device)
        with evaluated(model):
            embedded = model.features(picture.to(model.mean.dtype))
            classes = model.logits(embedded).shape[1]
        features = embedded.clone().double().cpu()
        drawn = [
            torch.randint(classes, (upload.num_examples,), generator=generator)
            for upload, generator in zip(uploads, generators, strict=True)
        ]
        return [Features(labels, features.expand(len(labels), -1).clone()) for labels in drawn]
