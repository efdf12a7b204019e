"""Runs what is missing of a plan, job by job: uploads, attacks, scores, rows."""

import time
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fedmjp import provenance
from fedmjp.attacks import ATTACKS
from fedmjp.attacks.adversary import Adversary
from fedmjp.attacks.natural_patches import measured_on
from fedmjp.benchmarks.folder.pictures import PictureKeeper, files_of
from fedmjp.benchmarks.folder.store import Trial
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment, Plan, PlannedTrial
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.uploads.direct import one_upload
from fedmjp.benchmarks.uploads.source import Batch, UploadSource, described
from fedmjp.config import ModelConfig
from fedmjp.errors import RecordError
from fedmjp.exchange import Exchange
from fedmjp.metrics.gallery import Gallery
from fedmjp.metrics.scoring import expand_disclosure, match, score_disclosure
from fedmjp.private import PrivateBatch
from fedmjp.processes import return_free_memory
from fedmjp.records import Disclosure, Features, Reconstruction
from fedmjp.settings import Picture, Setting

# Uploads held at a time: memory does not grow with the number of pictures. Those of attacks that
# optimise hold whole gradients.
CHUNK = 16
CHUNK_OF_OPTIMISERS = 4


@dataclass(frozen=True)
class Job:
    """What is missing of the trials on a few uploads of a plan's part.

    Jobs of equal ``uploads`` attack uploads of the same pictures: more of them or fewer.
    """

    part: int
    trials: tuple[PlannedTrial, ...]
    uploads: int = field(default=0, compare=False)

    @property
    def arm(self) -> ModelConfig:
        """Which the uploads are of."""
        return self.trials[0].arm


@dataclass(frozen=True)
class _Attacked:
    disclosed: Disclosure
    seconds: float


T = TypeVar("T")
_Trials = Sequence[PlannedTrial]


class TrialStore(Protocol):
    """Keeps trials: a database of a campaign, or the table of one attack."""

    def finished(self, keys: Collection[str]) -> set[str]:
        """Find the trials that need not be run again."""

    def put(self, trials: Iterable[Trial]) -> None:
        """Keep trials, all or none; a finished one is never replaced."""


