"""The local computation of a client: from its pictures to an update, before anything leaves it."""

from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedmjp.arithmetic import computing, rounded
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.randomness import Randomness
from fedmjp.threat import ThreatModel

PICTURES_PER_PASS = 32


def local_update(
    model: VitClassifier, batch: PrivateBatch, threat: ThreatModel, *, randomness: Randomness | None = None
) -> dict[str, Tensor]:
    """Compute the gradient or the weight delta that the protocol asks for, before it is protected.

    Args:
        model: With the weights that the server sent; it stays as it is.
        batch: The private pictures.
        threat: States the step, and the defences, of which some act inside of the steps.
        randomness: Source of what these draw.
    """
    with computing(threat.arithmetic, model.mean.device, repeats=True):
        return _update(_Gradients(model, batch, threat, randomness), model, threat)


def _update(gradients: "_Gradients", model: VitClassifier, threat: ThreatModel) -> dict[str, Tensor]:
    initial = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if threat.update == "gradient":
        return gradients.at(initial, 0)
    if threat.local_optimiser == "adamw":
        return _after_adamw(gradients, initial, threat)
    weights, velocity = initial, dict[str, Tensor]()
    for step in range(threat.local_steps):
        step_gradient = gradients.at(weights, step)
        if threat.local_weight_decay:
            step_gradient = {n: g + threat.local_weight_decay * weights[n] for n, g in step_gradient.items()}
        if threat.local_momentum and velocity:
            step_gradient = {name: threat.local_momentum * velocity[name] + g for name, g in step_gradient.items()}
        velocity = step_gradient
        weights = {
            name: weight - threat.local_learning_rate * step_gradient[name] if name in step_gradient else weight
            for name, weight in weights.items()
        }
    return {name: weight - initial[name] for name, weight in weights.items()}


def _after_adamw(gradients: "_Gradients", initial: Mapping[str, Tensor], threat: ThreatModel) -> dict[str, Tensor]:
    """Compute the weight delta of torch's own AdamW, whose state is new."""
    weights = {name: weight.clone() for name, weight in initial.items()}
    optimiser = torch.optim.AdamW(
        weights.values(), lr=threat.local_learning_rate, weight_decay=threat.local_weight_decay
    )
    for step in range(threat.local_steps):
        for name, step_gradient in gradients.at(weights, step).items():
            weights[name].grad = step_gradient
        optimiser.step()
    return {name: weight.detach() - initial[name] for name, weight in weights.items()}


def gradient(model: VitClassifier, batch: PrivateBatch) -> dict[str, Tensor]:
    """Compute the gradient of the mean cross-entropy over the batch (FedSGD), without any defence of updates.

    The pictures are those that ``batch.gradient_of`` names. A defended model also gets the mask, so that masked
    patches use the unknown embedding; on clean pictures this is "mask without shuffle".

    Args:
        model: With the weights that the server sent.
        batch: The private pictures.
    """
    return local_update(model, batch, ThreatModel())


def delta(model: VitClassifier, batch: PrivateBatch, *, steps: int, learning_rate: float) -> dict[str, Tensor]:
    """Compute the change of weights by steps of plain SGD on the whole batch (FedAvg), without defences of updates.

    The steps are taken in the weights' precision, so a small learning rate loses digits of the gradient to rounding,
    as it does on a real client.

    Args:
        model: With the weights that the server sent.
        batch: The private pictures.
        steps: How many, from 1.
        learning_rate: Of the steps.
    """
    return local_update(model, batch, ThreatModel(update="delta", local_steps=steps, local_learning_rate=learning_rate))


class _Gradients:
    """Gradients of a batch at any weights, by a client with its defences; withheld tensors are frozen."""

    def __init__(
        self, model: VitClassifier, batch: PrivateBatch, threat: ThreatModel, randomness: Randomness | None
    ) -> None:
        self._model, self._pipeline, self._randomness = model, threat.pipeline, randomness
        self._step_size = threat.local_batch_size or len(batch.labels)
        self._label_smoothing, self._arithmetic = threat.label_smoothing, threat.arithmetic
        device = model.mean.device
        self._images = batch.version(batch.gradient_of).to(device)
        self._mask = batch.mask.to(device) if model.defended else None
        self._targets = batch.targets.to(device)
        self._frozen: Collection[str] = self._pipeline.withheld(model)

    def at(self, weights: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Compute the gradient of a step.

        Args:
            weights: By name.
            step: From 0; it says which pictures are shown, and what defences draw.
        """
        first = step * self._step_size % len(self._targets)
        last = first + self._step_size
        if not self._pipeline.by_example:
            return self._mean_of_passes(weights, first, last)
        single = [self._mean(weights, slice(place, place + 1)) for place in range(first, last)]
        if self._randomness is None:
            raise ValueError("defences of single pictures draw noise, and there is no source of randomness")
        return self._pipeline.combine(single, randomness=self._randomness.of("step", step))

    def _mean_of_passes(self, weights: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Average over pictures, a few at a time where they are many: memory does not grow with their number."""
        starts = range(first, last, PICTURES_PER_PASS)
        if len(starts) == 1:
            return self._mean(weights, slice(first, last))
        mean: dict[str, Tensor] = {}
        for start in starts:
            which = slice(start, min(start + PICTURES_PER_PASS, last))
            share = (which.stop - which.start) / (last - first)
            for name, part in self._mean(weights, which).items():
                mean[name] = mean[name] + share * part if name in mean else share * part
        return mean

    def _mean(self, weights: dict[str, Tensor], which: slice) -> dict[str, Tensor]:
        leaves = {name: weight.clone().requires_grad_(name not in self._frozen) for name, weight in weights.items()}
        learnt = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        mask = None if self._mask is None else self._mask[which]
        with torch.enable_grad():
            with rounded(self._arithmetic, self._images.device):
                logits = functional_call(self._model, leaves, (self._images[which], mask))
                loss = F.cross_entropy(logits, self._targets[which], label_smoothing=self._label_smoothing)
            # A localisation regressor has no part in it.
            gradients = torch.autograd.grad(loss, list(learnt.values()), materialize_grads=True)
        return dict(zip(learnt, gradients, strict=True))
