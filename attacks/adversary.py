"""The malicious server: runs an attack on what it recorded, with what its threat model grants."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import Progress
from fedmjp.attacks.stages import TENSORS, Stage, reassembled, unstaged
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Disclosure, Reconstruction, Upload
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
    ) -> list[Disclosure]:
        """Run an attack on uploads that were computed with the model's weights; its pictures may pass a stage ``then``.

        Where the server had changed the weights, the attack is given the part of each upload that they isolate.

        Raises:
            BadInputError: If there is no such attack or option, the attack refuses what it is given, or it reveals no
                pictures for the stage.
        """
        chosen = ATTACKS.get(attack)(options)
        chosen.on_progress = on_progress
        generator = torch_generator(self.seed, "attack", attack)
        threat = self.threat.isolated
        if self.threat.server is not None:
            server = self.threat.server.build()
            read = {*chosen.tensors(self.model), *server.reads(self.model, self.threat), *(TENSORS if then else ())}
            uploads = [server.isolate(_part(upload, read), self.model, self.threat) for upload in uploads]
        disclosures = chosen.run(uploads, self.model, threat, generator=generator)
        if then is None:
            return disclosures
        if refusal := unstaged(chosen, then):
            raise AttackNotApplicableError(f"{attack}: {refusal}")
        return [  # a generator for each: a result does not depend on its neighbours
            reassembled(made, upload, self.model, threat, torch_generator(self.seed, "stage", then))
            for made, upload in zip(disclosures, uploads, strict=True)
            if isinstance(made, Reconstruction)
        ]


def _part(upload: Upload, read: Collection[str]) -> Upload:
    """Some of an upload's tensors, so that no more are isolated than are read; all, if it holds none of them."""
    kept = {name: tensor for name, tensor in upload.tensors.items() if name in read}
    return replace(upload, tensors=kept or upload.tensors, others=tuple(_part(other, read) for other in upload.others))
