"""Common parts of servers that change the head of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from fedmjp.models import names
from fedmjp.models.roles import roles_of
from fedmjp.threat import Modification, ThreatModel

if TYPE_CHECKING:
    from fedmjp.models.classifier import VitClassifier
    from fedmjp.models.entrance import Entrance
    from fedmjp.records import Upload

NEEDED = (names.NORM_WEIGHT, names.NORM_BIAS, names.HEAD_WEIGHT, names.HEAD_BIAS)


def head_refusal(server: str, model: VitClassifier, threat: ThreatModel) -> str | None:
    """Say why a server cannot change the head of the model; None if it can.

    Args:
        server: Its name, with which the reason begins.
        model: The clients' model.
        threat: What the server sees.
    """
    tensors = {name for name, _ in model.named_parameters()}
    if missing := [name for name in NEEDED if name not in tensors]:
        return f"{server}: changes the model's head, but the model has no tensor {missing[0]}"
    for defence in threat.pipeline.defences:
        if defence.withheld(roles_of(model)) & set(NEEDED):
            return f"{server}: changes the head, which {defence.name} keeps at the client"
    if threat.local_optimiser == "adamw" and threat.pipeline.clients > 1:
        return f"{server}: steps of AdamW that are summed do not come apart: every client's would have to be read alone"
    return None


def without_sum(threat: ThreatModel) -> ThreatModel:
    """Make the threat model of one client's update, which a server takes out of a sum.

    Args:
        threat: Of the sum.
    """
    remaining = threat.pipeline.of_stage("pictures", "model", "examples", "update")
    return threat.model_copy(update={"defences": remaining.configs})


class FirstOfSum(Modification):
    """A server after the first client of a sum: the others get weights whose gradient is of the head's bias alone."""

    @override
    def isolate(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> Upload:
        if threat.pipeline.clients == 1:
            return upload
        mixed = self.mixed(model)
        return replace(
            upload,
            tensors={name: tensor for name, tensor in upload.tensors.items() if name not in mixed},
            num_examples=threat.batch_size,
            labels=None,
            others=tuple(self.isolate(further, model, threat) for further in upload.others),
        )

    @override
    def mixed(self, model: Entrance) -> frozenset[str]:
        return frozenset({names.HEAD_BIAS}) & roles_of(model)["head"]

    @override
    def wanted(self, labels: Sequence[int], threat: ThreatModel) -> list[int]:
        return list(range(len(labels) // threat.pipeline.clients))
