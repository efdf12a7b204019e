"""Search for pictures whose update agrees with the one that was uploaded."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from attacks import ATTACKS
from attacks.base import Attack, showing_pictures
from attacks.labels import labels_of, mean_gradient
from attacks.mask import mask_refusal, read_mask
from attacks.matching_gradients import Comparison, PerCandidateGradients, SimulatedSteps, unmatchable
from attacks.matching_loss import ALL, NOISE, GradientMatchingOptions, Job, Loss, patch_prior
from attacks.natural_patches import prior_refusal
from attacks.token_gradients import positions_refusal
from fedmjp.arithmetic import computing
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, ConfigError, suggestion
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

# Mean and standard deviation of the pixels of natural pictures, for a start from noise.
LEVEL, SPREAD = 0.45, 0.225
# What tells a restart from another where both start from the same picture.
RESTART_NOISE = 0.02


class GradientMatching(Attack):
    """Minimise the distance between a candidate's gradients and the uploaded ones.

    The loss is ``distance(gradients) + position_weight * distance(position-embedding gradients)`` plus
    the weighted priors, minimised by Adam on the sign of its gradient within the box [0, 1] (``search``).

    Why the position embedding has a term of its own, and why the mean is taken away: row t of its
    gradient is the gradient at token t. In a model near its initial weights all rows are nearly the same
    vector, whatever the picture; a token z_t shows in how its row deviates, for the layer norms remove
    from the row its component along z_t. The deviation is a few percent of the gradient, so that a cosine
    of 0.99 over all of it says next to nothing about the picture.

    A delta of one step is a gradient; of several, the steps are simulated and differentiated
    through. Of a batch, candidate i is given label i of the sorted labels; a reconstruction is
    unordered in any case.

    On an MJP upload of one picture the mask is read, and the candidate is run with it. The picture that is
    searched is then the shuffled one. Masks of a batch cannot be told apart, and some defences hide the mask
    for good: candidates are then run without.

    With ``seconds``, a result depends on the machine's speed and on its neighbours in the stack. Without,
    it does so only through rounding, which the sign of a gradient near zero can make visible.

    References:
        Geiping et al., "Inverting Gradients - How easy is it to break privacy in federated learning?",
        NeurIPS 2020 (cosine, total variation, signed Adam, box; there the step size falls in three jumps);
        Lu et al., "APRIL", CVPR 2022 (optimisation variant: the term of the position embedding, uncentred and
        with the class token's row); Hatamizadeh et al., "GradViT", CVPR 2022 (seams between patches).
    """

    name = "gradient_matching"
    paper = "Geiping et al., NeurIPS 2020; Lu et al. (optimisation variant) and Hatamizadeh et al., CVPR 2022"
    summary = "search for pictures with the uploaded gradients, above all those at the tokens"
    requires = "each client's own update; labels that are known, or recovered from the head's bias"
    exploits = "gradients of patch and position embedding, or any others; smoothness of pictures"
    options_type = GradientMatchingOptions
    stack = 4
    optimises = True

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

    def handles(self, model: VitClassifier, threat: ThreatModel) -> frozenset[Mark]:
        """Takes masks into account where it reads them off the upload of one picture and runs the network with them.

        The picture that it finds is shuffled. Its distance takes noise and rounding for gradients of the picture.
        """
        return frozenset({"masked"}) if self._reads_mask(model, threat) else frozenset()

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """What is matched, what mask and labels are read from, and what the start reads."""
        needed = [*self._matched(model), names.HEAD_BIAS]
        if self.options.position_weight or (model.defended and self.options.mask == "read"):
            needed.append(names.POSITION_EMBEDDING)
        if self._first is not None:
            needed.extend(self._first.tensors(model))
        return list(dict.fromkeys(needed))

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Needs tensors that the model has, and whatever its start and prior need."""
        if not model.has_positions:
            return positions_refusal(model)
        known = dict(model.named_parameters())
        for name in self._matched(model):
            if name not in known:
                return f"the model has no tensor {name!r}, {suggestion(name, known)}"
        if not self._used(model, threat):
            return "there is nothing to match: without a mask, no gradient reaches the unknown embedding"
        if alien := unmatchable(model, self._matched(model)):
            return f"tensors of this kind cannot be matched: {', '.join(alien)}"
        if self.options.patch_prior and prior_refusal(model):
            return prior_refusal(model)
        first = self._first and self._first.refusal(model, threat)
        return f"its start, {self.options.start}: {first}" if first else None

    def caveat(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Without masks where a defended model's cannot be read."""
        if model.defended and not self._reads_mask(model, threat):
            return "naive: runs the network without a mask and does not use the unknown embedding's gradient"
        return None

    def _reads_mask(self, model: VitClassifier, threat: ThreatModel) -> bool:
        wanted = model.defended and self.options.mask == "read" and threat.batch_size == 1
        return wanted and mask_refusal(model, threat) is None

    def _matched(self, model: VitClassifier) -> list[str]:
        """Names as the options give them; text 'all' stands for every parameter."""
        known = [name for name, _ in model.named_parameters()]
        return list(dict.fromkeys(n for given in self.options.tensors for n in (known if given == ALL else [given])))

    def _used(self, model: VitClassifier, threat: ThreatModel) -> list[str]:
        """Those that are matched: without a mask no gradient reaches the unknown embedding."""
        idle = set() if self._reads_mask(model, threat) else {names.UNKNOWN_EMBEDDING}
        return [name for name in self._matched(model) if name not in idle]

    def _reconstruct(
        self, uploads: Sequence[Upload], model: VitClassifier, threat: ThreatModel, *, generators: Sequence[Generator]
    ) -> list[Reconstruction]:
        started = time.monotonic()
        pairs = zip(uploads, generators, strict=True)
        jobs = [job for upload, generator in pairs for job in self._jobs(upload, model, threat, generator)]
        at_once = max(1, self.options.parallel // threat.batch_size)
        chunks = [jobs[first : first + at_once] for first in range(0, len(jobs), at_once)]
        comparison = self._comparison(model, threat)
        prior = patch_prior(model) if self.options.patch_prior else None
        finished: list[tuple[Tensor, float, int]] = []  # of each job: pictures, loss, iterations
        for number, chunk in enumerate(chunks):
            left = None
            if self.options.seconds is not None:
                left = self.options.seconds * len(uploads) - (time.monotonic() - started)
                left /= len(chunks) - number
            with computing(self.options.arithmetic, model.mean.device):
                result = search(
                    torch.stack([job.start for job in chunk]),
                    Loss(self.options, model, comparison, chunk, prior),
                    iterations=self.options.iterations,
                    seconds=left,
                    step_size=self.options.step_size,
                    on_step=partial(self._report, number, len(chunks)),
                )
            finished += zip(result.images, result.losses.tolist(), repeat(result.iterations))
        seconds, restarts = time.monotonic() - started, self.options.restarts
        of_each = [finished[first : first + restarts] for first in range(0, len(finished), restarts)]
        return [self._best(searches, seconds / len(uploads)) for searches in of_each]

    def _jobs(self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: Generator) -> list[Job]:
        gradients = {name: mean_gradient(upload, name, model, threat) for name in self._used(model, threat)}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        if norm == 0:
            raise AttackNotApplicableError(f"{self.name}: the matched gradients are all zero, nothing to search for")
        positions = torch.zeros_like(model.get_parameter(names.POSITION_EMBEDDING)[0], dtype=torch.float64)
        if names.POSITION_EMBEDDING in self.tensors(model):
            positions = mean_gradient(upload, names.POSITION_EMBEDDING, model, threat)[0]
        mask = read_mask(upload, model, threat)[None] if self._reads_mask(model, threat) else None
        labels = torch.tensor(labels_of(upload, model, threat), device=model.mean.device)
        targets = {name: (gradient / norm).float() for name, gradient in gradients.items()}
        return [
            Job(start.to(model.mean), labels, mask, norm, targets, (positions / norm).float())
            for start in self._starts(upload, model, threat, generator)
        ]

    def _starts(self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: Generator) -> list[Tensor]:
        shape = (upload.num_examples, 3, model.image_size, model.image_size)
        noises = [torch.randn(shape, generator=generator) for _ in range(self.options.restarts)]
        if self._first is None:
            return [(LEVEL + SPREAD * noise).clamp(0, 1) for noise in noises]
        start_generator = torch_generator(generator.initial_seed(), "start")
        first = self._first.reconstruct([upload], model, threat, generator=start_generator)[0].images.cpu()
        return [first, *((first + RESTART_NOISE * noise).clamp(0, 1) for noise in noises[1:])]

    def _comparison(self, model: VitClassifier, threat: ThreatModel) -> Comparison:
        used = self._used(model, threat)
        if threat.update == "delta" and threat.local_steps > 1:
            return SimulatedSteps(
                model,
                used,
                steps=threat.local_steps,
                learning_rate=threat.local_learning_rate,
                label_smoothing=threat.label_smoothing,
            )
        return PerCandidateGradients(model, used, label_smoothing=threat.label_smoothing)

    def _report(self, number: int, chunks: int, done: int, lowest: Tensor) -> None:
        iterations = self.options.iterations
        self.on_progress(number * iterations + done, chunks * iterations, float(lowest.mean()))

    def _best(self, searches: Sequence[tuple[Tensor, float, int]], seconds: float) -> Reconstruction:
        """What the best of an upload's searches came to."""
        images, loss, iterations = min(searches, key=itemgetter(1))
        if loss == math.inf:
            raise AttackFailedError(f"{self.name}: every search diverged; take a smaller step_size")
        ended = sum(value < math.inf for _, value, _ in searches)
        diagnostics = {"loss": loss, "iterations": iterations, "seconds": seconds, "restarts": ended}
        return Reconstruction(images.cpu(), diagnostics)


class Found(NamedTuple):
    """What a search ends with: like the start, the iterate of each candidate with the lowest loss.

    Attributes:
        losses: (candidates,) of these iterates; infinite for a candidate that diverged.
        iterations: Evaluations of the loss per candidate.
    """

    images: Tensor
    losses: Tensor
    iterations: int


def search(
    start: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    iterations: int,
    seconds: float | None = None,
    step_size: float,
    on_step: Callable[[int, Tensor], None],
) -> Found:
    """Minimise by Adam on the sign of the gradient, within the box [0, 1].

    The budget is used up after so many iterations, or seconds where that comes first; one iteration is always made.
    The step size falls to zero along half a cosine over it. The start is the first iterate, so the result is never
    worse than it. A candidate with a loss or gradient that is not finite has diverged and is out.

    Args:
        start: (candidates, batch, 3, size, size) in [0, 1].
        loss: Candidates to (candidates,); each loss depends on its own candidate only.
        iterations: Evaluations of the loss.
        seconds: None for any.
        step_size: The first, in units of the pixels' range.
        on_step: Called after every iteration with their number and the lowest losses so far.
    """
    images = start.clone()
    optimiser = torch.optim.Adam([images], lr=step_size)
    best, lowest = images.clone(), torch.full((len(images),), math.inf, device=images.device)
    alive = torch.ones_like(lowest, dtype=torch.bool)
    started, done = time.monotonic(), 0
    while True:
        leaf = images.detach().requires_grad_()
        with torch.enable_grad():
            values = loss(leaf)
            (slopes,) = torch.autograd.grad(values.sum(), leaf)
        values = values.detach()
        finite = torch.isfinite(values) & torch.isfinite(slopes.flatten(1)).all(dim=1)
        alive &= finite
        better = alive & (values < lowest)
        lowest = torch.where(better, values, lowest)
        best[better] = images[better]
        done += 1
        on_step(done, lowest)
        used = done / iterations
        if seconds is not None:
            used = max(used, (time.monotonic() - started) / seconds) if seconds > 0 else 1
        if used >= 1 or not bool(alive.any()):
            break
        optimiser.param_groups[0]["lr"] = step_size * (1 + math.cos(math.pi * used)) / 2
        images.grad = torch.where(finite.view(-1, *[1] * (slopes.ndim - 1)), slopes, 0).sign()
        optimiser.step()
        images.clamp_(0, 1)
    return Found(best, lowest, done)  # infinite only where no finite loss ever came
