"""Recorded rounds of a training run, attacked together.

Attacked is the last upload of each picture, at the weights of its round. Its others are all further uploads of
the same client, of whatever picture, in the order of their rounds: which of them show the same picture is for
the attack to find out. Where clients trained with a localisation loss (DAL), its gradient is subtracted first:
the server can compute it itself.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedmjp.attacks.mjp.localisation import without_localisation
from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.uploads.recorded import Recording
from fedmjp.benchmarks.uploads.source import MISSING, Batch, UploadSource, sent_model, told
from fedmjp.config import Checkpoint
from fedmjp.data.pictures import PictureEntry
from fedmjp.errors import BadInputError, Failure, FedmjpError, RecordError
from fedmjp.exchange import Exchange
from fedmjp.models.build import blueprint
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload, load_fields
from fedmjp.scenario import Scenario
from fedmjp.server.uploads import WEIGHTS


@dataclass(frozen=True, eq=False)
class _Record:
    """An upload of a recorded round, before it is read: where it lies, and what its header states."""

    recording: Recording
    scenario: Scenario
    path: Path
    pictures: Batch
    node: int
    weights: str

    def upload(self) -> Upload:
        """Read the upload as the server can use it: without what it can compute itself."""
        upload = Upload.load(self.recording.folder.uploads / self.scenario.folder / self.path.name)
        weight = self.recording.localisation_weights.get(str(self.node), 0.0)
        return without_localisation(upload, self.model(), weight, self.scenario.threat) if weight else upload

    def private(self) -> PrivateBatch:
        """Read what the upload was computed from."""
        return self.recording.folder.private(self.scenario, self.path)

    def model(self) -> VitClassifier:
        """Build the model with the weights that the server had sent."""
        return sent_model(self.recording.folder, self.scenario, self.weights)


@dataclass(frozen=True)
class RecordedRounds:
    """Rounds of one training run, in their order."""

    rounds: tuple[Recording, ...]

    @staticmethod
    def open(folder: Path) -> "RecordedRounds":
        """Read the manifests of a folder of rounds.

        Args:
            folder: Of rounds.

        Raises:
            BadInputError: If it holds none that can be attacked, or rounds of different models.
        """
        rounds = tuple(Recording.open(path.parent) for path in sorted(folder.glob("round-*/manifest.json")))
        if not rounds:
            raise BadInputError(f"{folder} holds no records of `fedmjp record` or `fedmjp simulate --uploads`")
        if len({tuple(scenario.network.digest() for scenario in recording.scenarios) for recording in rounds}) > 1:
            raise BadInputError(f"{folder} holds rounds of different models; attack one round at a time")
        return RecordedRounds(rounds)

    def attacked(self, model: str | None, *, device: str) -> list[Scenario]:
        """Return the scenario of the last round, with the weights that its uploads were computed with.

        ``uploads_per_picture`` is the number of recorded uploads of the picture that has most.

        Args:
            model: Name, or None.
            device: Where attacks run.

        Raises:
            BadInputError: If the model was not recorded.
        """
        return [self._attacked(scenario) for scenario in self.rounds[-1].attacked(model, device=device)]

    def _attacked(self, scenario: Scenario) -> Scenario:
        uploads_of = Counter(name for record in self.records(scenario) for name in record.pictures)
        changes: dict[str, Any] = {"uploads_per_picture": max(uploads_of.values(), default=1)}
        sent = next((self.rounds[-1].folder.uploads / scenario.folder).glob(WEIGHTS), None)
        if sent is not None:
            changes["model"] = scenario.model.model_copy(update={"weights": Checkpoint.of(sent)})
        return scenario.model_copy(update=changes)

    def batches(self, scenario: Scenario) -> list[tuple[PictureEntry, ...]]:
        """List the pictures behind each upload that is attacked.

        Args:
            scenario: Of the last round.

        Raises:
            BadInputError: If there is no readable one.
        """
        entries: dict[Batch, tuple[PictureEntry, ...]] = {}
        for record in attacked(self.records(scenario)):
            entries |= record.recording.entries(scenario, record.pictures, record.path)
        if not entries:
            raise BadInputError(f"{self.rounds[-1].folder.root.parent} holds no readable record of a picture")
        return list(entries.values())

    def digest(self) -> str:
        """Digest all records with SHA-256: changed records make new trials."""
        return hashlib.sha256("".join(recording.digest() for recording in self.rounds).encode()).hexdigest()

    def problems(self, experiment: Experiment) -> list[str]:
        """List each record that cannot be used: its file, and what is wrong with it.

        Args:
            experiment: Its attacks read the records.
        """
        return [problem for recording in self.rounds for problem in recording.problems(experiment)]

    def source(self, experiment: Experiment) -> UploadSource:
        """Return what gives an experiment these uploads.

        Args:
            experiment: Any.
        """
        return RoundUploads(experiment, self)

    def records(self, scenario: Scenario) -> list[_Record]:
        """List every upload of a scenario that has a private record, in the order of rounds and clients.

        Args:
            scenario: Of the rounds.
        """
        return [
            record
            for recording in self.rounds
            for pictures, paths in recording.folder.index(scenario).items()
            for path in paths
            for record in _described(recording, scenario, path, pictures)
        ]


def open_records(folder: Path) -> Recording | RecordedRounds:
    """Open what `fedmjp record` or `fedmjp simulate --uploads` left: one recording, a round or several.

    Args:
        folder: Of the records.

    Raises:
        BadInputError: If it holds no records that can be attacked.
    """
    if not (folder / "manifest.json").exists() and any(folder.glob("round-*/manifest.json")):
        return RecordedRounds.open(folder)
    recording = Recording.open(folder)
    return RecordedRounds((recording,)) if recording.of_training else recording


def attacked(records: Sequence[_Record]) -> list[_Record]:
    """Pick the records that are the last ones of some picture.

    Args:
        records: In the order of rounds.
    """
    last = {name: record for record in records for name in record.pictures}
    return list(dict.fromkeys(last.values()))


@dataclass(frozen=True)
class RoundUploads(UploadSource):
    """Reads the uploads of recorded rounds, and leaves them as they are."""

    experiment: Experiment
    recorded: RecordedRounds
    _kept: list[tuple[_Record, Upload]] = field(default_factory=list)

    def uploads(self, batches: Sequence[Batch]) -> Mapping[Batch, Exchange | Failure]:
        """Read the last upload of each batch, and all others of its client.

        Args:
            batches: Names of the pictures behind each.
        """
        last = {recorded.pictures: recorded for recorded in self._records}
        exchanges: dict[Batch, Exchange | Failure] = {}
        for batch in batches:
            record = last.get(batch)
            try:
                exchanges[batch] = Failure(MISSING) if record is None else self._read(record)
            except FedmjpError as error:
                exchanges[batch] = Failure(f"{MISSING}: {error}")
        return exchanges

    def model(self, weights: str) -> VitClassifier:
        """Build the model with the weights that an upload was computed with.

        Args:
            weights: Digest of the weights.
        """
        return next(record for record in self._records if record.weights == weights).model()

    def private(self) -> Iterator[PrivateBatch]:
        """Read what is behind the last upload of each picture."""
        return (record.private() for record in attacked(self._records))

    def _read(self, record: _Record) -> Exchange:
        private, further = record.private(), self._others(record)
        upload = told(record.upload(), private, self.experiment.scenario)
        return Exchange(private, replace(upload, others=further))

    def _others(self, record: _Record) -> tuple[Upload, ...]:
        """Read every other upload of the client, reduced to what attacks read of others, once, in order."""
        scenario = self.experiment.scenario
        read = self.experiment.tensors_read(blueprint(scenario.network), of_others=True)
        if read and not self._kept:
            reduced = ((further, self._reduced(further, read)) for further in self._records)
            self._kept.extend((further, upload) for further, upload in reduced if upload is not None)
        return tuple(up for further, up in self._kept if further.node == record.node and further.path != record.path)

    def _reduced(self, record: _Record, read: frozenset[str]) -> Upload | None:
        """Read an upload that can be done without: None if it cannot be read, which ``problems`` tells."""
        try:
            upload = record.upload()
            tensors = {name: value for name, value in upload.tensors.items() if name in read}
            scenario = self.experiment.scenario
            reduced = replace(upload, tensors=tensors)
            return told(reduced, record.private(), scenario) if scenario.labels_known else reduced
        except FedmjpError:
            return None

    @cached_property
    def _records(self) -> list[_Record]:
        return self.recorded.records(self.experiment.scenario)


def _described(recording: Recording, scenario: Scenario, path: Path, pictures: Batch) -> list[_Record]:
    """Describe the record behind a private one, unless it cannot be read, which is told as a problem."""
    try:
        fields = load_fields(recording.folder.uploads / scenario.folder / path.name)
        return [_Record(recording, scenario, path, pictures, fields["node"], fields["weights"])]
    except (RecordError, KeyError):
        return []
