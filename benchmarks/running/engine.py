"""Runs what is missing of a plan, job by job: uploads, attacks, scores, rows."""

import time
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor

from fedmjp import provenance
from fedmjp.attacks import ATTACKS
from fedmjp.attacks.adversary import Adversary
from fedmjp.attacks.held_out import measured_on
from fedmjp.benchmarks.folder.pictures import png_of
from fedmjp.benchmarks.folder.trials import TrialResult
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment
from fedmjp.benchmarks.plan.trial_plan import PlannedTrial, TrialPlan
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.uploads.direct import ONE_UPLOAD
from fedmjp.benchmarks.uploads.source import Batch, UploadSource, described
from fedmjp.config import ModelConfig
from fedmjp.errors import Failure, RecordError
from fedmjp.exchange import Exchange
from fedmjp.metrics.gallery import Gallery
from fedmjp.metrics.scoring import expand_disclosure, match, score_disclosure
from fedmjp.private import PrivateBatch
from fedmjp.processes import return_free_memory
from fedmjp.records import Disclosure, Features, Reconstruction
from fedmjp.settings import Picture

# Uploads held at a time: memory does not grow with the number of pictures. Those of attacks that
# optimise hold whole gradients.
CHUNK = 16
CHUNK_OF_OPTIMISERS = 4


@dataclass(frozen=True)
class UploadJob:
    """The unfinished trials on a few uploads of a plan's part.

    Jobs of equal ``uploads`` attack uploads of the same pictures: more of them or fewer.
    """

    part: int
    trials: tuple[PlannedTrial, ...]
    uploads: int = field(default=0, compare=False)

    @property
    def arm(self) -> ModelConfig:
        """Return the network that the uploads are of."""
        return self.trials[0].arm


@dataclass(frozen=True)
class _Attacked:
    disclosed: Disclosure
    seconds: float


T = TypeVar("T")
_Trials = Sequence[PlannedTrial]


