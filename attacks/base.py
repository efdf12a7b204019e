"""The contract of an attack: uploads and the server's own knowledge in, pictures out.

An attack sees what the server sees. There is no parameter through which private data could come.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload, weights_digest
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel


def single_picture_gradient_refusal(threat: ThreatModel) -> str | None:
    """The requirement of closed forms: one client's FedSGD gradient of one picture."""
    if threat.update != "gradient":
        return f"needs a FedSGD gradient, not a {threat.update} after {threat.local_steps} steps"
    if threat.batch_size != 1 or not threat.individual_updates:
        return "needs the individual update of a single picture: tokens of several only show their sum"
    return None


class Attack(ABC):
    """Base of all attacks.

    Class attributes state what `fedmjp list attacks` prints: ``name``; ``paper``, the source;
    ``summary``, one line; ``requires``, what must hold, in words; ``floor``, whether it is a
    reference that uses nothing of the upload.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    requires: ClassVar[str]
    floor: ClassVar[bool] = False

    def reconstruct(
        self, uploads: Sequence[Upload], model: VitClassifier, threat: ThreatModel, *, generator: torch.Generator
    ) -> list[Reconstruction]:
        """Reconstruct the pictures behind a stack of independent uploads.

        Args:
            uploads: Uploads that were all computed with ``model``'s weights. They are not changed.
            model: The model that the server had sent.
            threat: What the attacker knows beyond that.
            generator: Its initial seed is the source of randomness. Every upload gets a generator of
                its own from that and its content, so that a result never depends on its neighbours.

        Returns:
            One reconstruction per upload, in the same order.

        Raises:
            AttackNotApplicableError: If the model, the threat model or an upload does not meet
                ``requires``; the message says which requirement fails. It is never run regardless.
        """
        refusal = self.refusal(model, threat)
        if refusal:
            raise AttackNotApplicableError(f"{self.name}: {refusal}")
        for upload in uploads:
            self._check_upload(upload, threat)
            self._check_tensors(upload, model)
        return [
            self._reconstruct_one(upload, model, threat, generator=self._generator_for(upload, model, generator))
            for upload in uploads
        ]

    @abstractmethod
    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Names of the upload's tensors that the attack reads."""

    @abstractmethod
    def refusal(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Which requirement this model or threat model fails; None if the attack applies."""

    @abstractmethod
    def _reconstruct_one(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, *, generator: torch.Generator
    ) -> Reconstruction: ...

    def _generator_for(self, upload: Upload, model: VitClassifier, generator: torch.Generator) -> torch.Generator:
        content = weights_digest({name: upload.tensors[name] for name in self.tensors(model)})
        return torch_generator(generator.initial_seed(), "upload", content)

    def _check_upload(self, upload: Upload, threat: ThreatModel) -> None:
        if upload.kind != threat.update:
            raise AttackNotApplicableError(
                f"{self.name}: the upload is a {upload.kind}, the threat model speaks of a {threat.update}"
            )
        if upload.num_examples != threat.batch_size:
            raise AttackNotApplicableError(
                f"{self.name}: the upload is of {upload.num_examples} pictures, "
                f"the threat model speaks of {threat.batch_size}"
            )

    def _check_tensors(self, upload: Upload, model: VitClassifier) -> None:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        for name in self.tensors(model):
            if name not in upload.tensors:
                raise AttackNotApplicableError(f"{self.name}: the upload has no tensor {name!r}")
            if upload.tensors[name].shape != shapes[name]:
                raise AttackNotApplicableError(
                    f"{self.name}: upload tensor {name!r} has shape {tuple(upload.tensors[name].shape)}, "
                    f"the model's has {tuple(shapes[name])}"
                )
