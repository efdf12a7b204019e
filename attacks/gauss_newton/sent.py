"""What an upload says of gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from attacks.entries import Entries
from attacks.gauss_newton.picked import Known, said_of
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel


@dataclass(frozen=True)
class Sent:
    """Tensors of an upload on the model's device, and what makes gradients of them.

    Attributes:
        tensors: (rows,) or (rows, columns) each.
        factor: Of a gradient over what was sent.
        threat: What was done to the entries.
    """

    tensors: Mapping[str, Tensor]
    factor: float
    threat: ThreatModel

    @staticmethod
    def of(upload: Upload, names: Sequence[str], threat: ThreatModel, model: VitClassifier) -> "Sent":
        """Some of an upload's tensors."""
        factor = 1.0 if upload.kind == "gradient" else -1 / threat.local_learning_rate
        tensors = {name: upload.tensors[name].to(model.mean.device).squeeze(0) for name in names}
        return Sent(tensors, factor, threat)

    def gradients(self) -> dict[str, Tensor]:
        """As they were sent."""
        return {name: tensor * self.factor for name, tensor in self.tensors.items()}

    def said_of(self, name: str, scaled: float) -> Entries:
        """What is said of a gradient (rows, columns) that is ``scaled`` times what clients sent."""
        matrix = self.tensors[name].flatten(1) * math.copysign(1.0, self.factor)
        return said_of(matrix, self.threat).scaled(abs(self.factor) * scaled)

    def known(self) -> dict[str, Known]:
        """What is known of gradients but for noise, entry by entry."""
        return {name: Known.read(tensor, self.threat).scaled(self.factor) for name, tensor in self.tensors.items()}
