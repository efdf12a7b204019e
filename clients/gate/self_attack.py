"""Attack an upload before it leaves, and hold what comes back against what was trained on.

Attacks come by name from ``fedmjp`` and are given uploads alone, as a server would have them. What they give is
compared here, by the client, who knows its own batches.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import fedmjp
from fedmjp.clients.gate.ledger import Outcome
from fedmjp.clients.gate.reading import ReplyReading
from fedmjp.clients.gate.watching import Observation
from fedmjp.clients.replies import Update
from fedmjp.errors import AttackFailedError, BadInputError, Failure
from fedmjp.metrics import METRICS
from fedmjp.models import names
from fedmjp.models.sent import SentWeights
from fedmjp.records import Features, Reconstruction
from fedmjp.seeds import torch_generator
from fedmjp.threat import FLOAT32, ThreatModel

EXACT = ("labels", "class_token")  # attacks by name
RANK_ONE = 1e-3  # share of a layer's gradient that one picture may leave unexplained
TWO_CLASSES = 0.05  # share of a bias' change that further classes have
NOISY = 0.05  # share of it that rounding may be, for anything to be told
TELLING = 0.75  # patches per dimension, of which more leave open whether an upload is of one picture
MOST = 32  # pictures that are separated: more take long, and are not certified
EXACT_FEATURE = 0.01  # relative error


@dataclass(frozen=True)
class AttackResults:
    """What became of an upload in the hands of attacks."""

    outcomes: tuple[Outcome, ...]

    def came_back(self, of: str) -> bool:
        """Tell whether any pictures, features or labels came back.

        Args:
            of: ``pictures``, ``features`` or ``labels``.
        """
        return any(outcome.of == of and outcome.came_back for outcome in self.outcomes)


def try_upload(
    update: Update, observed: Observation, *, psnr: float, search: tuple[str, Mapping[str, Any]] | None = None
) -> AttackResults:
    """Run the exact attacks that apply to an upload, and count what they recover.

    Args:
        update: As it would leave.
        observed: What it was computed from, as far as it was seen; without batches all that an attack certifies
            counts.
        psnr: dB from which on a picture has come back.
        search: Name and options of a further attack.
    """
    attempt = _Attempt(update, observed, psnr)
    outcomes = [*attempt.one_example(), *attempt.one_picture(), *attempt.labels(), *attempt.features()]
    if search is not None:
        outcomes += attempt.search(*search)
    return AttackResults(tuple(outcomes))


def try_reading(
    reading: ReplyReading, observed: Observation, *, psnr: float, search: tuple[str, Mapping[str, Any]] | None = None
) -> AttackResults:
    """Run the exact attacks on every update that a reply may hold; of less likely readings what comes back counts.

    Args:
        reading: Of the reply as it would leave.
        observed: What it was computed from, as far as it was seen.
        psnr: dB from which on a picture has come back.
        search: Name and options of a further attack.
    """
    outcomes: list[Outcome] = []
    for likeliest, *further in reading.updates:
        outcomes += try_upload(_as_gradient(likeliest, observed), observed, psnr=psnr, search=search).outcomes
        for update in further:
            results = try_upload(_as_gradient(update, observed), observed, psnr=psnr, search=search)
            outcomes += [outcome for outcome in results.outcomes if outcome.came_back]
    return AttackResults(tuple(outcomes))


def try_tensors(reading: ReplyReading) -> AttackResults:
    """Run the attacks that need neither batches nor optimiser: they tell uploads of one example alone.

    Args:
        reading: Of the reply as it would leave.
    """
    attempts = [_Attempt(update, Observation(), psnr=math.inf) for readings in reading.updates for update in readings]
    return AttackResults(
        tuple(outcome for attempt in attempts for outcome in (*attempt.one_example(), *attempt.one_picture()))
    )


def _as_gradient(update: Update, observed: Observation) -> Update:
    """Take an update for a gradient where the app took no step."""
    is_gradient = update.base is not update.weights and bool(observed.rows) and not observed.steps
    return replace(update, kind="gradient") if is_gradient else update


class _Attempt:
    def __init__(self, update: Update, observed: Observation, psnr: float) -> None:
        self.update, self.seen, self.psnr = update, observed, psnr
        self.change = {name: tensor for name, tensor in update.change.items() if tensor.is_floating_point()}
        self.count = observed.pictures or update.examples or 1
        self.images = torch.cat(observed.images).float() if observed.images and _alike(observed.images) else None
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in self._normalisation())
        self.layout = replace(SentWeights.of(update.weights), mean=mean, std=std)

    def one_example(self) -> Iterator[Outcome]:
        """Look for a layer whose gradient has rank one: that of one example is a product with the bias' gradient."""
        for weight, bias in self._layers():
            if _are_two_classes(self.change[bias]):
                continue
            inputs = self._only_input(weight, bias)
            if inputs is not None:
                yield Outcome(attack=f"rank one ({weight})", of=self._kind_of(inputs), came_back=1, among=self.count)
                return
        yield Outcome(attack="rank one", of="features", came_back=0, among=self.count, reason="no layer has rank one")

    def one_picture(self) -> Iterator[Outcome]:
        """Patch and position embedding give a picture back exactly, or show that they are of several."""
        reason = ""
        patches, positions = (self._sent(name) for name in (names.PATCH_WEIGHT, names.POSITION_EMBEDDING))
        if patches is None or positions is None:
            reason = "no patch and position embedding"
        elif self.images is None and self.layout.grid**2 > TELLING * len(patches):
            reason = f"{self.layout.grid**2} patches in {len(patches)} dimensions do not show whether it is one picture"
        else:
            mean, std = (None, None) if self.images is None else self._normalisation()
            try:
                picture = fedmjp.recover(patches, positions.reshape(-1, positions.shape[-1]), mean=mean, std=std)
            except BadInputError as error:
                reason = str(error)
            else:
                yield self._shown("closed form", picture[None])
                return
        yield Outcome(attack="closed form", of="pictures", came_back=0, among=self.count, reason=reason)

    def labels(self) -> Iterator[Outcome]:
        """Read labels from the gradient of the head's bias; over several steps, from its mean."""
        disclosed = self._attacked("labels", {}, self._mean_gradient(), ThreatModel(batch_size=self._batch))
        if isinstance(disclosed, Failure):
            yield Outcome(attack="labels", of="labels", came_back=0, among=self.count, reason=disclosed.reason)
        else:
            yield self._right_labels("labels", disclosed.labels)

    def features(self) -> Iterator[Outcome]:
        """Separate the pictures of one step, and read each one's features."""
        reason = self._not_one_step()
        threat = ThreatModel(batch_size=self._batch, label_smoothing=self.seen.smoothing)
        gradient = Failure(reason) if reason else self._mean_gradient()
        disclosed = self._attacked("class_token", {}, gradient, threat)
        if isinstance(disclosed, Failure):
            yield Outcome(attack="class_token", of="features", came_back=0, among=self.count, reason=disclosed.reason)
            return
        yield self._right_labels("class_token", disclosed.labels)
        yield Outcome(attack="class_token", of="features", came_back=self._right_features(disclosed), among=self._batch)

    def search(self, name: str, options: Mapping[str, Any]) -> Iterator[Outcome]:
        """Run another attack on pictures.

        Args:
            name: Of the attack.
            options: Of the attack.
        """
        disclosed = self._attacked(name, options, self._mean_gradient(), ThreatModel(batch_size=self._batch))
        if isinstance(disclosed, Reconstruction):
            yield self._shown(name, disclosed.images)
        else:
            reason = disclosed.reason if isinstance(disclosed, Failure) else "gave no pictures"
            yield Outcome(attack=name, of="pictures", came_back=0, among=self.count, reason=reason)

    @property
    def _batch(self) -> int:
        return self.seen.rows or self.update.examples or 1

    def _layers(self) -> Iterator[tuple[str, str]]:
        """Pair matrices with the biases that follow them."""
        order = list(self.change)
        for name, following in pairwise(order):
            weight, bias = self.change[name], self.change[following]
            if weight.ndim == 2 and bias.shape == weight.shape[:1] and min(weight.shape) > 1:
                yield name, following

    def _only_input(self, weight: str, bias: str) -> Tensor | None:
        """Recover the input of a layer, if its gradient is of one example."""
        matrix, vector = self.change[weight].double(), self.change[bias].double()
        size, square = float(matrix.norm()), float(vector.square().sum())
        if not size or not square:
            return None
        rounding = FLOAT32 * float(self.update.base[weight].double().norm()) / size
        if rounding > NOISY:
            return None
        inputs = (vector @ matrix) / square
        unexplained = float((matrix - torch.outer(vector, inputs)).norm()) / size
        return inputs if unexplained < max(RANK_ONE, 4 * rounding) else None

    def _kind_of(self, inputs: Tensor) -> str:
        """Tell whether the input of a layer is the picture itself."""
        if self.images is None or inputs.numel() != self.images[0].numel():
            return "features"
        error = ((self.images.flatten(1).double() - inputs) ** 2).mean(1).min()
        spread = float(self.images.max() - self.images.min()) or 1.0
        return "pictures" if -10 * math.log10(float(error) / spread**2 + 1e-20) >= self.psnr else "features"

    def _sent(self, role: str) -> Tensor | None:
        sent_name = self.layout.in_message.get(role)
        return self.change.get(sent_name) if sent_name is not None else None

    def _normalisation(self) -> tuple[list[float], list[float]]:
        """Estimate mean and deviation that take the batch into [0, 1]; a server knows the recipe's."""
        if self.images is None or self.images.ndim != 4 or self.images.shape[1] != 3:
            return [0.0] * 3, [1.0] * 3
        low, high = self.images.amin((0, 2, 3)), self.images.amax((0, 2, 3))
        return [-float(a / max(b - a, 1e-6)) for a, b in zip(low, high, strict=True)], [
            1 / max(float(b - a), 1e-6) for a, b in zip(low, high, strict=True)
        ]

    def _shown(self, attack: str, pictures: Tensor) -> Outcome:
        """Count the client's pictures that are near to one of these; all, where the client's were not seen."""
        if self.images is None or self.images.shape[1:] != pictures.shape[1:]:
            return Outcome(attack=attack, of="pictures", came_back=len(pictures), among=max(self.count, len(pictures)))
        private = self.layout.denormalise(self.images.cpu())
        psnr = METRICS["psnr"].function
        best = torch.stack([psnr(picture.expand_as(private), private) for picture in pictures]).amax(0)
        return Outcome(attack=attack, of="pictures", came_back=int((best >= self.psnr).sum()), among=self.count)

    def _not_one_step(self) -> str:
        if self.seen.steps > 1:
            return f"{self.seen.steps} steps are not one gradient"
        if self.update.kind == "delta" and self.seen.optimiser != "SGD":
            return f"a step of {self.seen.optimiser or 'an optimiser that was not seen'} is no gradient"
        if self._batch > MOST:
            return f"{self._batch} pictures are more than the {MOST} that are tried"
        return ""

    def _mean_gradient(self) -> dict[str, Tensor] | Failure:
        """Turn the update into a gradient of the mean loss, by the observed steps and learning rate."""
        if self.update.kind == "gradient":
            return self.change
        if self.seen.optimiser != "SGD":
            return Failure(f"changes by {self.seen.optimiser or 'an optimiser that was not seen'} are no gradients")
        rate = max(self.seen.learning_rates) * self.seen.steps
        if not rate:
            return Failure("a learning rate of zero")
        decay = self.seen.weight_decay
        return {name: -tensor / rate - decay * self.update.weights[name] for name, tensor in self.change.items()}

    def _attacked(
        self, name: str, options: Mapping[str, Any], gradient: dict[str, Tensor] | Failure, threat: ThreatModel
    ) -> Any:
        """Run an attack; return what it disclosed, or the reason why it does not apply."""
        if isinstance(gradient, Failure):
            return gradient
        try:
            upload = self.layout.upload(gradient, examples=self._batch, kind="gradient")
            generator = torch_generator(0, "gate", name)
            return fedmjp.ATTACKS.get(name)(options).run([upload], self.layout, threat, generator=generator)[0]
        except (BadInputError, AttackFailedError) as error:
            return Failure(str(error).removeprefix(f"{name}: "))

    def _right_labels(self, attack: str, labels: Tensor) -> Outcome:
        """Count the client's labels among these; all, where the client's were not seen."""
        private, right, reason = self.seen.labels, len(labels), "all count: the client's own were not seen"
        if private and sum(map(len, private)) == self.seen.rows:
            right, reason = int(METRICS["label_accuracy"].function(labels, torch.cat(private).cpu()).sum()), ""
        return Outcome(attack=attack, of="labels", came_back=right, among=max(right, self._batch), reason=reason)

    def _right_features(self, disclosed: Features) -> int:
        """Count features that are the client's own; where those were not seen, what the attack certifies."""
        private = self.seen.features
        if disclosed.features is None:
            return 0
        if (
            not private
            or sum(map(len, private)) != len(disclosed.features)
            or private[0].shape[1] != disclosed.features.shape[1]
        ):
            return int(disclosed.diagnostics.get("certified_pictures", 0))
        truth = torch.cat(private).double().cpu()
        spread = (truth - truth.mean(0)).norm(dim=1) if len(truth) > 1 else truth.norm(dim=1)
        nearest = torch.cdist(disclosed.features, truth).amin(0)
        return int((nearest <= EXACT_FEATURE * spread).sum())


def _are_two_classes(vector: Tensor) -> bool:
    """Tell whether a bias moved for two classes alone, one against the other: then its layer always has rank one."""
    sizes = vector.double().abs().sort(descending=True).values
    balanced = abs(float(vector.double().sum())) <= TWO_CLASSES * float(sizes.sum())
    return balanced and float(sizes[2:].norm()) <= TWO_CLASSES * float(sizes.norm())


def _alike(batches: list[Tensor]) -> bool:
    return len({batch.shape[1:] for batch in batches}) == 1
