"""GradViT's search as the official code of MJP runs it: all gradients, batch-norm statistics, seams and smoothness."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from pydantic import Field
from torch import Generator, Tensor

from fedmjp.attacks.batch_norm_prior import batch_norm_prior, file_refusal
from fedmjp.attacks.gradient_search import GradientSearch, GradientSearchResult, OnStep, Searcher, share_used
from fedmjp.attacks.matching_gradients import Candidates, Comparison
from fedmjp.attacks.matching_loss import Job, SearchOptions, patch_seams
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

HALF = 0.5  # of the budget; after it gradients count half, and batch-norm statistics begin to count


class GradVitOptions(SearchOptions):
    """Weights of the terms, the ResNet-50 whose statistics are compared, and budget."""

    gradient_weight: float = Field(
        4e-3, ge=0, allow_inf_nan=False, description="of the gradients' distance, half of it in the second half"
    )
    batch_norm: str | None = Field(
        None, description="file of a ResNet-50's weights, such as MoCo-v2's; without it this term is left out"
    )
    batch_norm_sha256: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="of that file, which has to be named so that rows say which it was"
    )
    batch_norm_weight: float = Field(
        0.2, ge=0, allow_inf_nan=False, description="of the distance from its batch-norm statistics, in the second half"
    )
    seams: float = Field(1e-4, ge=0, allow_inf_nan=False, description="weight of jumps where patches meet")
    smoothness: float = Field(
        1e-4, ge=0, allow_inf_nan=False, description="weight of squared total variation plus the picture's L2 norm"
    )
    iterations: int = Field(120_000, ge=1, description="evaluations of the gradient per restart")
    step_size: float = Field(0.1, gt=0, le=1, description="of Adam at first, in standard deviations of the input")


class GradVit(GradientSearch):
    r"""Adam from uniform noise on gradients, batch-norm statistics, seams between patches and smoothness.

    With x a candidate batch as the network reads it (normalised), g its gradients and G the uploaded ones, the loss is

    .. math:: a_G \sum_l \mathrm{mean}(g_l - G_l)^2 + a_I R_{BN}(x) + 10^{-4} R_{seams}(x) + 10^{-4} (TV(x) + |x|)

    with :math:`a_G` 0.004 and :math:`a_I` 0 in the first half of the steps, 0.002 and 0.2 in the second. The step size
    falls from 0.1 along half a cosine. There is no box; the last iterate is clipped to [0, 1] and is the result.

    Where this differs from the official code (yhlleo/MJP, ``gradvit/``):

    - Labels are those that the server was told, or reads off the head's bias. There the loss of a candidate is weighed
      by the client's raw logits, which no upload states, and the client's own gradient is not computed with them.
    - The upload is what the scenario says. There the client's gradient is of a shuffled picture run without the unknown
      embedding, so that the defence that it measures is ``jigsaw``; the candidate never has a mask, and here
      ``mask=ignore`` does that.
    - Seams are of the picture's own patches. There they are of its random projection to 768 numbers, drawn anew each
      step and read as patches.
    - The ResNet-50 is in evaluation mode, so that its statistics stay those of its training.

    Without ``batch_norm`` rows are named as "gradvit without its batch-norm prior".

    References:
        Hatamizadeh et al., "GradViT: Gradient Inversion of Vision Transformers", CVPR 2022 (there norms of the
        gradients' differences, no means of squares); Ren et al., "Masked Jigsaw Puzzle", CVPR 2023 (official code).
    """

    name = "gradvit"
    paper = "Hatamizadeh et al., GradViT, CVPR 2022, with the settings of MJP's official code (Ren et al., CVPR 2023)"
    summary = "GradViT as MJP's code sets it: all gradients, smoothness, seams; batch norm where weights are given"
    requires = "each client's own update; labels that are known, or recovered from the head's bias"
    exploits = "all gradients; smoothness of pictures; statistics that a ResNet-50 keeps of natural ones"
    options_type = GradVitOptions

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse a file of weights that is missing or another than the options name."""
        if self.options.batch_norm is not None:
            refusal = file_refusal(self.options.batch_norm, self.options.batch_norm_sha256)
            if refusal:
                return refusal
        return super().requirement(model, threat)

    def caveat(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Name a missing batch-norm prior, and what holds of every search."""
        alone = "gradvit without its batch-norm prior: no weights were given (batch_norm=FILE)"
        remarks = [None if self.options.batch_norm else alone, super().caveat(model, threat)]
        return "; ".join(remark for remark in remarks if remark) or None

    def _matched(self, model: VitClassifier) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    def _starts(self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: Generator) -> list[Tensor]:
        del threat
        shape = (upload.num_examples, 3, model.image_size, model.image_size)
        return [torch.rand(shape, generator=generator) for _ in range(self.options.restarts)]

    def _searcher(self, model: VitClassifier, comparison: Comparison) -> Searcher:
        file, sha256 = self.options.batch_norm, self.options.batch_norm_sha256
        prior = batch_norm_prior(file, sha256, model.mean.device) if file else None

        def run(jobs: Sequence[Job], seconds: float | None, on_step: OnStep) -> GradientSearchResult:
            inputs, losses, evaluations = descend(
                torch.stack([job.start for job in jobs]),
                GradVitLoss(self.options, model, comparison, jobs, prior),
                iterations=self.options.iterations,
                seconds=seconds,
                step_size=self.options.step_size,
                on_step=on_step,
            )
            return GradientSearchResult(model.denormalise(inputs), losses, evaluations)

        return run


class GradVitLoss:
    """The loss of the candidates of some jobs, one candidate for each.

    Args:
        options: Weights of the terms.
        model: States sizes and normalisation.
        comparison: Computes candidates' gradients.
        jobs: Their targets, labels and masks.
        prior: Takes pictures in [0, 1]; None without one.
    """

    def __init__(
        self,
        options: GradVitOptions,
        model: VitClassifier,
        comparison: Comparison,
        jobs: Sequence[Job],
        prior: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._options, self._model, self._comparison, self._prior = options, model, comparison, prior
        self._labels = torch.stack([job.labels for job in jobs])
        self._norms = torch.stack([job.norm for job in jobs])
        masks = [job.mask for job in jobs if job.mask is not None]
        self._mask = torch.stack(masks) if masks else None
        self._targets = {name: torch.stack([job.targets[name] for job in jobs]) for name in jobs[0].targets}
        self._squares, self._sizes = _sizes(self._targets)

    def __call__(self, inputs: Tensor, used: float) -> Tensor:
        """Compute the loss of normalised candidates at this used share of the budget, (candidates,)."""
        images = inputs * self._model.std + self._model.mean
        late = used > HALF
        weight = self._options.gradient_weight / 2 if late else self._options.gradient_weight
        total = weight * self.distance(images)
        if self._options.seams:
            total = total + self._options.seams * seams(inputs, self._model.patch_size)
        if self._options.smoothness:
            total = total + self._options.smoothness * smoothness(inputs)
        if late and self._prior is not None:
            total = total + self._options.batch_norm_weight * self._prior(images)
        return total

    def distance(self, images: Tensor) -> Tensor:
        """Sum the mean squared differences of all gradients, (candidates,).

        Args:
            images: (candidates, batch, 3, size, size) in [0, 1].
        """
        agreement = self._comparison.agreement(Candidates(images, self._labels, self._mask), self._targets)
        # The targets were divided by their norm, the candidates' gradients multiplied with a scale.
        ratio = (1 / (agreement.scale.double() * self._norms))[:, None]
        products, squares = agreement.products.double(), agreement.squares.double()
        of_each = (ratio.square() * squares - 2 * ratio * products + self._squares) / self._sizes
        return (self._norms.square() * of_each.sum(dim=1)).float()


def seams(inputs: Tensor, patch_size: int) -> Tensor:
    """Sum the mean squared jumps over the lines between rows and between columns of patches, (candidates,).

    Args:
        inputs: (candidates, batch, 3, size, size), normalised.
        patch_size: Pixels per side of a patch.
    """
    return (inputs.shape[-1] // patch_size - 1) * patch_seams(inputs, patch_size)


def smoothness(inputs: Tensor) -> Tensor:
    """Add twice the mean squared differences of neighbouring pixels, down plus across, to the L2 norm, (candidates,).

    Args:
        inputs: (candidates, batch, 3, size, size), normalised.
    """
    down = inputs.diff(dim=-2).square().flatten(1).mean(dim=1)
    across = inputs.diff(dim=-1).square().flatten(1).mean(dim=1)
    smooth: Tensor = 2 * (down + across) + inputs.flatten(1).norm(dim=1)
    return smooth


def descend(
    start: Tensor,
    loss: Callable[[Tensor, float], Tensor],
    *,
    iterations: int,
    seconds: float | None = None,
    step_size: float,
    on_step: OnStep,
) -> tuple[Tensor, Tensor, int]:
    """Minimise by Adam, whose step size falls to zero along half a cosine.

    Args:
        start: (candidates, ...).
        loss: Candidates and the used share of the budget to (candidates,); each depends on its own candidate only.
        iterations: Evaluations of the loss.
        seconds: None for any; where they are over first, they end the search. One evaluation is always made.
        step_size: The first.
        on_step: Called after every evaluation with their number and the losses.

    Returns:
        The last iterates, their losses (infinite for one that diverged), and the number of evaluations.
    """
    inputs = start.clone()
    optimiser = torch.optim.Adam([inputs], lr=step_size)
    started, evaluations = time.monotonic(), 0
    while True:
        used = share_used(evaluations, iterations, started, seconds)
        leaf = inputs.detach().requires_grad_()
        with torch.enable_grad():
            values = loss(leaf, used)
            (inputs.grad,) = torch.autograd.grad(values.sum(), leaf)
        losses = torch.where(torch.isfinite(values), values, math.inf).detach()
        evaluations += 1
        on_step(evaluations, losses)
        if share_used(evaluations, iterations, started, seconds) >= 1 or not bool(torch.isfinite(losses).any()):
            return inputs, losses, evaluations
        optimiser.param_groups[0]["lr"] = step_size * (1 + math.cos(math.pi * used)) / 2
        optimiser.step()


def _sizes(targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return squared norms (candidates, tensors) and numbers of entries (tensors,) of the targets, in their order."""
    squares = [target.double().square().flatten(1).sum(dim=1) for target in targets.values()]
    sizes = [target[0].numel() for target in targets.values()]
    stacked = torch.stack(squares, dim=1)
    return stacked, torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)
