"""The floor: what anybody can guess without an upload."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from fedmjp.attacks.base import Attack
from fedmjp.models.entrance import Entrance
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

LEVEL = 0.45


class Grey(Attack[Entrance]):
    """The constant picture 0.45: an attack that does not beat it has not shown that anything leaks."""

    name = "grey"
    paper = "floor, no attack"
    summary = "constant grey picture: the floor that every row is read against"
    requires = "nothing"
    exploits = "nothing"
    role = "floor"
    takes_sums = True
    any_steps = True

    def tensors(self, model: Entrance) -> Sequence[str]:
        """Name no tensor."""
        del model
        return []

    @override
    def reconstruct_stack(
        self, uploads: Sequence[Upload], model: Entrance, threat: ThreatModel, *, generators: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        del threat, generators
        return [Reconstruction(torch.full((upload.num_examples, 3, *model.pixels), LEVEL)) for upload in uploads]
