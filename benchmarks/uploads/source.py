"""Where the uploads of an experiment come from: a recorded federation, or computed when needed.

Both give the same tensors for the same seed; a test holds them together. What is computed when needed
stands in ``benchmarks.uploads.direct``.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from benchmarks.federation.simulation import RunFolder, simulate
from benchmarks.folder.output import write_text
from benchmarks.plan.experiment import Experiment, PlannedTrial
from fedmjp.config import FederationConfig, ModelConfig
from fedmjp.errors import FedmjpError
from fedmjp.models.build import blueprint, build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.settings import Picture

COMPLETED = "completed.json"
MISSING = "the client's upload or private record is missing or damaged"
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


def tensors_read(
    experiment: Experiment, arm: ModelConfig, model: VitClassifier, *, of_others: bool = False
) -> frozenset[str]:
    """Names of the tensors that some attack of the experiment reads on this arm: of uploads, or of their others."""
    tried = [each for each in experiment.attacks[arm.name] if each.made().reads_others or not of_others]
    return frozenset(name for each in tried for name in each.tensors(model))


def described(error: Exception) -> str:
    """What a failed trial's row says of an error; its kind too, unless it was raised on purpose."""
    return str(error) if isinstance(error, FedmjpError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class RecordedUploads:
    """Reads what `fedmjp record` recorded, and leaves it as it is."""

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
        return read_recorded(self.folder, arm, gradient_of, batches, labels_known=self.experiment.labels_known)

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
    folder: RunFolder, arm: ModelConfig, gradient_of: Picture, batches: Sequence[Batch], *, labels_known: bool = False
) -> dict[Batch, Recorded | str]:
    """The first upload of each batch of pictures and its private batch out of the records of a run.

    The later uploads of the same pictures are its others, in the order of their rounds.
    """
    paths = folder.index(arm)
    found: dict[Batch, Recorded | str] = {}
    for batch in batches:
        try:
            records = [folder.record(arm, path) for path in paths.get((batch, gradient_of), [])]
        except FedmjpError as error:
            found[batch] = f"{MISSING}: {error}"
            continue
        if not records:
            found[batch] = MISSING
            continue
        first, *later = (Recorded(private, upload) for private, upload in records)
        others = tuple(each.for_attack(labels_known=labels_known) for each in later)
        found[batch] = replace(first, upload=replace(first.upload, others=others))
    return found


@lru_cache(maxsize=1)
def sent_model(folder: RunFolder, arm: ModelConfig, weights: str, device: str) -> VitClassifier:
    """The model with recorded weights.

    Raises:
        RecordError: If they are not there, or were changed.
    """
    model = build_vit(arm)
    model.load_state_dict(folder.upload_folder(arm).weights(weights))
    return model.to(device)
