"""A head that is zero but for one class: of a whole batch, only pictures of that class leave a gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field, create_model
from typing_extensions import override

from fedmjp.attacks.adamw import as_gradient
from fedmjp.config import Config
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.roles import roles_of
from fedmjp.seeds import torch_generator
from fedmjp.server.modifications import adamw
from fedmjp.server.modifications.heads import head_refusal, without_sum
from fedmjp.threat import Modification, ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import VitClassifier
    from fedmjp.models.entrance import Entrance
    from fedmjp.records import Upload

CLASS = "class"  # no name that Python takes for a field
ClassFishingOptions: type[Config] = create_model(
    "ClassFishingOptions",
    __base__=Config,
    **{CLASS: (int | None, Field(None, ge=0, description="to fish for; by default the first that occurs once"))},  # type: ignore[call-overload]
)
SILENT = -1e30  # logit of the fished class: its probability is exactly zero, whatever the feature
FAINT = 1e-6  # logits move by so little where label smoothing must be met
# Length of the row, times the learning rate, where weight changes are uploaded: these are then large beside the
# rounding of the weights, and the row beside what steps make of the others.
LOUD = 100.0


class ClassFishing(Modification):
    """Fish the pictures of one class out of a batch.

    The head's rows are zero but for that of the wanted class c. The gradient at the feature of a picture with label y
    is then (p_c - q_c) W_c, with the probability p_c and the target q_c: 1 for a picture of class c, 0 for others. The
    bias b_c makes p_c zero, so that others leave nothing anywhere before the head, and a picture of class c leaves what
    it would leave alone. The rest of the network is unchanged: attacks on one picture read the upload as they are.

    Under label smoothing s over K classes the target of others is s / K. The bias then makes p_c the same, and W_c is
    so faint that no feature moves it.

    Which class to fish for, it reads off the upload of an honest round of the same batch: the first label that occurs
    once; a label that is stated needs no such round. A class that occurs twice gives a mixture.

    Against steps of AdamW the class token and the last LayerNorm are changed too, and the first round is not honest
    (``adamw``).

    A sum over clients hides nothing, as long as the class occurs once in it.
    """

    name = "class_fishing"
    paper = "Wen et al., Fishing for user data in large-batch federated learning via gradient magnification, ICML 2022"
    summary = "a head that is zero but for one class isolates that class's picture in a batch of any size"
    options_type: ClassVar[type[Config]] = ClassFishingOptions

    @property
    @override
    def probes(self) -> int:
        return 0 if self._stated is not None else 1

    @property
    def _stated(self) -> int | None:
        stated: int | None = getattr(self.options, CLASS)
        return stated

    @override
    def refusal(self, model: VitClassifier, threat: ThreatModel, *, trains: bool) -> str | None:
        if self._stated is None and trains:
            return f"{self.name}: a client in training shows another batch in every round: state the class to fish for"
        if self._stated is not None and self._stated >= model.backbone.num_classes:
            return f"{self.name}: class {self._stated} was asked for, the model knows {model.backbone.num_classes}"
        return head_refusal(self.name, model, threat) or adamw.adamw_refusal(self.name, model, threat)

    @override
    def probe(self, model: VitClassifier, threat: ThreatModel) -> Mapping[str, Tensor]:
        return adamw.probing_weights(model, threat) if threat.local_optimiser == "adamw" else {}

    @override
    def learn(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> object:
        from fedmjp.attacks.labels import labels_of

        read = adamw.labels_behind if threat.local_optimiser == "adamw" else labels_of
        return read(upload, model, threat)

    @override
    def weights(self, model: VitClassifier, threat: ThreatModel, learnt: object) -> Sequence[Mapping[str, Tensor]]:
        import torch

        label = self._wanted(cast("tuple[int, ...]", learnt or ()))
        if label is None:
            return [{}] * threat.pipeline.clients  # nobody answered the probe
        head, bias = (torch.zeros_like(model.get_parameter(name)) for name in (names.HEAD_WEIGHT, names.HEAD_BIAS))
        generator = torch_generator(0, self.name)
        row = (torch.randn(head.shape[1], generator=generator) / math.sqrt(head.shape[1])).to(head)
        share = threat.label_smoothing / len(bias)
        body: dict[str, Tensor] = {}
        bias[label] = math.log(share / (1 - share) * (len(bias) - 1)) if share else SILENT
        if threat.local_optimiser == "adamw":
            body, row = adamw.fishing_weights(model, row, threat)
        elif share:
            row *= FAINT
        elif threat.update == "delta":
            row *= LOUD / threat.local_learning_rate
        head[label] = row
        return [{**body, names.HEAD_WEIGHT: head.detach(), names.HEAD_BIAS: bias.detach()}] * threat.pipeline.clients

    def _wanted(self, labels: Sequence[int]) -> int | None:
        """Choose the class to fish for; None if nothing is known of the labels."""
        if self._stated is not None:
            return self._stated
        counts = Counter(labels)
        once = sorted(label for label, count in counts.items() if count == 1)
        return next(iter(once or sorted(counts)), None)

    @override
    def view(self, threat: ThreatModel) -> ThreatModel:
        alone = without_sum(threat).model_copy(update={"batch_size": 1, "labels_known": True})
        return as_gradient(alone) if threat.local_optimiser == "adamw" else alone

    @override
    def reads(self, model: VitClassifier, threat: ThreatModel) -> Sequence[str]:
        return adamw.step_tensors(threat, model)

    @override
    def isolate(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> Upload:
        rows = model.get_parameter(names.HEAD_WEIGHT).detach().any(dim=1).nonzero().flatten().tolist()
        if len(rows) != 1:
            raise AttackFailedError(
                f"{self.name}: the weights that were sent fish for {len(rows)} classes, not for one"
            )
        mixed = self.mixed(model)
        changes: dict[str, Any] = {"num_examples": 1, "labels": tuple(rows)}
        alone = replace(
            upload,
            tensors={name: tensor for name, tensor in upload.tensors.items() if name not in mixed},
            others=tuple(self.isolate(further, model, threat) for further in upload.others),
            **changes,
        )
        if threat.local_optimiser == "sgd":
            return alone
        return replace(adamw.isolated_gradient(alone, model, threat), others=alone.others)

    @override
    def mixed(self, model: Entrance) -> frozenset[str]:
        return roles_of(model)["head"]

    @override
    def wanted(self, labels: Sequence[int], threat: ThreatModel) -> list[int]:
        fished = self._wanted(labels)
        return [place for place, label in enumerate(labels) if label == fished]
