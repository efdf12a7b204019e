"""Recorded rounds of a training run, attacked together: the server kept every client's uploads.

Attacked is the last upload of each picture, at the weights of its round. Its others are all further uploads of
the same client, of whatever picture, in the order of their rounds: which of them show the same picture is for
the attack to find out. Where clients trained with a localisation loss (DAL), its gradient is subtracted first:
the server can compute it itself.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from attacks.mjp.localisation import without_localisation
from benchmarks.federation.round_records import sent_weights
from benchmarks.plan.experiment import Experiment, PlannedTrial
from benchmarks.uploads.recorded import Recording
from benchmarks.uploads.source import MISSING, Batch, Recorded, UploadSource, sent_model, tensors_read
from fedmjp.config import Checkpoint, FederationConfig, ModelConfig
from fedmjp.data.pictures import PictureEntry
from fedmjp.errors import BadInputError, FedmjpError, RecordError
from fedmjp.models.build import blueprint
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload, load_fields
from fedmjp.settings import Picture


@dataclass(frozen=True, eq=False)
class _Record:
    """An upload of a recorded round, before it is read: where it lies, and what its header states."""

    recording: Recording
    arm: ModelConfig
    path: Path
    pictures: Batch
    version: Picture
    node: int
    weights: str

    def upload(self, device: str) -> Upload:
        """As the server can use it: without what it can compute itself."""
        upload = Upload.load(self.recording.folder.uploads / self.arm.label / self.path.name)
        weight = self.recording.localisation_weights.get(str(self.node), 0.0)
        return without_localisation(upload, self.model(device), weight) if weight else upload

    def model(self, device: str) -> VitClassifier:
        """With the weights that the server had sent."""
        return sent_model(self.recording.folder, self.arm, self.weights, device)


@dataclass(frozen=True)
class RecordedRounds:
    """Rounds of one training run, in their order."""

    rounds: tuple[Recording, ...]

    @staticmethod
    def open(folder: Path) -> "RecordedRounds":
        """Read the manifests of a folder of rounds.

        Raises:
            BadInputError: If it holds none that can be attacked, or rounds of different models.
        """
        rounds = tuple(Recording.open(path.parent) for path in sorted(folder.glob("round-*/manifest.json")))
        if not rounds:
            raise BadInputError(f"{folder} holds no records of `fedmjp record` or `fedmjp simulate --uploads`")
        if len({tuple(arm.digest() for arm in each.config.arms) for each in rounds}) > 1:
            raise BadInputError(f"{folder} holds rounds of different models; attack one round at a time")
        return RecordedRounds(rounds)

    def arms(self, model: str | None, defence: str | None, *, device: str) -> FederationConfig:
        """The configuration of the last round, reduced to a model and a defence where they are named.

        ``uploads_per_picture`` is the number of recorded uploads of the picture that has most.

        Raises:
            BadInputError: If they were not recorded.
        """
        last = self.rounds[-1].arms(model, defence, device=device)
        seen = Counter((arm.label, name) for arm in last.arms for each in self.records(arm) for name in each.pictures)
        return FederationConfig.parse(last.model_dump() | {"uploads_per_picture": max(seen.values(), default=1)})

    def checkpoints(self, federation: FederationConfig) -> dict[str, Checkpoint]:
        """The weights that the last round's uploads were computed with, by arm."""
        return sent_weights(self.rounds[-1].folder, federation)

    def batches(self, federation: FederationConfig) -> list[tuple[PictureEntry, ...]]:
        """The pictures behind each upload that is attacked.

        Raises:
            BadInputError: If there is no readable one.
        """
        found: dict[Batch, tuple[PictureEntry, ...]] = {}
        for arm in federation.arms:
            for each in attacked(self.records(arm)):
                found |= each.recording.entries(each.pictures, each.path)
        if not found:
            raise BadInputError(f"{self.rounds[-1].folder.root.parent} holds no readable record of a picture")
        return list(found.values())

    def digest(self) -> str:
        """SHA-256 over all records: changed records make new trials."""
        return hashlib.sha256("".join(each.digest() for each in self.rounds).encode()).hexdigest()

    def problems(self, experiment: Experiment) -> list[str]:
        """Each record that cannot be used: its file, and what is wrong with it."""
        return [problem for each in self.rounds for problem in each.problems(experiment)]

    def source(self, experiment: Experiment) -> UploadSource:
        """What gives an experiment these uploads."""
        return RoundUploads(experiment, self)

    def records(self, arm: ModelConfig) -> list[_Record]:
        """Every upload of an arm that has a private record, in the order of rounds and nodes."""
        return [
            record
            for recording in self.rounds
            for (pictures, version), paths in recording.folder.index(arm).items()
            for path in paths
            for record in _described(recording, arm, path, pictures, version)
        ]


