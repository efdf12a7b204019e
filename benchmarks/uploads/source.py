"""Uploads out of a recorded federation; a test holds them together with direct ones."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fedmjp.benchmarks.federation.simulation import RunFolder, simulate
from fedmjp.benchmarks.folder.output import write_text
from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.config import ModelConfig
from fedmjp.errors import (
    GAVE_UP,
    OUT_OF_MEMORY,
    AttackFailedError,
    AttackNotApplicableError,
    Failure,
    FedmjpError,
    out_of_memory,
)
from fedmjp.exchange import Exchange
from fedmjp.models.build import blueprint, build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario

MISSING = "the client's upload or private record is missing or damaged"
Batch = tuple[str, ...]


class UploadSource(ABC):
    """Gives the uploads of an experiment, a few at a time."""

    @abstractmethod
    def uploads(self, batches: Sequence[Batch]) -> Mapping[Batch, Exchange | Failure]:
        """Give upload and private batch of each batch of pictures, or the reason why there is none.

        Args:
            batches: Names of the pictures behind each.
        """

    @abstractmethod
    def model(self, weights: str) -> VitClassifier:
        """Build the model with the weights that the server had sent, on the experiment's device.

        Args:
            weights: Digest of the weights.
        """

    @abstractmethod
    def private(self) -> Iterator[PrivateBatch]:
        """Give what is behind every upload of the experiment; DataError or RecordError if one is bad."""

    def stale(self) -> None:  # noqa: B027 (most sources keep nothing)
        """Hear that something is missing or damaged: the next run records anew, if a run recorded it."""


def described(error: Exception) -> str:
    """Say what a failed trial's row says of an error; its kind too, unless it was raised on purpose.

    Args:
        error: Any.
    """
    if out_of_memory(error):
        return OUT_OF_MEMORY
    # What applies by the plan, but not to this upload, will not apply tomorrow either.
    if isinstance(error, AttackFailedError | AttackNotApplicableError):
        return f"{GAVE_UP}{error}"
    return str(error) if isinstance(error, FedmjpError) else f"{type(error).__name__}: {error}"


def told(upload: Upload, private: PrivateBatch, scenario: Scenario) -> Upload:
    """Add the labels to a recorded upload, sorted, where the server knows them.

    Args:
        upload: As recorded.
        private: What is behind it.
        scenario: Of the upload.
    """
    if not scenario.labels_known:
        return upload
    return replace(upload, labels=tuple(sorted(private.labels.tolist())))


@dataclass(frozen=True)
class RecordedUploads(UploadSource):
    """Reads what `fedmjp record` recorded, and leaves it as it is."""

    experiment: Experiment
    folder: RunFolder

    def uploads(self, batches: Sequence[Batch]) -> Mapping[Batch, Exchange | Failure]:
        """Read the first upload of each batch and what is behind it; later ones of the same pictures are its others.

        Args:
            batches: Names of the pictures behind each.
        """
        scenario = self.experiment.scenario
        paths, count = self.folder.index(scenario), scenario.uploads_per_picture
        exchanges: dict[Batch, Exchange | Failure] = {}
        for batch in batches:
            try:
                probes = scenario.probes
                # A run may have gone on for others.
                first_ones = paths.get(batch, [])[probes : probes + count]
                records = [self.folder.record(scenario, path) for path in first_ones]
            except FedmjpError as error:
                exchanges[batch] = Failure(f"{MISSING}: {error}")
                continue
            if not records:
                exchanges[batch] = Failure(MISSING)
                continue
            if repeats_itself(scenario):
                records += [_repeated(records[0], number, scenario) for number in range(len(records), count)]
            (private, first), *later = records
            further = tuple(told(upload, private_batch, scenario) for private_batch, upload in later)
            exchanges[batch] = Exchange(private, replace(told(first, private, scenario), others=further))
        return exchanges

    def model(self, weights: str) -> VitClassifier:
        """Build the model with the weights that were recorded.

        Args:
            weights: Digest of the weights.
        """
        return sent_model(self.folder, self.experiment.scenario, weights)

    def private(self) -> Iterator[PrivateBatch]:
        """Read what is behind the first upload of each batch."""
        scenario = self.experiment.scenario
        for path, *_ in self.folder.index(scenario).values():
            yield self.folder.private(scenario, path)

    def stale(self) -> None:
        """Let the next run record anew."""
        self.folder.completed.unlink(missing_ok=True)


@dataclass(frozen=True)
class FederatedRun:
    """Records the scenarios of a plan in one federated run into a folder, from which uploads are then read."""

    plan: TrialPlan
    folder: RunFolder
    progress: RunProgress
    record: Callable[..., None] = simulate

    def prepare(self) -> str | None:
        """Run the federation, unless the records of these very trials are there, and return what went wrong."""
        # Keys cover configuration, pictures, code and versions: records of anything else are stale.
        keys = json.dumps(sorted(trial.key for trial in self.plan.tasks))
        marker = self.folder.completed
        if marker.exists() and marker.read_text() == keys:
            return None
        self.finish()
        experiments = [part.experiment for part in self.plan.parts]
        scenarios = played(experiment.scenario for experiment in experiments)
        tensors = sorted(
            frozenset().union(
                *(experiment.tensors_read(blueprint(experiment.scenario.network)) for experiment in experiments)
            )
        )
        self.progress.federation(sum(scenario.rounds for scenario in scenarios))
        try:
            self.record(scenarios, self.folder, upload_tensors=tensors, on_round=self.progress.round)
        except FedmjpError as error:
            return str(error)
        absent = sum(scenario.uploads for scenario in scenarios) - self.folder.count()
        if absent:
            return f"the federated run completed, but {absent} uploads are missing"
        write_text(marker, keys)
        return None

    def finish(self) -> None:
        """Remove the records."""
        self.folder.clear()


def played(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Pick the scenarios to play: one holds the uploads of those that differ in their number alone.

    Where a client would upload the same again, it uploads once.

    Args:
        scenarios: Of a plan.
    """
    longest: dict[Scenario, Scenario] = {}
    for scenario in scenarios:
        once = scenario.model_copy(update={"uploads_per_picture": 1})
        needed = once if repeats_itself(scenario) else scenario
        longest[once] = max(longest.get(once, once), needed, key=lambda candidate: candidate.uploads_per_picture)
    return list(longest.values())


