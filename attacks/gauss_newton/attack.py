"""One honest upload, solved by second-order search in what its linear facts leave open."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, repeat

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import picture
from fedmjp.attacks.gauss_newton.certificate import ENOUGH, Certificate, certify
from fedmjp.attacks.gauss_newton.factors import FactoredModel
from fedmjp.attacks.gauss_newton.levenberg import Minimum, StoppingRule, minimise
from fedmjp.attacks.gauss_newton.residuals import Residuals, compared_layers, compared_tensors, slopes_by_picture
from fedmjp.attacks.gauss_newton.residuals import refusal as residuals_refusal
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.attacks.gauss_newton.tokens import by_tokens, states_tokens
from fedmjp.attacks.labels import labels_of, mean_gradient
from fedmjp.attacks.mjp import facts as linear
from fedmjp.attacks.mjp.affine import AffinePatches, of_one_upload
from fedmjp.attacks.mjp.prior import MJP, ClosedFacts
from fedmjp.attacks.reassembly import reassemble
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel

RESTART = 0.5  # standard deviations of the prior by which a further start is moved


class GaussNewtonOptions(Config):
    """Budget of ``gauss_newton``."""

    starts: int = Field(
        3, ge=1, description="searches at most: from a batch's tokens, from the most natural, with noise"
    )
    steps: int = Field(40, ge=1, description="Jacobians of one search at most")
    # Four pictures of 16 patches: beyond it a Jacobian takes minutes of a core and more than a gigabyte. DeiT-S at
    # 224 x 224 under MJP at 0.27 leaves 10,192 open: 30 GB.
    most_unknowns: int = Field(3200, ge=1, description="unknowns at most; memory and time of a Jacobian grow with them")


class GaussNewton(ClosedFacts[VitClassifier]):
    """Of all pictures that agree with the linear facts, the one whose gradients at all depths agree as well.

    The linear facts leave each patch of a single MJP upload open along the span of the M masked patches, and two
    undefended pictures of one upload along the span of their differences (``fedmjp.attacks.mjp.facts``). There the
    gradients
    of the whole network determine the pictures, and well: but the valley that leads to them is long and bent, and
    first-order search stays in it. Levenberg-Marquardt goes through (``levenberg``), in unknowns that the prior of
    pictures has made alike (``space``), on sketches of the gradients of some layers, relative to their size
    (``residuals``). It starts at the picture of ``mjp_prior``, later from there with noise, and ends when rounding
    explains what is left, which with the Jacobian gives a certificate (``certificate``). Of a batch with fewer tokens
    than dimensions it starts at the tokens that the first MLP states one by one (``tokens``), which is near the end.

    An upload states masked patches as a set. They are put into the places where they fit
    (``fedmjp.attacks.reassembly``), and
    no certificate covers that. Pictures of a batch come in the order of their labels.

    Without a mask, and of one picture, the linear facts are everything.
    """

    name = "gauss_newton"
    paper = "ours: Gauss-Newton (Levenberg-Marquardt) within the linear facts"
    summary = "second-order search in what the linear facts leave open of one honest upload, with a certificate"
    requires = (
        "the gradient, or the weight delta of one step, of one picture with or without MJP, or of a few pictures "
        "without, whose patches are no more than the dimensions of a token; an image size that the prior knows"
    )
    exploits = "the gradients of all depths determine what the linear facts leave open"
    options_type = GaussNewtonOptions
    optimises = True

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name the gradients of the embeddings, of linear layers in four blocks, and of the head."""
        return compared_tensors(model)

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Require one step, few enough patches and unknowns, and the prior."""
        if threat.update == "delta" and threat.local_steps > 1:
            return f"compares one gradient, not the sum of {threat.local_steps} steps"
        if threat.batch_size > 1 and model.defended:
            return f"of {threat.batch_size} pictures with masks of their own, no upload tells the masks apart"
        return (
            super().requirement(model, threat)
            or residuals_refusal(model)
            or self._size_refusal(model, threat.batch_size)
        )

    def handles(self, model: VitClassifier, threat: ThreatModel) -> frozenset[Mark]:
        """Account for what MJP does, unless every mask leaves too much open; noise and rounding mislead the attack."""
        del threat
        return MJP if model.defended and self._too_many(model.grid**4) is None else frozenset()

    @override
    def reconstruct(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: torch.Generator
    ) -> Reconstruction:
        facts = linear.linear_facts(upload, model, threat)
        affine = of_one_upload(facts)
        if too_many := self._too_many(upload.num_examples * len(affine.fixed) * len(affine.basis)):
            raise AttackFailedError(f"{self.name}: {too_many}")
        space = OpenSpace.of(affine, model)
        gradients = {name: mean_gradient(upload, name, model, threat) for name in self.tensors(model)}
        labels = labels_of(upload, model, threat)
        residuals = Residuals(
            FactoredModel(model, compared_layers(model), threat.label_smoothing),
            gradients,
            torch.tensor(labels, device=facts.mask.device),
            facts.mask,
            affine.basis,
            generator=generator,
        )
        minima: list[tuple[Minimum, Certificate]] = []
        for start in islice(_starts(gradients, labels, affine, space, model, generator), self.options.starts):
            minimum = self._minimum(residuals, space, start)
            minima.append((minimum, certify(minimum, space, facts, float(model.std.max()))))
            if minima[-1][1].explained:
                break
        minimum, certificate = min(minima, key=lambda made: made[0].cost)
        solved = space.patches(minimum.point)
        if facts.mask.any():
            solved = _in_order(solved[0], facts.mask, model, generator)[None]
        return Reconstruction(
            torch.cat([picture(patches, model) for patches in solved]),
            {
                **certificate.diagnostics(),
                "masked_patches": float(facts.mask.sum()),
                "unknowns": float(len(minimum.point)),
                "starts": float(len(minima)),
                "steps": float(minimum.steps),
            },
        )

    def _minimum(self, residuals: Residuals, space: OpenSpace, start: Tensor) -> Minimum:
        steps = self.options.steps
        return minimise(
            lambda unknowns: residuals(space.patches(unknowns)),
            start,
            steps=steps,
            slopes=lambda unknowns: slopes_by_picture(residuals, space, unknowns),
            ends=StoppingRule(enough=ENOUGH),
            on_step=lambda step, cost: self.on_progress(step, steps, cost),
        )

    def _size_refusal(self, model: VitClassifier, pictures: int) -> str | None:
        """Say why so many pictures leave too much open; None if they do not, or the masks of an upload decide."""
        patches, dimensions = model.grid**2, model.get_parameter(names.POSITION_EMBEDDING).shape[-1]
        if pictures * patches > dimensions:
            return (
                f"{pictures * patches} patches are more than the {dimensions} dimensions of a token: nothing is linear"
            )
        open_directions = (pictures - 1) * patches + int(model.defended)  # at least: of one picture, the mask decides
        return self._too_many(pictures * patches * open_directions)

    def _too_many(self, unknowns: int) -> str | None:
        if unknowns <= self.options.most_unknowns:
            return None
        return f"{unknowns} unknowns are left open, and most_unknowns is {self.options.most_unknowns}"


def _starts(
    gradients: Mapping[str, Tensor],
    labels: Sequence[int],
    affine: AffinePatches,
    space: OpenSpace,
    model: VitClassifier,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Yield unknowns to begin at: a batch's tokens if the upload states them, the most natural picture, noise."""
    if len(labels) > 1 and states_tokens(model, len(labels)):
        patches = by_tokens(gradients, affine, labels, model, generator)
        if patches is not None:
            yield space.unknowns(patches)
    unknowns = len(labels) * space.root.shape[1]
    for deviation in chain([0.0], repeat(RESTART)):
        yield deviation * torch.randn(unknowns, generator=generator, dtype=torch.float64).to(space.root)


def _in_order(patches: Tensor, hole: Tensor, model: VitClassifier, generator: torch.Generator) -> Tensor:
    """Put the patches in the hole into the places where they fit."""
    patch_images = to_patches(picture(patches, model), model.patch_size)[0]
    source = reassemble(patch_images, hole, model.grid, model.patch_size, generator=generator)
    return patches[source.to(patches.device)]