def open_records(folder: Path) -> Recording | RecordedRounds:
    """What `fedmjp record` or `fedmjp simulate --uploads` left in a folder: one recording, a round or several.

    Raises:
        BadInputError: If it holds no records that can be attacked.
    """
    if not (folder / "manifest.json").exists() and any(folder.glob("round-*/manifest.json")):
        return RecordedRounds.open(folder)
    recording = Recording.open(folder)
    return RecordedRounds((recording,)) if recording.of_training else recording


def attacked(records: Sequence[_Record]) -> list[_Record]:
    """Those that are the last ones of some picture."""
    last = {name: record for record in records for name in record.pictures}
    return list(dict.fromkeys(last.values()))


@dataclass(frozen=True)
class RoundUploads:
    """Reads the uploads of recorded rounds, and leaves them as they are."""

    experiment: Experiment
    recorded: RecordedRounds
    _kept: dict[str, list[tuple[_Record, Upload]]] = field(default_factory=dict)

    def prepare(self, planned: Sequence[PlannedTrial], on_rounds: Callable[[int], None]) -> str | None:
        """Recorded before."""
        del planned, on_rounds
        return None

    def uploads(
        self, arm: ModelConfig, gradient_of: Picture, batches: Sequence[Batch]
    ) -> Mapping[Batch, Recorded | str]:
        """Read the last upload of each batch, and all others of its client."""
        last = {(each.pictures, each.version): each for each in self._records[arm.label]}
        found: dict[Batch, Recorded | str] = {}
        for batch in batches:
            record = last.get((batch, gradient_of))
            try:
                found[batch] = MISSING if record is None else self._read(record)
            except FedmjpError as error:
                found[batch] = f"{MISSING}: {error}"
        return found

    def model(self, arm: ModelConfig, weights: str) -> VitClassifier:
        """The model with the weights that an upload was computed with."""
        return next(each for each in self._records[arm.label] if each.weights == weights).model(self._device)

    def stale(self) -> None:
        """Nothing can be recorded anew."""

    def finish(self) -> None:
        """The records are the user's."""

    def _read(self, record: _Record) -> Recorded:
        kept = self._kept_of(record.arm)
        others = tuple(upload for other, upload in kept if other.node == record.node and other.path != record.path)
        return Recorded(PrivateBatch.load(record.path), replace(record.upload(self._device), others=others))

    def _kept_of(self, arm: ModelConfig) -> list[tuple[_Record, Upload]]:
        """Every upload of the arm, reduced to what attacks read of others; read once, round by round."""
        if arm.label not in self._kept:
            read = tensors_read(self.experiment, arm, blueprint(arm), of_others=True)
            records = self._records[arm.label] if read else []
            self._kept[arm.label] = [(each, upload) for each in records if (upload := self._readable(each, read))]
        return self._kept[arm.label]

    def _readable(self, record: _Record, read: frozenset[str]) -> Upload | None:
        """None if it cannot be read, which ``problems`` tells: others can be done without."""
        try:
            return self._reduced(record, read)
        except FedmjpError:
            return None

    def _reduced(self, record: _Record, read: frozenset[str]) -> Upload:
        upload = record.upload(self._device)
        upload = replace(upload, tensors={name: value for name, value in upload.tensors.items() if name in read})
        if not self.experiment.labels_known:
            return upload
        return Recorded(PrivateBatch.load(record.path), upload).for_attack(labels_known=True)

    @cached_property
    def _records(self) -> dict[str, list[_Record]]:
        return {arm.label: self.recorded.records(arm) for arm in self.experiment.arms}

    @property
    def _device(self) -> str:
        return self.experiment.federation.device


def _described(recording: Recording, arm: ModelConfig, path: Path, pictures: Batch, version: Picture) -> list[_Record]:
    """The record behind a private one, unless it cannot be read, which is told as a problem."""
    try:
        fields = load_fields(recording.folder.uploads / arm.label / path.name)
        return [_Record(recording, arm, path, pictures, version, fields["node"], fields["weights"])]
    except (RecordError, KeyError):
        return []
