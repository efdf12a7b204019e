"""Where the uploads of an experiment come from: a recorded federation, or computed when needed.

Both give the same tensors for the same seed; a test holds them together.
"""

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import torch

from attacks import ATTACKS
from benchmarks.experiment import Experiment, PlannedTrial
from benchmarks.federation.simulation import RunFolder, simulate
from benchmarks.output import write_text
from fedmjp.config import FederationConfig, ModelConfig
from fedmjp.data.batches import batch_of_round
from fedmjp.data.selection import Selection
from fedmjp.errors import ConfigError, FedmjpError
from fedmjp.models.build import blueprint, build
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload, weights_digest
from fedmjp.settings import Picture
from fedmjp.stacked import ENTRANCE, entrance_gradients
from fedmjp.updates import local_update

COMPLETED = "completed.json"
PICTURES_PER_PASS = 16
Batch = tuple[str, ...]


@dataclass(frozen=True)
class Recorded:
    """An upload and, for the evaluator, what it was computed from."""

    private: PrivateBatch
    upload: Upload

    def for_attack(self, *, labels_known: bool) -> Upload:
        """The upload as the server has it; with the labels, in no telling order, where it knows them."""
        if not labels_known:
            return self.upload
        return replace(self.upload, labels=tuple(sorted(self.private.labels.tolist())))


class UploadSource(Protocol):
    """Gives the uploads of an experiment, a few at a time."""

    def prepare(self, planned: Sequence[PlannedTrial], on_rounds: Callable[[int], None]) -> str | None:
        """Have recorded what can only be recorded all at once; return what went wrong."""

    def uploads(
        self, arm: ModelConfig, gradient_of: Picture, batches: Sequence[Batch]
    ) -> Mapping[Batch, Recorded | str]:
        """Upload and private batch of each batch of pictures, or why there is none."""

    def model(self, arm: ModelConfig, weights: str) -> VitClassifier:
        """The model with the weights that the server had sent, on the experiment's device."""

    def stale(self) -> None:
        """Something that was recorded is missing or damaged: the next run records anew."""

    def finish(self) -> None:
        """Every trial is done."""


def tensors_read(experiment: Experiment, arm: ModelConfig, model: VitClassifier) -> frozenset[str]:
    """Names of the upload tensors that some attack of the experiment reads on this arm."""
    attacks = [ATTACKS.get(attack.name)(attack.options) for attack in experiment.attacks[arm.name]]
    return frozenset(name for attack in attacks for name in attack.tensors(model))


