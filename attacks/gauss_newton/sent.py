"""What uploads say of gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.entries import Entries, coarse
from fedmjp.attacks.gauss_newton.picked import KnownEntries, said_of
from fedmjp.defences.quantise import Quantise
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel


@dataclass(frozen=True)
class UploadedEntries:
    """Tensors of uploads of one picture on the model's device, and what makes gradients of them.

    Attributes:
        tensors: (rows,) or (rows, columns) each, the mean of the uploads.
        factor: Of a gradient over what was sent.
        threat: What was done to the entries.
        uploads: How many they are the mean of.
    """

    tensors: Mapping[str, Tensor]
    factor: float
    threat: ThreatModel
    uploads: int

    @staticmethod
    def of(
        uploads: Sequence[Upload], names: Sequence[str], threat: ThreatModel, model: VitClassifier
    ) -> "UploadedEntries":
        """Some of the tensors of uploads that differ in their noise alone; of the first where others leave no mean."""
        averaged = uploads if all(isinstance(defence, Quantise) for defence in coarse(threat)) else uploads[:1]
        factor = 1.0 if averaged[0].kind == "gradient" else -1 / threat.local_learning_rate
        tensors = {name: _mean([upload.tensors[name] for upload in averaged]).to(model.mean.device) for name in names}
        return UploadedEntries(tensors, factor, threat, len(averaged))

    def gradients(self) -> dict[str, Tensor]:
        """As they were sent."""
        return {name: tensor * self.factor for name, tensor in self.tensors.items()}

    def said_of(self, name: str, scaled: float) -> Entries:
        """What is said of a gradient (rows, columns) that is ``scaled`` times what clients sent."""
        matrix = self.tensors[name].flatten(1) * math.copysign(1.0, self.factor)
        return said_of(matrix, self.threat, self.uploads).scaled(abs(self.factor) * scaled)

    def known(self) -> dict[str, KnownEntries]:
        """What is known of gradients but for noise, entry by entry."""
        return {
            name: KnownEntries.read(tensor, self.threat, self.uploads).scaled(self.factor)
            for name, tensor in self.tensors.items()
        }


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """In their own precision, which tells how they were rounded."""
    return torch.stack([tensor.double() for tensor in tensors]).mean(dim=0).to(tensors[0].dtype).squeeze(0)
