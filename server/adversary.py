"""The malicious server: runs an attack on what it recorded, with what its threat model grants."""

from collections.abc import Sequence
from dataclasses import dataclass

from attacks import ATTACKS
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel


@dataclass(frozen=True)
class Adversary:
    """Holds the model that the server had sent and its threat model; has no access to anything else.

    Attributes:
        model: With the weights that the uploads were computed with.
        threat: What the server knows.
        seed: Attacks that draw random numbers derive them from this and their name.
    """

    model: VitClassifier
    threat: ThreatModel
    seed: int

    def reconstruct(self, attack: str, uploads: Sequence[Upload]) -> list[Reconstruction]:
        """One reconstruction per upload.

        Raises:
            UnknownNameError: If there is no such attack.
            AttackNotApplicableError: If the attack refuses the model, threat model or an upload.
        """
        generator = torch_generator(self.seed, "attack", attack)
        return ATTACKS.get(attack)().reconstruct(uploads, self.model, self.threat, generator=generator)