@dataclass(frozen=True)
class DirectUploads:
    """Computes uploads in this process when they are asked for, without Flower, and forgets them.

    Only the tensors that some attack reads are computed and kept. The weights stay as they are. An
    upload does not depend on which others are asked for, to the last bit.

    Attributes:
        experiment: Whose arms' uploads are asked for.
        selection: Its pictures; experiments that differ in their seed may share them.

    Raises:
        ConfigError: If the weights are to move, which takes a server.
    """

    experiment: Experiment
    selection: Selection

    def __post_init__(self) -> None:
        rate = self.experiment.federation.server_learning_rate
        if rate:
            raise ConfigError(f"direct mode keeps the weights; server-learning-rate is {rate}")

    def prepare(self, planned: Sequence[PlannedTrial], on_rounds: Callable[[int], None]) -> str | None:
        """Nothing to record."""
        del planned, on_rounds
        return None

    def uploads(
        self, arm: ModelConfig, gradient_of: Picture, batches: Sequence[Batch]
    ) -> Mapping[Batch, Recorded | str]:
        """Compute them, in stacks where the attacks read nothing but the model's entrance."""
        try:
            model = _initial_model(arm, self.experiment.federation.device)
        except FedmjpError as error:
            return dict.fromkeys(batches, str(error))
        names = tensors_read(self.experiment, arm, model)
        stacked = (
            self.experiment.federation.update == "gradient" and model.has_positions and names and names <= ENTRANCE
        )
        found: dict[Batch, Recorded | str] = {}
        for stack in self._stacks(batches) if stacked else [[batch] for batch in batches]:
            found |= self._computed(arm, gradient_of, stack, names)
        return {batch: found[batch] for batch in batches}

    def model(self, arm: ModelConfig, weights: str) -> VitClassifier:
        """The initial model: a copy, so that nothing an attack does to it reaches the clients."""
        del weights
        return _attackers_model(arm, self.experiment.federation.device)

    def stale(self) -> None:
        """Nothing is kept."""

    def finish(self) -> None:
        """Nothing is kept."""

    def _stacks(self, batches: Sequence[Batch]) -> list[list[Batch]]:
        """Whole passes that the batches are in: how many are in a pass shows in the last bit of its gradients."""
        size = max(1, PICTURES_PER_PASS // self.experiment.federation.batch_size)
        passes = dict.fromkeys(self._places[batch] // size for batch in batches)
        every = list(self._places)
        return [every[index * size : (index + 1) * size] for index in passes]

    def _computed(
        self, arm: ModelConfig, gradient_of: Picture, stack: Sequence[Batch], names: frozenset[str]
    ) -> dict[Batch, Recorded | str]:
        """Uploads of one pass, or of one batch alone."""
        federation = self.experiment.federation
        found: dict[Batch, Recorded | str] = {}
        turns = {batch: self._turn(batch, gradient_of) for batch in stack}
        private: dict[Batch, PrivateBatch] = {}
        for batch, turn in turns.items():
            try:
                private[batch] = batch_of_round(federation, self.selection, *turn)
            except FedmjpError as error:
                found[batch] = str(error)
        try:
            updates = _updates(_initial_model(arm, federation.device), list(private.values()), federation, names)
            digest = _initial_digest(arm, federation.device)
            for (batch, made), tensors in zip(private.items(), updates, strict=True):
                client, server_round = turns[batch]
                upload = Upload(tensors, federation.update, len(batch), server_round, client, digest)
                found[batch] = Recorded(made, upload)
        except Exception as error:  # noqa: BLE001 (whatever a client breaks down with is a result)
            for batch in private:
                found.setdefault(batch, f"the client's update of {', '.join(batch)} failed: {described(error)}")
        return found

    def _turn(self, batch: Batch, gradient_of: Picture) -> tuple[int, int]:
        """Client and round of a batch, as in a federated run."""
        federation = self.experiment.federation
        client, turn = divmod(self._places[batch], federation.batches_per_client)
        return client, federation.inputs.index(gradient_of) * federation.batches_per_client + turn + 1

    @cached_property
    def _places(self) -> dict[Batch, int]:
        batches = self.selection.batches(self.experiment.federation)
        return {tuple(entry.name for entry in batch): place for place, batch in enumerate(batches)}


def described(error: Exception) -> str:
    """What a failed trial's row says of an error; its kind too, unless it was raised on purpose."""
    return str(error) if isinstance(error, FedmjpError) else f"{type(error).__name__}: {error}"


def _updates(
    model: VitClassifier, private: Sequence[PrivateBatch], federation: FederationConfig, names: frozenset[str]
) -> list[dict[str, torch.Tensor]]:
    if len(private) > 1:
        return entrance_gradients(model, private, names)
    # A floor reads nothing, but an upload is never empty.
    return [
        {name: tensor for name, tensor in local_update(model, batch, federation).items() if name in names or not names}
        for batch in private
    ]


@dataclass(frozen=True)
class RecordedUploads:
    """Reads what `fedmjp simulate` recorded, and leaves it as it is."""

    experiment: Experiment
    folder: RunFolder

    def prepare(self, planned: Sequence[PlannedTrial], on_rounds: Callable[[int], None]) -> str | None:
        """Recorded before."""
        del planned, on_rounds
        return None

    def uploads(
        self, arm: ModelConfig, gradient_of: Picture, batches: Sequence[Batch]
    ) -> Mapping[Batch, Recorded | str]:
        """Read them."""
        return read_recorded(self.folder, arm, gradient_of, batches)

    def model(self, arm: ModelConfig, weights: str) -> VitClassifier:
        """The model with the weights that were recorded."""
        return sent_model(self.folder, arm, weights, self.experiment.federation.device)

    def stale(self) -> None:
        """Nothing can be recorded anew."""

    def finish(self) -> None:
        """The records are the user's."""


class Recorder(Protocol):
    """Has the uploads of a federated run recorded, as ``simulate`` does through Flower."""

    def __call__(
        self,
        config: FederationConfig,
        folder: RunFolder,
        *,
        upload_tensors: Sequence[str],
        on_round: Callable[[], None],
    ) -> None:
        """Record into ``folder``; FedmjpError if that failed."""


@dataclass(frozen=True)
class FederatedUploads(RecordedUploads):
    """Records a federated run once, and reads its uploads from disk.

    Attributes:
        experiment: What to run.
        folder: Where the records go; removed when every trial is done.
        on_round: Called at the start of every round.
        record: How uploads come about.
    """

    on_round: Callable[[], None]
    record: Recorder = simulate

    def prepare(self, planned: Sequence[PlannedTrial], on_rounds: Callable[[int], None]) -> str | None:
        """Run the federation, unless the records of these very trials are there."""
        federation = self.experiment.federation
        # Keys cover configuration, pictures, code and versions: records of anything else are stale.
        keys = json.dumps(sorted(trial.key for trial in planned))
        if self._marker.exists() and self._marker.read_text() == keys:
            return None
        if self.folder.root.exists():
            shutil.rmtree(self.folder.root)
        on_rounds(federation.rounds * len(self.experiment.arms))
        try:
            self.record(federation, self.folder, upload_tensors=self._tensors(), on_round=self.on_round)
        except FedmjpError as error:
            return str(error)
        absent = federation.clients * federation.rounds * len(self.experiment.arms) - self.folder.count()
        if absent:
            return f"the federated run completed, but {absent} uploads are missing"
        write_text(self._marker, keys)
        return None

    def stale(self) -> None:
        """The next run records anew."""
        self._marker.unlink(missing_ok=True)

    def finish(self) -> None:
        """Remove the records."""
        if self.folder.root.exists():
            shutil.rmtree(self.folder.root)

    @property
    def _marker(self) -> Path:
        return self.folder.root / COMPLETED

    def _tensors(self) -> list[str]:
        arms = self.experiment.arms
        return sorted(frozenset().union(*(tensors_read(self.experiment, arm, blueprint(arm)) for arm in arms)))


def read_recorded(
    folder: RunFolder, arm: ModelConfig, gradient_of: Picture, batches: Sequence[Batch]
) -> dict[Batch, Recorded | str]:
    """Upload and private batch of each batch of pictures out of the records of a run."""
    paths = folder.index(arm)
    found: dict[Batch, Recorded | str] = {}
    for batch in batches:
        path = paths.get((batch, gradient_of))
        if path is None:
            found[batch] = "the client's upload or private record is missing or damaged"
            continue
        try:
            found[batch] = Recorded(PrivateBatch.load(path), Upload.load(folder.uploads / arm.label / path.name))
        except FedmjpError as error:
            found[batch] = f"the client's upload or private record is missing or damaged: {error}"
    return found


# Jobs come in the order of their weights; one arm more, for jobs that are tried again.
@lru_cache(maxsize=2)
def _initial_model(arm: ModelConfig, device: str) -> VitClassifier:
    return build(arm).to(device)


@lru_cache(maxsize=2)
def _attackers_model(arm: ModelConfig, device: str) -> VitClassifier:
    return copy.deepcopy(_initial_model(arm, device))


@lru_cache(maxsize=64)
def _initial_digest(arm: ModelConfig, device: str) -> str:
    return weights_digest(_initial_model(arm, device).state_dict())


@lru_cache(maxsize=1)
def sent_model(folder: RunFolder, arm: ModelConfig, weights: str, device: str) -> VitClassifier:
    """The model with recorded weights.

    Raises:
        RecordError: If they are not there, or were changed.
    """
    model = build(arm)
    model.load_state_dict(folder.upload_folder(arm).weights(weights))
    return model.to(device)
