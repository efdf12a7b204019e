"""Search for pictures whose update agrees with the one that was uploaded."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import Attack, showing_pictures
from fedmjp.attacks.gradient_search import GradientSearch, GradientSearchResult, OnStep, Searcher, share_used
from fedmjp.attacks.matching_gradients import Comparison
from fedmjp.attacks.matching_loss import ALL, NOISE, TINY, GradientMatchingOptions, Job, Loss, patch_prior
from fedmjp.attacks.natural_patches import prior_refusal
from fedmjp.errors import ConfigError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

LossOf = Callable[[Tensor], Tensor]  # candidates to (candidates,), each its own
Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]
WARM_UPS = 2  # libraries set themselves up in the first
# Mean and standard deviation of the pixels of natural pictures, for a start from noise.
LEVEL, SPREAD = 0.45, 0.225
# What tells a restart from another where both start from the same picture.
RESTART_NOISE = 0.02
# Of a picture's mean slope: where slopes are smaller, Adam's steps are too, and rounding moves nothing.
SMALL = 0.01


class GradientMatching(GradientSearch):
    """A search for the pictures whose gradients are nearest to the uploaded ones.

    The loss is ``distance(gradients) + position_weight * distance(position-embedding gradients)`` plus
    the weighted priors, minimised by Adam within the box [0, 1] (``search``).

    The position embedding has a term of its own, without its mean, for this reason: row t of its gradient is
    the gradient at token t. In a model near its initial weights all rows are nearly the same vector, whatever
    the picture; a token z_t shows in how its row deviates, for the layer norms remove from the row its
    component along z_t. The deviation is a few percent of the gradient, so that a cosine of 0.99 over all of
    it says next to nothing about the picture.

    With ``seconds``, a result depends on the machine's speed and on its neighbours in the stack. Without,
    it does so only through rounding.

    References:
        Geiping et al., "Inverting Gradients - How easy is it to break privacy in federated learning?",
        NeurIPS 2020 (cosine, total variation, box; there Adam is given the signs of slopes, which takes more than
        twice the iterations, and the step size falls in three jumps);
        Lu et al., "APRIL", CVPR 2022 (optimisation variant: the term of the position embedding, uncentred and
        with the class token's row); Hatamizadeh et al., "GradViT", CVPR 2022 (seams between patches).
    """

    name = "gradient_matching"
    paper = "Geiping et al., NeurIPS 2020; Lu et al. (optimisation variant) and Hatamizadeh et al., CVPR 2022"
    summary = "search for pictures with the uploaded gradients, above all those at the tokens"
    requires = "each client's own update; labels that are known, or recovered from the head's bias"
    exploits = "gradients of patch and position embedding, or any others; smoothness of pictures"
    options_type = GradientMatchingOptions

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._first: Attack | None = None
        self.uses_natural_patches = self.options.patch_prior > 0
        if self.options.start == self.name:
            raise ConfigError(f"start = {self.name!r}: must be another attack")
        if self.options.start != NOISE:
            self._first = showing_pictures(ATTACKS.get(self.options.start)())
            if self._first.role == "bound":
                raise ConfigError(f"start = {self.options.start!r}: it is a bound, no attack that a server could make")
            self.uses_natural_patches |= self._first.uses_natural_patches

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name the tensors that are matched, those that state mask and labels, and those of the start."""
        needed = [*super().tensors(model)]
        if self.options.position_weight:
            needed.append(names.POSITION_EMBEDDING)
        if self._first is not None:
            needed.extend(self._first.tensors(model))
        return list(dict.fromkeys(needed))

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse tensors that the model lacks, and what the start or the prior refuses."""
        if refusal := super().requirement(model, threat):
            return refusal
        if self.options.patch_prior and prior_refusal(model):
            return prior_refusal(model)
        first = self._first and self._first.refusal(model, threat)
        return f"its start, {self.options.start}: {first}" if first else None

    def _matched(self, model: VitClassifier) -> list[str]:
        """Name the tensors as the options do; the text 'all' stands for every parameter."""
        parameters = [name for name, _ in model.named_parameters()]
        return list(
            dict.fromkeys(n for option in self.options.tensors for n in (parameters if option == ALL else [option]))
        )

    def _starts(self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: Generator) -> list[Tensor]:
        shape = (upload.num_examples, 3, model.image_size, model.image_size)
        noises = [torch.randn(shape, generator=generator) for _ in range(self.options.restarts)]
        if self._first is None:
            return [(LEVEL + SPREAD * noise).clamp(0, 1) for noise in noises]
        start_generator = torch_generator(generator.initial_seed(), "start")
        first = self._first.run([upload], model, threat, generator=start_generator)[0].images.cpu()
        return [first, *((first + RESTART_NOISE * noise).clamp(0, 1) for noise in noises[1:])]

    def _searcher(self, model: VitClassifier, comparison: Comparison) -> Searcher:
        prior = patch_prior(model) if self.options.patch_prior else None

        def run(jobs: Sequence[Job], seconds: float | None, on_step: OnStep) -> GradientSearchResult:
            return search(
                torch.stack([job.start for job in jobs]),
                Loss(self.options, model, comparison, jobs, prior),
                iterations=self.options.iterations,
                seconds=seconds,
                step_size=self.options.step_size,
                on_step=on_step,
            )

        return run


def search(
    start: Tensor,
    loss: LossOf,
    *,
    iterations: int,
    seconds: float | None = None,
    step_size: float,
    on_step: OnStep,
) -> GradientSearchResult:
    """Minimise by Adam within the box [0, 1].

    The budget is used up after so many iterations, or seconds where that comes first; one iteration is always made.
    Slopes are divided by their mean size, for each candidate: that falls by orders of magnitude, and Adam remembers the
    first. The step size falls to zero along half a cosine over the budget. The result is the iterate of each candidate
    with the lowest loss; the start is the first, so it is never worse than that. A candidate with a loss or gradient
    that is not finite has diverged and is out.

    Args:
        start: (candidates, batch, 3, size, size) in [0, 1].
        loss: A function of candidates; it must not read values off the device.
        iterations: Evaluations of the loss.
        seconds: None for any.
        step_size: The first, in units of the pixels' range.
        on_step: Called after every iteration with their number and the lowest losses so far.
    """
    images = start.clone()
    optimiser = torch.optim.Adam([images], lr=step_size, eps=SMALL)
    best, lowest = images.clone(), torch.full((len(images),), math.inf, device=images.device)
    alive = torch.ones_like(lowest, dtype=torch.bool)
    started, evaluations = time.monotonic(), 0
    evaluate = replayed(loss, images)
    while True:
        values, slopes = evaluate(images)
        finite = torch.isfinite(values) & torch.isfinite(slopes.flatten(1)).all(dim=1)
        alive &= finite
        better = alive & (values < lowest)
        lowest = torch.where(better, values, lowest)
        best = torch.where(_each(better, images), images, best)
        evaluations += 1
        on_step(evaluations, lowest)
        used = share_used(evaluations, iterations, started, seconds)
        if used >= 1 or not bool(alive.any()):
            break
        optimiser.param_groups[0]["lr"] = step_size * (1 + math.cos(math.pi * used)) / 2
        slopes = torch.where(_each(finite, slopes), slopes, 0)
        images.grad = slopes / _each(slopes.abs().flatten(1).mean(dim=1).clamp(min=TINY), slopes)
        optimiser.step()
        images.clamp_(0, 1)
    return GradientSearchResult(best, lowest, evaluations)  # infinite only where no finite loss ever came


def _each(choice: Tensor, images: Tensor) -> Tensor:
    """Reshape (candidates,) to choose between whole candidates."""
    return choice.view(-1, *[1] * (images.ndim - 1))


def slopes_of(loss: LossOf, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of candidates, and the slope of each by its candidate.

    Args:
        loss: A function of candidates, each with a loss of its own.
        images: Candidates.
    """
    leaf = images.detach().requires_grad_()
    with torch.enable_grad():
        values = loss(leaf)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slopes


def replayed(loss: LossOf, like: Tensor) -> Slopes:
    """Return ``slopes_of`` for candidates of the shape and device of ``like``.

    On CUDA it is recorded once, as a graph, which is launched as a whole: to launch its thousands of kernels one by one
    takes longer than they run. Results hold until the next call there.

    Args:
        loss: A function of candidates; it must not read values off the device.
        like: Candidates.
    """
    if like.device.type != "cuda":
        return partial(slopes_of, loss)
    inputs, aside = like.clone(), torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            slopes_of(loss, inputs)
    torch.cuda.current_stream(like.device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = slopes_of(loss, inputs)

    def again(images: Tensor) -> tuple[Tensor, Tensor]:
        inputs.copy_(images)
        graph.replay()
        return outputs

    return again
