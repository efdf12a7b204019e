"""The control: the app's own network, the undefended gradient of one known record. Attacks must succeed on it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.benchmarks.audit.evaluating import Private
from fedmjp.benchmarks.audit.network import Network
from fedmjp.errors import BadInputError
from fedmjp.facade import bundled_pictures
from fedmjp.models.layers import training_copy
from fedmjp.models.probing import tensors_of
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel


@dataclass(frozen=True)
class Control:
    """An update of one record that nobody needs to protect, and the record."""

    update: Mapping[str, Tensor]
    threat: ThreatModel
    private: Private


def make_control(
    network: Network, private: Private | None, *, sent: Collection[str] | None = None, number: int = 0
) -> Control:
    """Compute the gradient of one known record: a bundled picture, or values drawn in the range of the app's own.

    Args:
        network: With the weights that the server sent.
        private: The app's own records, which state shape, type and range.
        sent: Names of the tensors that the app sends; None for all.
        number: Which of the bundled pictures, from 0; its label is the next number.

    Raises:
        BadInputError: If there is no such record, or the network does not take it.
    """
    if private is None or not private.entered:
        raise BadInputError("no record was seen entering the network, so none of its kind can be made")
    if private.pictures is not None:
        picture = bundled_pictures(number + 1, size=private.side)[number].image[None]
        if private.pictures.shape[1] == 1:
            picture = picture.mean(dim=1, keepdim=True)
        if picture.shape != private.pictures[:1].shape:
            picture = F.interpolate(picture, size=private.pictures.shape[2:], mode="area")
        channels, view = picture.shape[1], network.seen
        entered = (picture - view.mean[:channels]) / view.std[:channels]
        update, labels = _gradient(network, entered, number + 1, sent)
        return Control(update, ThreatModel(), Private((entered,), picture, labels))
    examples = torch.cat([batch for batch in private.entered if batch.shape[1:] == private.entered[0].shape[1:]])
    if not examples.is_floating_point():
        generator = torch_generator(number, "audit", "control")
        pool = torch.unique(examples)
        entered = pool[torch.randint(0, len(pool), examples[:1].shape, generator=generator)]
        update, labels = _gradient(network, entered, number + 1, sent)
        return Control(update, ThreatModel(), Private((entered,), None, labels))
    low, high = examples.amin(0, keepdim=True), examples.amax(0, keepdim=True)
    uniform = torch.rand(low.shape, generator=torch_generator(number, "audit", "control"))
    spread = torch.where(high > low, high - low, 1.0)
    entered = low + spread * uniform.to(low)
    update, labels = _gradient(network, entered, number + 1, sent)
    return Control(update, ThreatModel(), Private((entered,), None, labels))


def _gradient(
    network: Network, entered: Tensor, label: int, sent: Collection[str] | None
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Compute the gradient of cross-entropy, or of squares where the network gives one number; and the label."""
    shape = " x ".join(map(str, entered.shape[1:]))
    module = network.module if network.whole else training_copy(network.module)
    parameters = {name: value for name, value in module.named_parameters() if value.is_floating_point()}
    for value in parameters.values():
        value.requires_grad_(True)
    try:
        logits = next(iter(tensors_of(module(entered))))
    except Exception as error:  # noqa: BLE001 (somebody else's module)
        raise BadInputError(f"the app's network does not take one known record of {shape} alone: {error}") from None
    labels = None
    try:
        if logits.ndim == 2 and logits.shape[1] > 1:
            labels = torch.tensor([min(label, logits.shape[1] - 1)])
            loss = F.cross_entropy(logits, labels)
        else:
            loss = (logits - 1).square().mean()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    except Exception as error:  # noqa: BLE001 (somebody else's module)
        raise BadInputError(f"no gradient of a known record passes the app's network: {error}") from None
    pairs = zip(parameters, gradients, strict=True)
    return {name: g for name, g in pairs if g is not None and (sent is None or name in sent)}, labels
