"""All pixels at once, by second-order search on the gradients behind the embeddings."""

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, picture
from fedmjp.attacks.first_block.certificate import EMBEDDINGS
from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.attacks.gauss_newton.factors import FactoredModel
from fedmjp.attacks.gauss_newton.levenberg import Minimum, StoppingRule, minimise
from fedmjp.attacks.gauss_newton.residuals import Residuals, compared_layers, compared_tensors, slopes_by_picture
from fedmjp.attacks.gauss_newton.residuals import refusal as residuals_refusal
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.attacks.labels import labels_of, mean_gradient
from fedmjp.attacks.linear_systems import NEGLIGIBLE
from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.natural_patches import prior_refusal
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

COMPUTED = 15 * 2.0**-24  # relative distance that float32 arithmetic leaves between two gradients of one picture
# Mean square in units of the noise that is told, above which another start is tried. Of seven pictures it was at most
# 2.6 where one was found, and at least 100,000 elsewhere.
LIKELY = 9.0
RESTART = 0.5  # standard deviations of the prior by which a further start is moved


class BodyNewtonOptions(Config):
    """Budget of ``body_newton``."""

    starts: int = Field(1, ge=1, description="searches at most: the most natural picture first, then with noise")
    steps: int = Field(45, ge=1, description="Jacobians of one search at most")
    most_unknowns: int = Field(3200, ge=1, description="unknowns at most; memory and time of a Jacobian grow with them")


class BodyNewton(Attack[VitClassifier]):
    """Search for the picture whose gradients at all depths are those uploaded, whatever was withheld of embeddings.

    ``first_mlp`` solves each token by itself, which rounding and noise prevent. Here all pixels are searched at once,
    by Levenberg-Marquardt on sketches of the gradients of some layers (``fedmjp.attacks.gauss_newton``), each divided
    by what
    the told noise and rounding, or float32's arithmetic, make of it. The unknowns are the directions of a patch that
    its token shows, made alike by the prior of pictures, which weighs as much as it says: the end is the most likely
    picture. The network takes tokens as a set, so that each is then put where its patch is most natural, and what
    no token shows, the prior fills.

    Pictures of a batch come in the order of their labels. ``residual`` is in units of the noise that is told: about 1
    where the picture explains the upload.
    """

    name = "body_newton"
    paper = "ours: Gauss-Newton (Levenberg-Marquardt) on all pixels at once, with a prior of pictures"
    summary = "second-order search over all pixels, on rounded or noisy gradients behind the embeddings alone"
    requires = (
        "the gradient, or the weight delta of one step, of everything behind the tokens, of one small picture or a few "
        "without MJP: patches times the values that a token shows at most ``most_unknowns``; an image size that the "
        "prior knows"
    )
    exploits = "the gradients of all depths determine the picture, without those of the embeddings"
    options_type = BodyNewtonOptions
    stack = 1
    optimises = True
    uses_natural_patches = True

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Return the names of the gradients of the linear layers of four blocks and the head."""
        return [name for name in compared_tensors(model) if name not in EMBEDDINGS]

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Require one step, no masks, few unknowns, and the prior."""
        if threat.update == "delta" and threat.local_steps > 1:
            return f"compares one gradient, not the sum of {threat.local_steps} steps"
        if model.defended:
            return "needs a model without MJP: only the embeddings' gradients tell its masks"
        if refusal := residuals_refusal(model) or prior_refusal(model):
            return refusal
        dimensions, values = model.get_parameter(names.PATCH_WEIGHT).flatten(1).shape
        unknowns = threat.batch_size * model.grid**2 * min(dimensions - 1, values)
        if unknowns > self.options.most_unknowns:
            return f"{unknowns} unknowns are to be found, and most_unknowns is {self.options.most_unknowns}"
        return None

    def handles(self, model: VitClassifier, threat: ThreatModel) -> frozenset[Mark]:
        """Account for the noise and rounding that the server is told of."""
        del model, threat
        return frozenset({"noisy", "rounded"})

    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        embedding = TokenEmbedding.of(model)
        directions, mean = shown_directions(embedding), embedding.prior.mean
        hidden = (mean - mean @ directions.mT @ directions).expand(model.grid**2, -1)
        space = OpenSpace.of(AffinePatches(hidden, directions), model)
        targets = {name: mean_gradient(upload, name, model, threat) for name in self.tensors(model)}
        residuals = Residuals(
            FactoredModel(model, compared_layers(model), threat.label_smoothing),
            targets,
            torch.tensor(labels_of(upload, model, threat), device=directions.device),
            torch.zeros(model.grid**2, dtype=torch.bool, device=directions.device),
            directions,
            generator=generator,
            levels={name: _noise(target, threat) for name, target in targets.items()},
        )
        unknowns = upload.num_examples * space.root.shape[1]
        minima: list[Minimum] = []
        while len(minima) < self.options.starts and not (minima and minima[-1].cost <= LIKELY):
            noise = torch.randn(unknowns, generator=generator, dtype=torch.float64).to(space.root)
            minima.append(self._minimum(residuals, space, (RESTART if minima else 0.0) * noise))
        minimum = min(minima, key=lambda made: made.cost)
        return Reconstruction(
            torch.cat([_in_order(patches, embedding, model) for patches in space.patches(minimum.point)]),
            {
                "residual": math.sqrt(minimum.cost),
                "unknowns": float(unknowns),
                "starts": float(len(minima)),
                "steps": float(minimum.steps),
            },
        )

    def _minimum(self, residuals: Residuals, space: OpenSpace, start: Tensor) -> Minimum:
        """Find the most likely picture near a start: residuals in units of noise, and unknowns, which have variance 1.

        The residuals are many, and their squares are averaged. The unknowns count as much as one residual each.
        """
        steps, weight = self.options.steps, 1 / math.sqrt(len(residuals(space.patches(start))))

        def errors(unknowns: Tensor) -> Tensor:
            return torch.cat([residuals(space.patches(unknowns)), weight * unknowns])

        def slopes(unknowns: Tensor) -> Tensor:
            by_residuals = slopes_by_picture(residuals, space, unknowns)
            return torch.cat([by_residuals, weight * torch.eye(len(unknowns)).to(by_residuals)], dim=1)

        return minimise(
            errors,
            start,
            steps=steps,
            slopes=slopes,
            ends=StoppingRule(enough=1.0),
            on_step=lambda step, cost: self.on_progress(step, steps, cost),
        )


def shown_directions(embedding: TokenEmbedding) -> Tensor:
    """Return the directions of a patch that its token shows behind a LayerNorm: (rank, values), orthonormal."""
    _, singular, right = torch.linalg.svd(embedding.weight)
    directions: Tensor = right[: int((singular > NEGLIGIBLE * singular[0]).sum())]
    return directions


def _in_order(patches: Tensor, embedding: TokenEmbedding, model: VitClassifier) -> Tensor:
    """Put patches (patches, values), which the network takes as a set, into a picture (1, 3, size, size)."""
    tokens = patches @ embedding.weight.mT + embedding.shift + embedding.positions
    return picture(embedding.patches(tokens, embedding.by_prior(tokens, model), model), model)


def _noise(target: Tensor, threat: ThreatModel) -> float:
    """Return the relative distance that noise, rounding and arithmetic are expected to make of an uploaded gradient."""
    rounded = max(COMPUTED, threat.rounding / math.sqrt(3))
    length = float(target.norm().clamp(min=torch.finfo(target.dtype).tiny))
    return math.hypot(rounded, threat.noise_on(target) * math.sqrt(target.numel()) / length)
