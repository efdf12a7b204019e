"""Common parts of servers that change the head of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmjp.models import names
from fedmjp.models.roles import roles_of
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    from fedmjp.models.classifier import VitClassifier

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
