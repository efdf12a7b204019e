"""The base of attacks that search for pictures whose update agrees with the uploaded one."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from typing_extensions import override

from fedmjp.arithmetic import computing
from fedmjp.attacks.base import Attack
from fedmjp.attacks.labels import labels_of, mean_gradient
from fedmjp.attacks.mask import mask_refusal, read_mask
from fedmjp.attacks.matching_gradients import Comparison, PerCandidateGradients, SimulatedSteps, unmatchable
from fedmjp.attacks.matching_loss import Job
from fedmjp.attacks.token_gradients import positions_refusal
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, suggestion
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel


class GradientSearchResult(NamedTuple):
    """The result of a search: one iterate of each candidate.

    Attributes:
        images: (candidates, batch, 3, size, size) in [0, 1].
        losses: (candidates,) of these iterates; infinite for a candidate that diverged.
        iterations: Evaluations of the loss per candidate.
    """

    images: Tensor
    losses: Tensor
    iterations: int


OnStep = Callable[[int, Tensor], None]  # called after every evaluation with their number and the losses so far
Searcher = Callable[
    [Sequence[Job], float | None, OnStep], GradientSearchResult
]  # of some jobs, in so many seconds if not None


class GradientSearch(Attack):
    """The base of searches for pictures with the uploaded gradients: labels, masks and restarts.

    A delta of one step is a gradient; of several, the steps are simulated and differentiated through. In a batch,
    candidate i is given label i of the sorted labels; a reconstruction is unordered in any case. On an MJP upload of
    one picture the mask is read, and the candidate is run with it: what is searched is then the shuffled picture.
    Masks of a batch cannot be told apart, and some defences hide the mask for good: candidates are then run without.

    ``options_type`` is a subclass of ``fedmjp.attacks.matching_loss.SearchOptions``.
    """

    stack = 4
    optimises = True

    @abstractmethod
    def _matched(self, model: VitClassifier) -> list[str]:
        """Name the tensors that are compared."""

    @abstractmethod
    def _starts(self, upload: Upload, model: VitClassifier, threat: ThreatModel, generator: Generator) -> list[Tensor]:
        """Make the start of each restart, (batch, 3, size, size)."""

    @abstractmethod
    def _searcher(self, model: VitClassifier, comparison: Comparison) -> Searcher:
        """Return the function that runs jobs."""

    def handles(self, model: VitClassifier, threat: ThreatModel) -> frozenset[Mark]:
        """Name masks where it reads them off the upload of one picture and runs the network with them.

        The picture that it finds is shuffled. Its distance takes noise and rounding for gradients of the picture.
        """
        return frozenset({"masked"}) if self._reads_mask(model, threat) else frozenset()

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Name the tensors that are matched, and those that state mask and labels."""
        needed = [*self._matched(model), names.HEAD_BIAS]
        if model.defended and self.options.mask == "read":
            needed.append(names.POSITION_EMBEDDING)
        return list(dict.fromkeys(needed))

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse tensors that the model lacks or that cannot be matched."""
        if not model.has_positions:
            return positions_refusal(model)
        parameters = dict(model.named_parameters())
        for name in self._matched(model):
            if name not in parameters:
                return f"the model has no tensor {name!r}, {suggestion(name, parameters)}"
        if not self._used(model, threat):
            return "there is nothing to match: without a mask, no gradient reaches the unknown embedding"
        if alien := unmatchable(model, self._matched(model)):
            return f"tensors of this kind cannot be matched: {', '.join(alien)}"
        return None

    def caveat(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Warn where a defended model's mask cannot be read."""
        if model.defended and not self._reads_mask(model, threat):
            return "naive: runs the network without a mask and does not use the unknown embedding's gradient"
        return None

    def _reads_mask(self, model: VitClassifier, threat: ThreatModel) -> bool:
        meant = model.defended and self.options.mask == "read" and threat.batch_size == 1
        return meant and mask_refusal(model, threat) is None

    def _used(self, model: VitClassifier, threat: ThreatModel) -> list[str]:
        """Name the tensors that are matched after all: without a mask no gradient reaches the unknown embedding."""
        idle = set() if self._reads_mask(model, threat) else {names.UNKNOWN_EMBEDDING}
        return [name for name in self._matched(model) if name not in idle]

    @override
    def reconstruct_stack(
        self, uploads: Sequence[Upload], model: VitClassifier, threat: ThreatModel, *, generators: Sequence[Generator]
    ) -> list[Reconstruction]:
        started = time.monotonic()
        pairs = zip(uploads, generators, strict=True)
        jobs = [job for upload, generator in pairs for job in self._jobs(upload, model, threat, generator)]
        at_once = max(1, self.options.parallel // threat.batch_size)
        chunks = [jobs[first : first + at_once] for first in range(0, len(jobs), at_once)]
        run = self._searcher(model, self._comparison(model, threat))
        finished: list[tuple[Tensor, float, int]] = []  # of each job: pictures, loss, iterations
        for number, chunk in enumerate(chunks):
            seconds_left = None
            if self.options.seconds is not None:
                seconds_left = self.options.seconds * len(uploads) - (time.monotonic() - started)
                seconds_left /= len(chunks) - number
            with computing(self.options.arithmetic, model.mean.device):
                result = run(chunk, seconds_left, partial(self._report, number, len(chunks)))
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

    def _report(self, number: int, chunks: int, evaluations: int, losses: Tensor) -> None:
        iterations = self.options.iterations
        self.on_progress(number * iterations + evaluations, chunks * iterations, float(losses.mean()))

    def _best(self, searches: Sequence[tuple[Tensor, float, int]], seconds: float) -> Reconstruction:
        """Return the best of an upload's searches."""
        images, loss, iterations = min(searches, key=itemgetter(1))
        if loss == math.inf:
            raise AttackFailedError(f"{self.name}: every search diverged; take a smaller step_size")
        ended = sum(value < math.inf for _, value, _ in searches)
        diagnostics = {"loss": loss, "iterations": iterations, "seconds": seconds, "restarts": ended}
        return Reconstruction(images.cpu(), diagnostics)


def share_used(evaluations: int, iterations: int, started: float, seconds: float | None) -> float:
    """Return the used share of a budget of iterations, or of seconds where that is more.

    Args:
        evaluations: Evaluations so far.
        iterations: Evaluations that are allowed.
        started: Value of ``time.monotonic()`` at the start.
        seconds: Seconds that are allowed; None for any.
    """
    used = evaluations / iterations
    if seconds is None:
        return used
    return max(used, (time.monotonic() - started) / seconds) if seconds > 0 else 1.0