def repeats_itself(scenario: Scenario) -> bool:
    """Tell whether all uploads of a picture are equal: nothing is drawn for each, and the weights stay.

    Args:
        scenario: Any.
    """
    drawn = scenario.defences or scenario.mixup or scenario.crop_scale
    return not (drawn or scenario.server_learning_rate or scenario.server)


def _repeated(record: tuple[PrivateBatch, Upload], number: int, scenario: Scenario) -> tuple[PrivateBatch, Upload]:
    """Return the record of a client that uploads the same again, after so many times."""
    private, upload = record
    turn = scenario.turn(upload.server_round)._replace(number=number)
    return private, replace(upload, server_round=scenario.round_of(turn))


def sent_model(folder: RunFolder, scenario: Scenario, weights: str) -> VitClassifier:
    """Build the model with recorded weights.

    Args:
        folder: Of the records.
        scenario: Of the uploads.
        weights: Digest of the weights.

    Raises:
        RecordError: If they are not there, or were changed.
    """
    return _sent_model(folder, scenario.folder, scenario.network, weights, scenario.device)


@lru_cache(maxsize=1)
def _sent_model(folder: RunFolder, records: str, arm: ModelConfig, weights: str, device: str) -> VitClassifier:
    model = build_vit(arm)
    model.load_state_dict(folder.upload_folder(records).weights(weights))
    return model.to(device)