@dataclass(frozen=True)
class Engine:
    """Works an experiment off: uploads from ``source``, rows into ``store``, pictures, if any are kept, elsewhere."""

    experiment: Experiment
    pictures: PictureKeeper | None
    store: TrialStore
    progress: RunProgress
    source: UploadSource
    _galleries: dict[str, Gallery] = field(default_factory=dict)  # by the weights that were sent

    def run(self, planned: _Trials, source_error: str | None = None) -> None:
        """Run the trials of this experiment that are not finished; failed ones are tried again.

        Every trial ends as a row: "ok", or "failed" with its error.

        Args:
            planned: Of this experiment.
            source_error: Why uploads that the source does not have could not be recorded; the source's own word
                if None.
        """
        for job in _jobs(0, planned, self._finished(planned)):
            self.work(job, source_error)

    def work(self, job: Job, source_error: str | None = None) -> None:
        """Work a job off, except for trials that another run on the same database has finished since.

        Rows are written stack by stack, so that an interruption loses no more than one.

        Raises:
            StoreError: If the database failed.
            OutputError: If pictures cannot be written.
        """
        finished = self._finished(job.trials)
        self.progress.trials(len(finished))
        trials = [trial for trial in job.trials if trial.key not in finished]
        exchanges = self.source.uploads(list(_by_batch(trials)))
        recorded = {batch: exchange for batch, exchange in exchanges.items() if isinstance(exchange, Exchange)}
        reasons = {batch: source_error or reason for batch, reason in exchanges.items() if isinstance(reason, str)}
        if reasons:
            self.source.stale()
        self._put([self._failed(trial, reasons[trial.batch]) for trial in trials if trial.batch in reasons])
        for attack in dict.fromkeys(trial.attack for trial in trials):
            by_batch = _by_batch(trial for trial in trials if trial.attack == attack and trial.batch in recorded)
            for stack in _in_chunks(list(by_batch), ATTACKS.get(attack.name).stack):
                made = self._reconstruct_each(attack, {batch: recorded[batch] for batch in stack})
                self._put([row for batch in stack for row in self._rows(by_batch[batch], recorded[batch], made[batch])])
        return_free_memory()

    def give_up(self, job: Job, error: str) -> None:
        """Make what is missing of a job failed rows, without trying it again."""
        finished = self._finished(job.trials)
        self.store.put([self._failed(trial, error) for trial in job.trials if trial.key not in finished])

    def _finished(self, trials: _Trials) -> set[str]:
        return self.store.finished([trial.key for trial in trials])

    def _reconstruct_each(self, attack: AttackConfig, held: Mapping[Batch, Exchange]) -> dict[Batch, _Attacked | str]:
        """Per upload what is disclosed, or the error that the attack ended with.

        Uploads of the same weights go in one stack; if that fails, one by one, so that an upload
        that cannot be attacked does not take the others with it.
        """
        made: dict[Batch, _Attacked | str] = {}
        for weights in dict.fromkeys(exchange.upload.weights for exchange in held.values()):
            stack = {batch: exchange for batch, exchange in held.items() if exchange.upload.weights == weights}
            try:
                made |= self._reconstruct(attack, stack)
            except Exception as error:  # noqa: BLE001 (any error of an attack is a result, told upload by upload)
                if len(stack) == 1:
                    made |= dict.fromkeys(stack, described(error))
                    continue
                for batch, exchange in stack.items():
                    made |= self._reconstruct_each(attack, {batch: exchange})
        return made

    def _reconstruct(self, attack: AttackConfig, stack: Mapping[Batch, Exchange]) -> dict[Batch, _Attacked]:
        """Let the adversary at uploads of the same weights."""
        if attack.build().uses_natural_patches:
            _refuse_known([exchange.private for exchange in stack.values()])
        weights = next(iter(stack.values())).upload.weights
        model = self.source.model(weights)
        adversary = Adversary(model, self.experiment.threat, self.experiment.scenario.seed)
        uploads = [exchange.upload for exchange in stack.values()]
        started = time.perf_counter()
        disclosures = adversary.reconstruct(
            attack.name, uploads, attack.options, then=attack.then, on_progress=self.progress.optimisation
        )
        seconds = (time.perf_counter() - started) / sum(len(self._wanted(each).pictures) for each in stack.values())
        return {batch: _Attacked(disclosed, seconds) for batch, disclosed in zip(stack, disclosures, strict=True)}

    def _rows(self, trials: _Trials, recorded: Exchange, made: _Attacked | str) -> list[Trial]:
        """Trials that share an upload and what was made of it, scored in their settings."""
        if isinstance(made, str):
            return [self._failed(trial, made) for trial in trials]
        private = self._wanted(recorded)
        disclosed = expand_disclosure(made.disclosed, len(private.pictures))
        rows: list[Trial] = []
        for setting in sorted({trial.cell.setting for trial in trials}):
            in_setting = [trial for trial in trials if trial.cell.setting is setting]
            try:
                values = self._scores(disclosed, private, recorded.upload.weights, setting)
            except Exception as error:  # noqa: BLE001 (any error of a score is a row)
                rows += [self._failed(trial, described(error)) for trial in in_setting]
                continue
            rows += [self._scored(trial, private, recorded.upload.weights, made, values) for trial in in_setting]
        if isinstance(disclosed, Reconstruction):
            self._save_pictures(trials, private, disclosed)
        return rows

    def _wanted(self, recorded: Exchange) -> PrivateBatch:
        """What the server is after of the pictures behind an upload."""
        places = self.experiment.scenario.wanted(recorded.private.labels.tolist())
        return recorded.private.of_places(places)

    def _scores(
        self, disclosed: Disclosure, private: PrivateBatch, weights: str, setting: Setting
    ) -> dict[str, Tensor | None]:
        features = isinstance(disclosed, Features) and disclosed.features is not None
        return score_disclosure(
            disclosed,
            private,
            setting,
            metrics=self.experiment.metrics,
            protocol=self.experiment.protocol,
            gallery=self._gallery(weights) if features else None,
        )

    def _gallery(self, weights: str) -> Gallery:
        """All pictures of the experiment before the network of these weights: only the last one is kept."""
        if weights not in self._galleries:
            self._galleries.clear()
            versions = {setting.compared_with for setting in self.experiment.settings}
            made = Gallery.of(self.source.model(weights), weights, self.source.private(), versions)
            self._galleries[weights] = made
        return self._galleries[weights]

    def _scored(
        self,
        trial: PlannedTrial,
        private: PrivateBatch,
        weights: str,
        made: _Attacked,
        values: Mapping[str, Tensor | None],
    ) -> Trial:
        place = private.pictures.index(trial.picture.name)
        if private.sha256(place) != trial.picture.sha256:
            return self._failed(trial, f"the client's picture {trial.picture.name!r} is not the planned one")
        return self._row(
            trial,
            status="ok",
            # Nothing was masked or shuffled in the gradient of an undefended clean picture.
            realised_ratio=float(private.mask[place].float().mean()) if trial.cell.mask_ratio else 0.0,
            weights_sha256=weights,
            attack_seconds=made.seconds,
            scores={name: None if value is None else float(value[place]) for name, value in values.items()},
            diagnostics=dict(made.disclosed.diagnostics),
        )

    def _save_pictures(self, trials: _Trials, private: PrivateBatch, reconstruction: Reconstruction) -> None:
        if self.pictures is None:
            return
        try:
            order = match(reconstruction.images, private.version(private.gradient_of))
        except RecordError:
            return  # told by the rows
        for trial in {trial.picture.name: trial for trial in trials}.values():
            place = private.pictures.index(trial.picture.name)
            images = {str(version): private.version(version)[place] for version in Picture}
            images["reconstruction"] = reconstruction.images[order[place]]
            self.pictures.save({path: images[which] for which, path in files_of(trial).items()})

    def _put(self, rows: list[Trial]) -> None:
        self.store.put(rows)  # a row in the store has its pictures
        self.progress.trials(len(rows))

    def _failed(self, trial: PlannedTrial, error: str) -> Trial:
        return self._row(trial, status="failed", error=error)

    def _row(self, trial: PlannedTrial, **outcome: Any) -> Trial:
        return Trial(
            key=trial.key,
            **trial.cell.columns,
            picture=trial.picture.name,
            picture_sha256=trial.picture.sha256,
            seed=self.experiment.scenario.seed,
            environment=_environment(),
            **outcome,
        )


