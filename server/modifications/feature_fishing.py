"""A threshold in the middle of a class's features: of two pictures of a class, one leaves a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from typing_extensions import override

from fedmjp.models import names
from fedmjp.seeds import torch_generator
from fedmjp.server.modifications.class_fishing import ClassFishing
from fedmjp.server.modifications.heads import NEEDED
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import VitClassifier
    from fedmjp.records import Upload

STEEP = 1e5  # logits per unit of feature along the direction: probabilities are then zero or one
DEPTH = 30.0  # how far below the threshold other classes are put, in standard lengths of the random direction


class Sums(NamedTuple):
    """What a probe tells of every class: how many pictures it has, and the sum of their features."""

    counts: tuple[int, ...]
    features: Tensor  # (classes, dim) float64


class FeatureFishing(ClassFishing):
    """Fish one picture out of a class that occurs twice in a batch.

    A probe with a head of zeros comes first. All its probabilities are 1 / K, so that its gradient gives, exactly, how
    many pictures each class has and the sum of their features.

    The head that fishes has a single row u, of the wanted class c, and a threshold: it is certain of c above, and of
    others below. Pictures of c leave a gradient below the threshold, those of other classes above. u puts the features
    of all other classes, whose means are known, far below the threshold, and the mean of class c onto it; beyond
    that it is random. Of two pictures one is then below. Which one, nobody knows before it comes out.

    Of more than two, those below come out as a mixture.
    """

    name = "feature_fishing"
    paper = "Wen et al., Fishing for user data, ICML 2022, section 3.2; threshold and direction from sums of features"
    summary = "a threshold between the features of a class that occurs twice isolates one of its pictures"

    @property
    @override
    def probes(self) -> int:
        return 1

    @override
    def refusal(self, model: VitClassifier, threat: ThreatModel, *, trains: bool) -> str | None:
        if trains:
            return f"{self.name}: probes a batch first, and a client in training shows another one in every round"
        if threat.crop_scale:
            return f"{self.name}: probes a batch first, and clients show other crops of it in every upload"
        if threat.local_optimiser == "adamw":
            return f"{self.name}: its probe is read from a step of SGD; of AdamW's, no features can be told"
        if threat.local_steps > 1 or threat.local_batch_size:
            return f"{self.name}: its probe is read from one step on the whole batch, not from {threat.local_steps}"
        if threat.label_smoothing:
            return (
                f"{self.name}: needs targets of zero and one, label smoothing is {threat.label_smoothing:g}: "
                "probabilities above the threshold would have to meet it"
            )
        return super().refusal(model, threat, trains=trains)

    @override
    def probe(self, model: VitClassifier, threat: ThreatModel) -> Mapping[str, Tensor]:
        import torch

        del threat
        *_, head, bias = NEEDED
        return {name: torch.zeros_like(model.get_parameter(name).detach()) for name in (head, bias)}

    @override
    def learn(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> object:
        import torch

        head, bias = (upload.tensors[name].double().cpu() for name in (names.HEAD_WEIGHT, names.HEAD_BIAS))
        if upload.kind == "delta":
            head, bias = -head / threat.local_learning_rate, -bias / threat.local_learning_rate
        # Row k is sum_i (1 / K - [y_i = k]) f_i / B.
        pictures, classes = upload.num_examples, len(bias)
        counts = (pictures * (1 / classes - bias)).round().long().clamp(min=0).tolist()
        absent = torch.tensor([count == 0 for count in counts])
        if not absent.any():
            return None
        everywhere = head[absent].mean(dim=0)
        return Sums(tuple(counts), pictures * (everywhere - head))

    @override
    def weights(self, model: VitClassifier, threat: ThreatModel, learnt: object) -> Sequence[Mapping[str, Tensor]]:
        import torch

        sums = cast(Sums | None, learnt)
        label = None if sums is None else self._wanted([k for k, n in enumerate(sums.counts) for _ in range(n)])
        if sums is None or label is None:
            return [{}] * threat.pipeline.clients  # nobody answered the probe, or no class is there to fish for
        direction, threshold = self._direction(sums, label)
        head, bias = (torch.zeros_like(model.get_parameter(name).detach()) for name in NEEDED[2:])
        head[label], bias[label] = STEEP * direction, -STEEP * threshold
        return [{names.HEAD_WEIGHT: head, names.HEAD_BIAS: bias}] * threat.pipeline.clients

    def _direction(self, sums: Sums, label: int) -> tuple[Tensor, float]:
        """Find a unit vector (dim,) along which other classes are far below one class, and that one's mean there."""
        import torch

        present = [k for k, count in enumerate(sums.counts) if count]
        counts = torch.tensor([sums.counts[k] for k in present], dtype=torch.float64)
        means = sums.features[present] / counts[:, None]
        centre = means[present.index(label)]
        offsets = torch.stack([mean for k, mean in zip(present, means, strict=True) if k != label] or [centre]) - centre
        generator = torch_generator(0, self.name, label)
        drawn = torch.randn(len(centre), generator=generator, dtype=torch.float64)
        drawn /= drawn.norm()
        below = -DEPTH * offsets.norm(dim=1) / len(centre) ** 0.5 - offsets @ drawn
        direction = drawn + torch.linalg.lstsq(offsets, below[:, None], driver="gelsd").solution[:, 0]
        direction /= direction.norm()
        return direction, float(direction @ centre)

    @override
    def _wanted(self, labels: Sequence[int]) -> int | None:
        if self._stated is not None:
            return self._stated
        return min((label for label, count in Counter(labels).items() if count == 2), default=None)
