"""A head that is zero but for one class: of a whole batch, only pictures of that class leave a gradient."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from pydantic import Field, create_model
from torch import Tensor
from typing_extensions import override

from attacks.adamw import EPSILON, gradient_behind
from attacks.labels import labels_of
from fedmjp.config import Config
from fedmjp.errors import AttackFailedError
from fedmjp.exchange import with_weights
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.entrance import Entrance
from fedmjp.models.roles import roles_of
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator
from fedmjp.servers.base import Modification
from fedmjp.threat import ThreatModel
from server.modifications.heads import faintness, head_refusal, small_tokens, without_sum

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

    One step of AdamW shows entries of a gradient that are about as small as its epsilon, and of larger ones the sign
    (``attacks.adamw``). Against AdamW W_c is therefore so faint that they are, by what a picture of noise makes of it,
    and tokens are made smaller.

    Which class to fish for, it reads off the upload of an honest round of the same batch: the first label that occurs
    once; a label that is stated needs no such round. A class that occurs twice gives a mixture. A step of AdamW hides
    how often a label occurs: the head of that round is then a faint random row per class, whose sum over the batch is
    the gradient of the last LayerNorm's bias.

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
    def refusal(self, model: VitClassifier, scenario: Scenario) -> str | None:
        if self._stated is None and scenario.training is not None:
            return f"{self.name}: a client in training shows another batch in every round: state the class to fish for"
        if self._stated is not None and self._stated >= scenario.model.classes:
            return f"{self.name}: class {self._stated} was asked for, the model knows {scenario.model.classes}"
        return head_refusal(self.name, model, scenario)

    @override
    def probe(self, model: VitClassifier, threat: ThreatModel) -> Mapping[str, Tensor]:
        if threat.local_optimiser == "sgd":
            return {}
        bias = torch.zeros_like(model.get_parameter(names.HEAD_BIAS).detach())
        return {names.HEAD_WEIGHT: _coded(model), names.HEAD_BIAS: bias}

    @override
    def learn(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> object:
        if threat.local_optimiser == "sgd":
            return labels_of(upload, model, threat)
        return _decoded(upload, model, threat)

    @override
    def weights(self, model: VitClassifier, threat: ThreatModel, known: object) -> Sequence[Mapping[str, Tensor]]:
        wanted = self._wanted(cast("tuple[int, ...]", known or ()))
        if wanted is None:
            return [{}] * threat.clients  # nobody answered the probe
        head, bias = (torch.zeros_like(model.get_parameter(name)) for name in (names.HEAD_WEIGHT, names.HEAD_BIAS))
        generator = torch_generator(0, self.name)
        row = (torch.randn(head.shape[1], generator=generator) / math.sqrt(head.shape[1])).to(head)
        share = threat.label_smoothing / len(bias)
        bias[wanted] = math.log(share / (1 - share) * (len(bias) - 1)) if share else SILENT
        tokens = small_tokens(model) if threat.local_optimiser == "adamw" else {}
        head[wanted] = row * _loudness(with_weights(model, tokens), row, threat)
        return [{**tokens, names.HEAD_WEIGHT: head.detach(), names.HEAD_BIAS: bias.detach()}] * threat.clients

    def _wanted(self, labels: Sequence[int]) -> int | None:
        """The class to fish for; None if nothing is known of the labels."""
        if self._stated is not None:
            return self._stated
        counts = Counter(labels)
        once = sorted(label for label, count in counts.items() if count == 1)
        return next(iter(once or sorted(counts)), None)

    @override
    def view(self, threat: ThreatModel) -> ThreatModel:
        return without_sum(threat).model_copy(update={"batch_size": 1, "labels_known": True})

    @override
    def isolate(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> Upload:
        rows = model.get_parameter(names.HEAD_WEIGHT).detach().any(dim=1).nonzero().flatten().tolist()
        if len(rows) != 1:
            raise AttackFailedError(
                f"{self.name}: the weights that were sent fish for {len(rows)} classes, not for one"
            )
        mixed = self.mixed(model)
        changes: dict[str, Any] = {"num_examples": 1, "labels": tuple(rows)}
        return replace(
            upload,
            tensors={name: tensor for name, tensor in upload.tensors.items() if name not in mixed},
            others=tuple(self.isolate(other, model, threat) for other in upload.others),
            **changes,
        )

    @override
    def mixed(self, model: Entrance) -> frozenset[str]:
        return roles_of(model)["head"]

    @override
    def wanted(self, labels: Sequence[int], threat: ThreatModel) -> list[int]:
        wanted = self._wanted(labels)
        return [place for place, label in enumerate(labels) if label == wanted]


def _loudness(model: VitClassifier, row: Tensor, threat: ThreatModel) -> float:
    """The factor of the row that fishes, at which what clients do to its gradient leaves most of it."""
    if threat.local_optimiser == "adamw":
        return faintness(model, row, threat)
    if threat.label_smoothing:
        return FAINT
    return LOUD / threat.local_learning_rate if threat.update == "delta" else 1.0


def _coded(model: VitClassifier) -> Tensor:
    """A head (classes, dim) of random rows, so faint that a step of AdamW shows which of them it adds up."""
    head = model.get_parameter(names.HEAD_WEIGHT).detach()
    return EPSILON * torch.randn(head.shape, generator=torch_generator(0, "codes")).to(head)


def _decoded(upload: Upload, model: VitClassifier, threat: ThreatModel) -> tuple[int, ...]:
    """The labels behind one step of AdamW from ``_coded``, as many times as they occur; all others come out as zero.

    The gradient of the last LayerNorm's bias is the sum over classes of (1 / K - q_c) W_c, with the shares q_c of the
    targets. Of more classes than dimensions, those are left out that hold less than an even share: their bias fell.
    """
    codes, classes = _coded(model).double(), len(upload.tensors[names.HEAD_BIAS])
    sent = replace(upload, tensors={names.NORM_BIAS: upload.tensors[names.NORM_BIAS]}, others=())
    seen = gradient_behind(sent, model, threat).tensors[names.NORM_BIAS].double()
    possible = torch.ones(classes, dtype=torch.bool, device=codes.device)
    if classes > codes.shape[1]:
        possible = upload.tensors[names.HEAD_BIAS].to(codes.device) > 0
    even, smoothing = 1 / classes, threat.label_smoothing
    shares = torch.linalg.lstsq(codes[possible].mT, (1 - smoothing) * even * codes.sum(0) - seen).solution
    counts = torch.zeros(classes, dtype=torch.long, device=codes.device)
    counts[possible] = (shares * upload.num_examples / (1 - smoothing)).round().long().clamp(min=0)
    return tuple(torch.repeat_interleave(torch.arange(classes), counts.cpu()).tolist())
