"""Where the uploads of an experiment come from: a recorded federation, or computed when needed.

Both give the same tensors for the same seed; a test holds them together. What is computed when needed
stands in ``benchmarks.uploads.direct``.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from benchmarks.federation.simulation import RunFolder, simulate
from benchmarks.folder.output import write_text
from benchmarks.plan.experiment import Experiment, Plan
from fedmjp.config import ModelConfig
from fedmjp.errors import FedmjpError
from fedmjp.exchange import Exchange
from fedmjp.models.build import blueprint, build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario

COMPLETED = "completed.json"
MISSING = "the client's upload or private record is missing or damaged"
Batch = tuple[str, ...]


class UploadSource(Protocol):
    """Gives the uploads of an experiment, a few at a time."""

    def uploads(self, batches: Sequence[Batch]) -> Mapping[Batch, Exchange | str]:
        """Upload and private batch of each batch of pictures, or why there is none."""

    def model(self, weights: str) -> VitClassifier:
        """The model with the weights that the server had sent, on the experiment's device."""

    def stale(self) -> None:
        """Something that was recorded is missing or damaged: the next run records anew."""


def tensors_read(experiment: Experiment, model: VitClassifier, *, of_others: bool = False) -> frozenset[str]:
    """Names of the tensors that some attack of the experiment reads: of uploads, or of their others."""
    tried = [each for each in experiment.attacks if each.made().reads_others or not of_others]
    return frozenset(name for each in tried for name in each.tensors(model))


def described(error: Exception) -> str:
    """What a failed trial's row says of an error; its kind too, unless it was raised on purpose."""
    return str(error) if isinstance(error, FedmjpError) else f"{type(error).__name__}: {error}"


def told(upload: Upload, private: PrivateBatch, scenario: Scenario) -> Upload:
    """A recorded upload with the labels, in no telling order, where the server knows them."""
    if not scenario.labels_known:
        return upload
    return replace(upload, labels=tuple(sorted(private.labels.tolist())))


@dataclass(frozen=True)
class RecordedUploads:
    """Reads what `fedmjp record` recorded, and leaves it as it is."""

    experiment: Experiment
    folder: RunFolder

    def uploads(self, batches: Sequence[Batch]) -> Mapping[Batch, Exchange | str]:
        """Read them."""
        return read_recorded(self.folder, self.experiment.scenario, batches)

    def model(self, weights: str) -> VitClassifier:
        """The model with the weights that were recorded."""
        return sent_model(self.folder, self.experiment.scenario, weights)

    def stale(self) -> None:
        """The next run records anew, if it was a run that recorded."""
        (self.folder.root / COMPLETED).unlink(missing_ok=True)


class Recorder(Protocol):
    """Has the uploads of a federated run recorded, as ``simulate`` does through Flower."""

    def __call__(
        self,
        scenarios: Sequence[Scenario],
        folder: RunFolder,
        *,
        upload_tensors: Sequence[str],
        on_round: Callable[[], None],
    ) -> None:
        """Record into ``folder``; FedmjpError if that failed."""


@dataclass(frozen=True)
class FederatedRun:
    """Records the scenarios of a plan in one federated run, whose uploads are then read from disk.

    Attributes:
        plan: What is to be attacked.
        folder: Where the records go; removed when every trial is done.
        on_rounds: Told how many rounds there will be.
        on_round: Called at the start of every round.
        record: How uploads come about.
    """

    plan: Plan
    folder: RunFolder
    on_rounds: Callable[[int], None]
    on_round: Callable[[], None]
    record: Recorder = simulate

    def prepare(self) -> str | None:
        """Run the federation, unless the records of these very trials are there; what went wrong."""
        # Keys cover configuration, pictures, code and versions: records of anything else are stale.
        keys = json.dumps(sorted(trial.key for trial in self.plan.trials))
        marker = self.folder.root / COMPLETED
        if marker.exists() and marker.read_text() == keys:
            return None
        self.finish()
        scenarios = list(dict.fromkeys(part.experiment.scenario for part in self.plan.parts))
        self.on_rounds(sum(scenario.rounds for scenario in scenarios))
        try:
            self.record(scenarios, self.folder, upload_tensors=self._tensors(), on_round=self.on_round)
        except FedmjpError as error:
            return str(error)
        absent = sum(scenario.uploads for scenario in scenarios) - self.folder.count()
        if absent:
            return f"the federated run completed, but {absent} uploads are missing"
        write_text(marker, keys)
        return None

    def finish(self) -> None:
        """Remove the records."""
        if self.folder.root.exists():
            shutil.rmtree(self.folder.root)

    def _tensors(self) -> list[str]:
        experiments = [part.experiment for part in self.plan.parts]
        return sorted(frozenset().union(*(tensors_read(each, blueprint(each.arm)) for each in experiments)))


def read_recorded(folder: RunFolder, scenario: Scenario, batches: Sequence[Batch]) -> dict[Batch, Exchange | str]:
    """The first upload of each batch of pictures and its private batch out of the records of a run.

    The later uploads of the same pictures are its others, in the order of their rounds.
    """
    paths = folder.index(scenario)
    found: dict[Batch, Exchange | str] = {}
    for batch in batches:
        try:
            records = [folder.record(scenario, path) for path in paths.get(batch, [])]
        except FedmjpError as error:
            found[batch] = f"{MISSING}: {error}"
            continue
        if not records:
            found[batch] = MISSING
            continue
        (private, first), *later = records
        others = tuple(told(upload, own, scenario) for own, upload in later)
        found[batch] = Exchange(private, replace(told(first, private, scenario), others=others))
    return found


def sent_model(folder: RunFolder, scenario: Scenario, weights: str) -> VitClassifier:
    """The model with recorded weights.

    Raises:
        RecordError: If they are not there, or were changed.
    """
    return _sent_model(folder, scenario.folder, scenario.network, weights, scenario.device)


@lru_cache(maxsize=1)
def _sent_model(folder: RunFolder, records: str, arm: ModelConfig, weights: str, device: str) -> VitClassifier:
    model = build_vit(arm)
    model.load_state_dict(folder.upload_folder(records).weights(weights))
    return model.to(device)
