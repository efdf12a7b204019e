"""The malicious server: runs an attack on what it recorded, with what its threat model grants."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import Progress, undecayed
from fedmjp.attacks.recover import fit_entrance
from fedmjp.attacks.stages import TENSORS, Stage, reassembled, unstaged
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Disclosure, Reconstruction, Upload
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    from fedmjp.models.adopt import Adopted


@dataclass(frozen=True)
class Adversary:
    """The malicious server: it holds the model that it had sent and its threat model, and sees nothing else.

    Attributes:
        model: With the weights that were sent.
        threat: The knowledge that the server is granted.
        seed: The source, together with their names, of everything that attacks draw.
    """

    model: VitClassifier
    threat: ThreatModel
    seed: int

    def fit(self, attack: str, upload: Upload, options: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """Hold what is known of a user's adopted model against an upload, before an attack reads it.

        Args:
            attack: Its registered name.
            upload: Of the model.
            options: Of the attack.

        Returns:
            The adversary with the model as ``fit_entrance`` gives it, and what to say of it.

        Raises:
            BadInputError: If there is no such attack or option, or the upload is not what it is said to be.
        """
        method, model = ATTACKS.get(attack)(options), cast("Adopted", self.model)
        fitted, notes = fit_entrance(method, undecayed(upload, model, self.threat), model, self.threat)
        return replace(self, model=cast(VitClassifier, fitted)), notes

    def reconstruct(
        self,
        attack: str,
        uploads: Sequence[Upload],
        options: Mapping[str, Any],
        *,
        then: Stage | None = None,
        on_progress: Progress,
    ) -> list[Disclosure]:
        """Run an attack on uploads that were computed with the model's weights.

        Where the server had changed the weights, the attack is given the part of each upload that they isolate.

        Args:
            attack: Its registered name.
            uploads: Independent uploads.
            options: Options of the attack.
            then: A stage that its pictures pass afterwards, if any.
            on_progress: Called while the attack optimises.

        Returns:
            A disclosure for each upload.

        Raises:
            BadInputError: If there is no such attack or option, the attack refuses its input, or it reveals no pictures
                for the stage.
        """
        method = ATTACKS.get(attack)(options)
        method.on_progress = on_progress
        generator = torch_generator(self.seed, "attack", attack)
        threat = self.threat.isolated
        if self.threat.server is not None:
            server = self.threat.server.build()
            read = {*method.tensors(self.model), *server.reads(self.model, self.threat), *(TENSORS if then else ())}
            parts = [undecayed(_part(upload, read), self.model, self.threat) for upload in uploads]
            uploads = [server.isolate(part, self.model, self.threat) for part in parts]
            if threat.local_optimiser == "sgd":
                threat = threat.model_copy(update={"local_weight_decay": 0.0})
        disclosures = method.run(uploads, self.model, threat, generator=generator)
        if then is None:
            return disclosures
        if refusal := unstaged(method, then):
            raise AttackNotApplicableError(f"{attack}: {refusal}")
        return [  # a generator for each: a result does not depend on its neighbours
            reassembled(
                reconstruction,
                undecayed(upload, self.model, threat),
                self.model,
                threat,
                torch_generator(self.seed, "stage", then),
            )
            for reconstruction, upload in zip(disclosures, uploads, strict=True)
            if isinstance(reconstruction, Reconstruction)
        ]


def _part(upload: Upload, read: Collection[str]) -> Upload:
    """Keep the tensors that are read, so that no others are isolated; keep all if the upload holds none of them."""
    tensors = {name: tensor for name, tensor in upload.tensors.items() if name in read}
    return replace(
        upload, tensors=tensors or upload.tensors, others=tuple(_part(sibling, read) for sibling in upload.others)
    )
