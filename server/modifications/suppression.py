"""A dead head for all clients of a sum but one: what is summed is then the upload of that one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from fedmjp.models import names
from fedmjp.server.modifications.heads import FirstOfSum, head_refusal, without_sum
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import VitClassifier

DEAD = (names.NORM_WEIGHT, names.NORM_BIAS, names.HEAD_WEIGHT)


class Suppression(FirstOfSum):
    """Silence all clients whose updates are summed, but the first.

    The others are sent zeros for the last norm and for the head's weight. No gradient passes such a head, so that
    theirs are exactly zero everywhere but at the head's bias, after any number of steps too. The first client is sent
    the honest weights: but for a factor, the sum is what it uploads.

    Without a sum nobody is silenced, and all that is sent is honest.
    """

    name = "suppression"
    paper = "Pasquini et al., Eluding secure aggregation in federated learning via model inconsistency, CCS 2022"
    summary = "a dead head for all clients of a sum but the first, whose upload the sum then is"

    @override
    def refusal(self, model: VitClassifier, threat: ThreatModel, *, trains: bool) -> str | None:
        return head_refusal(self.name, model, threat)

    @override
    def weights(self, model: VitClassifier, threat: ThreatModel, learnt: object) -> Sequence[Mapping[str, Tensor]]:
        import torch

        dead = {name: torch.zeros_like(model.get_parameter(name).detach()) for name in DEAD}
        return [{}, *[dead] * (threat.pipeline.clients - 1)]

    @override
    def view(self, threat: ThreatModel) -> ThreatModel:
        return without_sum(threat).model_copy(
            update={"labels_known": threat.labels_known and threat.pipeline.clients == 1}
        )
