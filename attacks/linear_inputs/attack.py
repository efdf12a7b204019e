"""Records of any network by its first linear layer: exact inputs of one record, and of batches in front of a ReLU."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack
from fedmjp.attacks.labels import labels_of, mean_gradient
from fedmjp.attacks.linear_inputs.separate import LayerGradient, LayerInputs, separate
from fedmjp.config import Config
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models import names
from fedmjp.models.classifier import Classifier
from fedmjp.models.entrance import Entrance
from fedmjp.models.layers import LayeredNetwork, LinearLayer
from fedmjp.records import Features, Upload
from fedmjp.threat import ThreatModel

UNKNOWN_LABEL = -1


class LinearInputsOptions(Config):
    """How long a batch is searched for."""

    samples: int = Field(100_000, gt=0, description="submatrices that are drawn at most, to separate a batch")


class LinearInputs(Attack[Entrance, Features]):
    """Read what the first linear layer with a bias read of each record (``fedmjp.attacks.linear_inputs.separate``).

    It applies to every torch module that has such a layer: an MLP or a tabular network, whose records these inputs are;
    a CNN, whose features they are; a frozen body, of which only the head is sent. ``certified_pictures`` counts records
    whose rows the gradient itself confirms, and ``facts["certified"]`` says which; rows that were not found are zero.

    A batch needs a ReLU behind the layer. Up to 12 records come apart within seconds where the layer has 120 neurons
    (measured, README of attacks). Neurons that one record alone activates single out records of larger batches.
    Labels are those that the head's bias shows where our own names say which it is, else -1.
    """

    name = "linear_inputs"
    paper = "Geiping et al., NeurIPS 2020 (one record); Dimitrov et al., SPEAR, NeurIPS 2024 (batches)"
    summary = "the first linear layer's exact input of each record, in any network: rows of a table, features of a CNN"
    requires = "weight and bias of a linear layer that reads one row per record; for batches a ReLU behind it"
    exploits = "a linear layer's gradient is a sum of one outer product per record, and ReLU leaves zeros in its factor"
    reveals = "features"
    options_type = LinearInputsOptions
    any_steps = True
    stack = 1

    def tensors(self, model: Entrance) -> Sequence[str]:
        """Name weight and bias of the layer, and the head's bias where our names tell it."""
        layer = first_layer(model)
        head = [names.HEAD_BIAS] if names.HEAD_BIAS in dict(model.named_parameters()) else []
        return list(dict.fromkeys([*((layer.weight, layer.bias) if layer else ()), *head]))

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Require a layer with a bias that reads one row per record; for batches also a ReLU and more neurons."""
        network = layered(model)
        if network is None:
            return "needs the network itself, of which the weights or the entrance alone are known"
        if network.problem:
            return network.problem
        if network.layer is None:
            reads = ", ".join(layer.module for layer in network.layers)
            lacking = f"of {reads} weight and bias are not both sent" if reads else "the network has none"
            return f"needs a linear layer with a bias that reads one row per record: {lacking}"
        return layer_refusal(network.layer, threat)

    def caveat(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Warn that several steps are known by their sum alone."""
        layer = first_layer(model)
        if threat.update == "gradient" or threat.local_steps == 1 or layer is None or layer.reads_record:
            return None
        return f"reads {threat.local_steps} steps as one, though the inputs of {layer.module} change between them"

    @override
    def reconstruct(self, upload: Upload, model: Entrance, threat: ThreatModel, generator: torch.Generator) -> Features:
        layer = first_layer(model)
        assert layer is not None  # noqa: S101 (else refused)
        inputs = read_inputs(upload, model, threat, layer, samples=self.options.samples, generator=generator)
        count = names.HEAD_BIAS in upload.tensors
        labels = labels_of(upload, model, threat) if count else (UNKNOWN_LABEL,) * upload.num_examples
        diagnostics = {
            "certified": float(inputs.certified.all()),
            "certified_pictures": float(inputs.certified.sum()),
            "misfit": inputs.misfit,
            "rank": float(inputs.rank),
        }
        return Features(
            torch.tensor(labels), inputs.rows, diagnostics, {"certified": inputs.certified}, layer=layer.module
        )


def layered(model: Entrance) -> LayeredNetwork | None:
    """See a model as a network of layers; None where only its weights or its entrance are known.

    Args:
        model: The model that the server had sent.
    """
    return (
        LayeredNetwork.of(model)
        if isinstance(model, Classifier)
        else model
        if isinstance(model, LayeredNetwork)
        else None
    )


def first_layer(model: Entrance) -> LinearLayer | None:
    """Return the first linear layer that reads one row per record and is sent with its bias; None without one.

    Args:
        model: The model that the server had sent.
    """
    network = layered(model)
    return None if network is None else network.layer


def layer_refusal(layer: LinearLayer, threat: ThreatModel) -> str | None:
    """Say why a layer's inputs cannot be separated; None if they may be.

    Args:
        layer: That is read.
        threat: States the records behind an upload.
    """
    records = threat.pictures
    if records == 1:
        return None
    if not layer.rectified:
        return (
            f"{layer.module} has no ReLU behind it: its gradient is a sum over {records} records that nothing separates"
        )
    if records > layer.outputs:
        return (
            f"{layer.module} has {layer.outputs} neurons: its gradient has at most that rank, and {records} records do "
            "not come apart"
        )
    return None


def read_inputs(
    upload: Upload,
    model: Entrance,
    threat: ThreatModel,
    layer: LinearLayer,
    *,
    samples: int,
    generator: torch.Generator,
) -> LayerInputs:
    """Separate what a layer read of each record.

    Args:
        upload: A gradient, or a delta of SGD's steps.
        model: The model that the server had sent.
        threat: States the recipe of a delta.
        layer: Whose inputs are read.
        samples: Submatrices that are drawn at most.
        generator: Draws them.

    Raises:
        AttackNotApplicableError: If the layer's gradient is zero.
    """
    weight, bias = (mean_gradient(upload, name, model, threat) for name in (layer.weight, layer.bias))
    if not bool(bias.any()):
        raise AttackNotApplicableError(f"the bias of {layer.module} did not move: its inputs cannot be told")
    values: tuple[Tensor, Tensor] = (
        model.get_parameter(layer.weight).detach().double().flatten(1),
        model.get_parameter(layer.bias).detach().double(),
    )
    noise = _rounding(values[0], threat) if upload.kind == "delta" else 0.0
    gradient = LayerGradient(weight.flatten(1), bias, *values, noise=noise)
    return separate(gradient, upload.num_examples, samples=samples, generator=generator)


def _rounding(weight: Tensor, threat: ThreatModel) -> float:
    """Compute the standard deviation that rounding to float32 leaves in a gradient taken from a change of weights."""
    sizes = weight.abs().float()
    units = torch.nextafter(sizes, torch.full_like(sizes, torch.inf)) - sizes
    deviation = (threat.local_steps * units.double().square().mean() / 12).sqrt()  # uniform, half a unit to each side
    return float(deviation) / abs(threat.gradients_in_delta * threat.local_learning_rate)
