"""One honest upload of a batch of a class-token transformer: label and final feature of each picture."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from fedmjp.attacks.base import Attack
from fedmjp.attacks.class_token.block import block_facts, block_refusal, tensors_of_block
from fedmjp.attacks.class_token.factors import CONSISTENT
from fedmjp.attacks.class_token.head import Head, HeadGradient
from fedmjp.attacks.class_token.separate import Separation, separate
from fedmjp.attacks.labels import mean_gradient
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.entrance import Entrance
from fedmjp.records import Features, Upload
from fedmjp.threat import FLOAT32, ThreatModel

EXACT = 1e-3  # of a feature's distance from the batch's mean


class ClassTokenOptions(Config):
    """What is read besides the head."""

    last_block: bool = Field(False, description="also what the last block's gradients state")


class ClassToken(Attack[Entrance, Features]):
    """Solve G = V^T F for the features F that the head reads, one row per picture.

    The head's weight has the gradient G = sum_b v_b f_b^T, a sum of one outer product per picture, and v_b =
    (softmax(W f_b + c) - y_b) / B follows from f_b and its label. G has rank B, so F = A R with R its row space: B x B
    unknowns, and as many equations per picture as there are classes. The bias shows the labels, its sum, and the final
    LayerNorm fixes mean and variance. Solved by Levenberg-Marquardt from several starts, or where pictures are many by
    a fixed point; where the bias leaves labels open, those are taken that leave no misfit.

    ``certified`` is 1 where the misfit is no more than rounding and known noise, and where a misfit of that size
    cannot move any feature by a thousandth of its distance from the batch's mean, to first order.
    Where no labels fit, the loss may have had a factor (clipping, accumulation, a sum in place of a mean, a loss scale,
    a rate of the head's own), weights of classes or labels that were smoothed without telling: these are solved for
    as well, and stand in ``factors`` and ``label_smoothing``.
    ``certified_pictures`` counts pictures of which that holds. A delta of several steps is read as one gradient at the
    mean of the head's weights: an approximation, never certified.

    With ``last_block``, what ``fedmjp.attacks.class_token.block`` says, as ``facts``.
    """

    name = "class_token"
    paper = "used in fedmjp; rank-1 sums of single gradients: Geiping et al., NeurIPS 2020, proposition 3.1"
    summary = "label, final feature, probabilities and loss of each picture of a batch, from the head's gradient"
    requires = "the head's gradient or delta, of a class-token ViT; fewer pictures than classes and than dimensions"
    exploits = "the loss reads one token per picture: the last layers' gradients are sums of one product per picture"
    reveals = "features"
    options_type = ClassTokenOptions
    takes_sums = True
    stack = 1

    def tensors(self, model: Entrance) -> Sequence[str]:
        """Return the names of the head's weight and bias, and with ``last_block`` of that block's weights."""
        return [
            names.HEAD_WEIGHT,
            names.HEAD_BIAS,
            *(tensors_of_block(_network(model)) if self.options.last_block else []),
        ]

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Require a head that reads the normalised class token alone, and fewer pictures than its rows and columns."""
        if refused := _architecture_refusal(model):
            return refused
        classes, dim = model.get_parameter(names.HEAD_WEIGHT).shape
        most = min(classes, dim) - 1
        if threat.pictures > most:
            return (
                f"an upload of {threat.pictures} pictures does not come apart: with {classes} classes and {dim} "
                f"dimensions at most {most} do"
            )
        if not self.options.last_block:
            return None
        if not isinstance(model, VitClassifier):
            return "last_block needs the network, of which the weights alone are known: leave the option out"
        return block_refusal(model)

    def caveat(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Warn that several steps are known by their mean alone."""
        del model
        if threat.update == "gradient" or threat.local_steps == 1:
            return None
        return f"reads the mean of {threat.local_steps} steps' gradients as one gradient: an approximation"

    def handles(self, model: Entrance, threat: ThreatModel) -> frozenset[Mark]:
        """Account for everything done to patches, for sums, which are larger batches, and for noise."""
        del model, threat
        return frozenset({"shuffled", "masked", "summed", "noisy", "rounded"})

    @override
    def reconstruct(self, upload: Upload, model: Entrance, threat: ThreatModel, generator: torch.Generator) -> Features:
        gradients = {name: mean_gradient(upload, name, model, threat) for name in upload.tensors}
        head = _head(model, upload, threat)
        gradient = HeadGradient(
            gradients[names.HEAD_WEIGHT],
            gradients[names.HEAD_BIAS],
            _noise(upload, model, threat),
            upload.num_examples,
            threat.label_smoothing,
            mixed=threat.mixup > 0,
        )
        separation = separate(head, gradient, upload.labels, generator=generator)
        if not bool(torch.isfinite(separation.features).all()):
            raise AttackFailedError(f"{self.name}: the equations of the head have no finite solution")
        certain = _certain(separation) & (threat.update == "gradient" or threat.local_steps == 1)
        logits = separation.features @ head.weight.mT + head.bias
        facts = {
            "probabilities": logits.softmax(1),
            "loss": -(separation.targets * logits.log_softmax(1)).sum(1),
            "targets": separation.targets,
        }
        if self.options.last_block:
            facts |= block_facts(_network(model), gradients, separation.features, separation.slopes)
        diagnostics = {
            "certified": float(certain.all()),
            "certified_pictures": float(certain.sum()),
            "misfit": separation.misfit,
            "noise": separation.noise,
        }
        if separation.factors is not None:
            diagnostics["factor"] = float(separation.factors.mean())
            diagnostics["label_smoothing"] = separation.smoothing
            facts["factors"] = separation.factors
        return Features(separation.labels, separation.features, diagnostics, facts)


def _network(model: Entrance) -> VitClassifier:
    assert isinstance(model, VitClassifier)  # noqa: S101 (else refused)
    return model


def _architecture_refusal(model: Entrance) -> str | None:
    if not isinstance(model, VitClassifier):
        parameters = {name for name, _ in model.named_parameters()}
        needed = {names.HEAD_WEIGHT, names.HEAD_BIAS, names.NORM_WEIGHT, names.NORM_BIAS}
        return (
            None if needed <= parameters else "needs one linear layer with a bias as head, and a LayerNorm right before"
        )
    backbone = model.backbone
    if not getattr(backbone, "num_prefix_tokens", 0):
        return "needs a class token, the model has none: its head reads all patches"
    if backbone.global_pool != "token":
        return f"needs a head that reads the class token alone, the model's pooling is {backbone.global_pool!r}"
    norm, head = backbone.norm, backbone.head
    if not isinstance(norm, nn.LayerNorm) or not isinstance(backbone.fc_norm, nn.Identity):
        return f"needs a LayerNorm right before the head, the model has {type(norm).__name__}"
    if not isinstance(head, nn.Linear) or head.bias is None or hasattr(backbone, "head_dist"):
        return "needs one linear layer with a bias as head"
    return None


def _head(model: Entrance, upload: Upload, threat: ThreatModel) -> Head:
    """Read the last layer in float64; for several steps, at the mean of its weights as if they moved evenly."""
    norm, shift = (model.get_parameter(name).detach().double() for name in (names.NORM_WEIGHT, names.NORM_BIAS))
    part = 0.0 if threat.update == "gradient" else (threat.local_steps - 1) / (2 * threat.local_steps)
    weight, bias = (
        model.get_parameter(name).detach().double() + part * upload.tensors[name].to(model.mean.device, torch.float64)
        for name in (names.HEAD_WEIGHT, names.HEAD_BIAS)
    )
    return Head(weight, bias, norm, shift)


def _noise(upload: Upload, model: Entrance, threat: ThreatModel) -> Tensor:
    """Return (classes,) the norm of rounding and noise on a row of the head's gradient, of deltas as gradients."""
    scale = 1.0 if threat.update == "gradient" else threat.gradients_in_delta * threat.local_learning_rate
    squares = torch.zeros((), dtype=torch.float64)
    for name in (names.HEAD_WEIGHT, names.HEAD_BIAS):
        sent = upload.tensors[name].double().cpu()
        square = threat.rounding**2 * sent.square() + threat.noise_on(upload.tensors[name]) ** 2
        if threat.update == "delta":  # a difference of weights that are rounded themselves
            square = square + FLOAT32**2 * model.get_parameter(name).detach().double().cpu().square()
        # The bias is taken for a column of a feature as large as a picture's.
        dim = model.get_parameter(names.HEAD_WEIGHT).shape[1]
        squares = squares + (square.sum(1) if name == names.HEAD_WEIGHT else dim * square)
    return squares.sqrt().to(model.mean.device) / scale


def _certain(separation: Separation) -> Tensor:
    """Tell (pictures,) whose features residuals alone show to be right."""
    spread = separation.features - separation.features.mean(0) if len(separation.features) > 1 else separation.features
    certain: Tensor = (separation.errors <= EXACT * spread.norm(dim=1)) & (
        separation.misfit <= CONSISTENT * separation.noise
    )
    return certain
