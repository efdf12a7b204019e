"""The malicious server: runs an attack on what it recorded, with what its threat model grants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attacks import ATTACKS
from attacks.base import Progress
from attacks.stages import Stage, reassembled
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel


@dataclass(frozen=True)
class Adversary:
    """Holds the model that the server had sent and its threat model; has no access to anything else.

    What an attack draws comes from ``seed`` and its name.
    """

    model: VitClassifier
    threat: ThreatModel
    seed: int

    def reconstruct(
        self,
        attack: str,
        uploads: Sequence[Upload],
        options: Mapping[str, Any],
        *,
        then: Stage | None = None,
        on_progress: Progress,
    ) -> list[Reconstruction]:
        """Run an attack on uploads that were computed with the model's weights; its pictures may pass a stage ``then``.

        Raises:
            BadInputError: If there is no such attack or option, or the attack refuses what it is given.
        """
        made = ATTACKS.get(attack)(options)
        made.on_progress = on_progress
        generator = torch_generator(self.seed, "attack", attack)
        reconstructions = made.reconstruct(uploads, self.model, self.threat, generator=generator)
        if then is None:
            return reconstructions
        return [  # a generator for each: a result does not depend on its neighbours
            reassembled(reconstruction, upload, self.model, self.threat, torch_generator(self.seed, "stage", then))
            for reconstruction, upload in zip(reconstructions, uploads, strict=True)
        ]