@dataclass(frozen=True)
class StackResults:
    """Rows of the trials on a few uploads, and pictures to keep: the content of PNG files by their names."""

    rows: list[TrialResult]
    pictures: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """Attacks and scores the trials of one experiment; writes nothing.

    Attributes:
        experiment: Whose trials are run.
        source: Gives the uploads.
        progress: Hears of each attack's iterations.
        shows_pictures: Whether results bring pictures along.
        environment: That rows name; None asks this process.
    """

    experiment: Experiment
    source: UploadSource
    progress: RunProgress = field(default_factory=RunProgress)
    shows_pictures: bool = True
    environment: Mapping[str, Any] | None = None
    _galleries: dict[str, Gallery] = field(default_factory=dict)  # by the weights that were sent

    def results(self, trials: _Trials, source_error: str | None = None) -> Iterator[StackResults]:
        """Run trials on a few uploads, and give results stack by stack, so that an interruption loses at most one.

        Every trial ends as a row: "ok", or "failed" with its error.

        Args:
            trials: Of one job.
            source_error: Why uploads that the source lacks could not be recorded; the source's own reason if None.
        """
        exchanges = self.source.uploads(list(_by_batch(trials)))
        recorded = {batch: exchange for batch, exchange in exchanges.items() if isinstance(exchange, Exchange)}
        reasons = {
            batch: source_error or failure.reason
            for batch, failure in exchanges.items()
            if isinstance(failure, Failure)
        }
        if reasons:
            self.source.stale()
            yield StackResults(
                [self._failed(trial, reasons[trial.batch]) for trial in trials if trial.batch in reasons]
            )
        for attack in {trial.cell.attack: trial.attack for trial in trials}.values():
            by_batch = _by_batch(trial for trial in trials if trial.attack == attack and trial.batch in recorded)
            for stack in _in_chunks(list(by_batch), ATTACKS.get(attack.name).stack):
                outcomes = self._reconstruct_each(attack, {batch: recorded[batch] for batch in stack})
                results = StackResults([])
                for batch in stack:
                    self._score(by_batch[batch], recorded[batch], outcomes[batch], results)
                yield results
        return_free_memory()

    def give_up(self, trials: _Trials, error: str) -> StackResults:
        """Make failed rows of trials, without trying them.

        Args:
            trials: Of this experiment.
            error: The reason.
        """
        return StackResults([self._failed(trial, error) for trial in trials])

    def _reconstruct_each(
        self, attack: AttackConfig, exchanges: Mapping[Batch, Exchange]
    ) -> dict[Batch, _Attacked | Failure]:
        """Attack each upload: what is disclosed, or the error that the attack ended with.

        Uploads of the same weights go in one stack; if that fails, one by one, so that an upload
        that cannot be attacked does not take the others with it.
        """
        outcomes: dict[Batch, _Attacked | Failure] = {}
        for weights in dict.fromkeys(exchange.upload.weights for exchange in exchanges.values()):
            stack = {batch: exchange for batch, exchange in exchanges.items() if exchange.upload.weights == weights}
            try:
                outcomes |= self._reconstruct(attack, stack)
            except Exception as error:  # noqa: BLE001 (any error of an attack is a result, told upload by upload)
                if len(stack) == 1:
                    outcomes |= dict.fromkeys(stack, Failure(described(error)))
                    continue
                for batch, exchange in stack.items():
                    outcomes |= self._reconstruct_each(attack, {batch: exchange})
        return outcomes

    def _reconstruct(self, attack: AttackConfig, stack: Mapping[Batch, Exchange]) -> dict[Batch, _Attacked]:
        """Let the adversary at uploads of the same weights."""
        if attack.build().uses_natural_patches:
            _refuse_known([exchange.private for exchange in stack.values()])
        weights = next(iter(stack.values())).upload.weights
        model = self.source.model(weights)
        adversary = Adversary(model, self.experiment.scenario.threat, self.experiment.scenario.seed)
        uploads = [exchange.upload for exchange in stack.values()]
        started = time.perf_counter()
        disclosures = adversary.reconstruct(
            attack.name, uploads, attack.options, then=attack.then, on_progress=self.progress.optimisation
        )
        seconds = (time.perf_counter() - started) / sum(
            len(self._wanted(recorded).pictures) for recorded in stack.values()
        )
        return {batch: _Attacked(disclosed, seconds) for batch, disclosed in zip(stack, disclosures, strict=True)}

    def _score(self, trials: _Trials, recorded: Exchange, outcome: _Attacked | Failure, results: StackResults) -> None:
        """Score what was made of an upload in the settings of its trials, and add rows and pictures to the results."""
        if isinstance(outcome, Failure):
            results.rows.extend(self._failed(trial, outcome.reason) for trial in trials)
            return
        private = self._wanted(recorded)
        disclosed, weights = expand_disclosure(outcome.disclosed, len(private.pictures)), recorded.upload.weights
        has_features = isinstance(disclosed, Features) and disclosed.features is not None
        for setting in sorted({trial.cell.setting for trial in trials}):
            in_setting = [trial for trial in trials if trial.cell.setting is setting]
            try:
                values = score_disclosure(
                    disclosed,
                    private,
                    setting,
                    metrics=self.experiment.metrics,
                    protocol=self.experiment.protocol,
                    gallery=self._gallery(weights) if has_features else None,
                )
            except Exception as error:  # noqa: BLE001 (any error of a score is a row)
                results.rows.extend(self._failed(trial, described(error)) for trial in in_setting)
                continue
            results.rows.extend(self._scored(trial, private, weights, outcome, values) for trial in in_setting)
        if self.shows_pictures and isinstance(disclosed, Reconstruction):
            results.pictures.update(_pictures(trials, private, disclosed))

    def _wanted(self, recorded: Exchange) -> PrivateBatch:
        """Pick the pictures that the server is after of those behind an upload."""
        scenario, private = self.experiment.scenario, recorded.private
        return private if scenario.server is None else private.of_places(scenario.wanted(private.labels.tolist()))

    def _gallery(self, weights: str) -> Gallery:
        """Show all pictures of the experiment to the network of these weights; only the last result is kept."""
        if weights not in self._galleries:
            self._galleries.clear()
            versions = {setting.compared_with for setting in self.experiment.settings}
            gallery = Gallery.of(self.source.model(weights), weights, self.source.private(), versions)
            self._galleries[weights] = gallery
        return self._galleries[weights]

    def _scored(
        self,
        trial: PlannedTrial,
        private: PrivateBatch,
        weights: str,
        attacked: _Attacked,
        values: Mapping[str, Tensor | None],
    ) -> TrialResult:
        place = private.pictures.index(trial.picture.name)
        if private.sha256(place) != trial.picture.sha256:
            return self._failed(trial, f"the client's picture {trial.picture.name!r} is not the planned one")
        return self._row(
            trial,
            status="ok",
            # Nothing was masked or shuffled in the gradient of an undefended clean picture.
            realised_ratio=float(private.mask[place].float().mean()) if trial.cell.mask_ratio else 0.0,
            weights_sha256=weights,
            attack_seconds=attacked.seconds,
            scores={name: None if value is None else float(value[place]) for name, value in values.items()},
            diagnostics=dict(attacked.disclosed.diagnostics),
        )

    def _failed(self, trial: PlannedTrial, error: str) -> TrialResult:
        return self._row(trial, status="failed", error=error)

    def _row(self, trial: PlannedTrial, **outcome: Any) -> TrialResult:
        return TrialResult(
            key=trial.key,
            **trial.cell.columns,
            picture=trial.picture.name,
            picture_sha256=trial.picture.sha256,
            seed=self.experiment.scenario.seed,
            environment=dict(self.environment or _environment()),
            **outcome,
        )