_environment = lru_cache(maxsize=1)(provenance.environment)


def _refuse_known(batches: Iterable[PrivateBatch]) -> None:
    """Nothing is measured on pictures that an attack's prior was made of."""
    for private in batches:
        for place, name in enumerate(private.pictures):
            if measured_on(name, private.sha256(place)):
                raise RecordError(f"the prior of natural patches was measured on {name!r}: attack other pictures")


def jobs(plan: Plan, finished: Collection[str] = ()) -> list[Job]:
    """What is missing of a plan: all of it but the trials with these keys.

    Jobs of the same weights follow each other, so that models are built once; among them those that attack
    uploads of the same pictures, so that these are computed once.
    """
    missing = [job for index, part in enumerate(plan.parts) for job in _jobs(index, part.trials, finished)]
    places = {arm: place for place, arm in enumerate(dict.fromkeys(job.arm for job in missing))}
    shared = [one_upload(part.experiment.scenario) for part in plan.parts]
    uploads: dict[Hashable, int] = {}
    grouped = [
        replace(job, uploads=uploads.setdefault((job.trials[0].batch, shared[job.part]), len(uploads)))
        for job in missing
    ]
    return sorted(grouped, key=lambda job: (places[job.arm], job.uploads))


def _jobs(part: int, planned: _Trials, finished: Collection[str]) -> Iterator[Job]:
    """Trials on a few uploads at a time, in the order of the plan."""
    optimises = any(ATTACKS.get(trial.attack.name).optimises for trial in planned)
    # Cut before looking at what is finished: a stack of uploads, and with it the last bit of a score,
    # is the same whenever a run is interrupted.
    for chunk in _in_chunks(list(_by_batch(planned).values()), CHUNK_OF_OPTIMISERS if optimises else CHUNK):
        missing = tuple(trial for trials in chunk for trial in trials if trial.key not in finished)
        if missing:
            yield Job(part, missing)


def _by_batch(trials: Iterable[PlannedTrial]) -> dict[Batch, list[PlannedTrial]]:
    groups: defaultdict[Batch, list[PlannedTrial]] = defaultdict(list)
    for trial in trials:
        groups[trial.batch].append(trial)
    return dict(groups)


def _in_chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