_environment = lru_cache(maxsize=1)(provenance.environment)


def _pictures(trials: _Trials, private: PrivateBatch, reconstruction: Reconstruction) -> Iterator[tuple[str, bytes]]:
    """Encode the originals and the reconstruction of each private picture as PNG, by the names of the files."""
    try:
        order = match(reconstruction.images, private.version(private.gradient_of))
    except RecordError:
        return  # the rows say so
    for trial in {trial.picture.name: trial for trial in trials}.values():
        place = private.pictures.index(trial.picture.name)
        images = {str(version): private.version(version)[place] for version in Picture}
        images["reconstruction"] = reconstruction.images[order[place]]
        yield from ((path, png_of(images[which])) for which, path in trial.files.items())


def _refuse_known(batches: Iterable[PrivateBatch]) -> None:
    """Nothing is measured on pictures that an attack's prior was made of."""
    for private in batches:
        for place, name in enumerate(private.pictures):
            if measured_on(name, private.sha256(place)):
                raise RecordError(f"the prior of natural patches was measured on {name!r}: attack other pictures")


def jobs(plan: TrialPlan, finished: Collection[str] = ()) -> list[UploadJob]:
    """Cut what is missing of a plan into jobs, in an order in which models and shared uploads are computed once.

    The first job of each part comes before all others, so that the time that is left can soon be told. Within both
    groups jobs of the same weights follow each other, and among them those that attack uploads of the same pictures.

    Args:
        plan: Its cells and trials.
        finished: Keys of trials to leave out.
    """
    missing = [job for index, part in enumerate(plan.parts) for job in jobs_of(index, part.trials, finished)]
    places = {arm: place for place, arm in enumerate(dict.fromkeys(job.arm for job in missing))}
    shared = [part.experiment.scenario.model_copy(update=ONE_UPLOAD) for part in plan.parts]
    uploads: dict[Hashable, int] = {}
    grouped = [
        replace(job, uploads=uploads.setdefault((job.trials[0].batch, shared[job.part]), len(uploads)))
        for job in missing
    ]
    first = {job.part: job for job in reversed(grouped)}
    return sorted(grouped, key=lambda job: (first[job.part] is not job, places[job.arm], job.uploads))


def jobs_of(part: int, planned: _Trials, finished: Collection[str]) -> Iterator[UploadJob]:
    """Cut the trials of one part into jobs on a few uploads each, in the order of the plan.

    Args:
        part: Its place in the plan.
        planned: All of its trials.
        finished: Keys of trials to leave out.
    """
    optimises = any(ATTACKS.get(trial.attack.name).optimises for trial in planned)
    # Cut before looking at what is finished: a stack of uploads, and with it the last bit of a score,
    # is the same whenever a run is interrupted.
    for chunk in _in_chunks(list(_by_batch(planned).values()), CHUNK_OF_OPTIMISERS if optimises else CHUNK):
        missing = tuple(trial for trials in chunk for trial in trials if trial.key not in finished)
        if missing:
            yield UploadJob(part, missing)


def _by_batch(trials: Iterable[PlannedTrial]) -> dict[Batch, list[PlannedTrial]]:
    groups: defaultdict[Batch, list[PlannedTrial]] = defaultdict(list)
    for trial in trials:
        groups[trial.batch].append(trial)
    return dict(groups)


def _in_chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
