"""Runs what is missing of an experiment: federation, attacks, scores, rows."""

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from attacks import ATTACKS
from benchmarks import evaluator
from benchmarks.campaign import Experiment, PlannedTrial
from benchmarks.federation.simulation import RunFolder, simulate
from benchmarks.output import OutputFolder, write_text
from benchmarks.pictures import save_png
from fedmjp import provenance
from fedmjp.config import FederationConfig, ModelConfig
from fedmjp.errors import FedmjpError, RecordError
from fedmjp.models.build import build
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.settings import Picture
from fedmjp.store import Store, Trial
from server.adversary import Adversary
from server.uploads import UploadFolder

COMPLETED = "completed.json"


class Recorder(Protocol):
    """Has the uploads of a federated run recorded: ``simulate`` through Flower, or ``record_directly``."""

    def __call__(
        self,
        config: FederationConfig,
        folder: RunFolder,
        *,
        upload_tensors: Sequence[str],
        on_round: Callable[[], None],
    ) -> None:
        """Record into ``folder``; FedmjpError if that failed."""


class Progress(Protocol):
    """What the engine tells while it works."""

    def federation(self, rounds: int) -> None:
        """A federated run of so many rounds starts."""

    def round(self) -> None:
        """A round starts."""

    def attacks(self, trials: int) -> None:
        """So many trials are about to be attacked and scored."""

    def trials(self, done: int) -> None:
        """So many more trials are in the store."""


@dataclass(frozen=True)
class _Attacked:
    reconstruction: Reconstruction
    seconds: float


_Pairs = Mapping[tuple[str, Picture], tuple[PrivateBatch, Upload]]


@dataclass(frozen=True)
class Engine:
    """Works an experiment off.

    Attributes:
        experiment: What to run.
        output: Where everything goes.
        store: Trials.
        progress: Is told what happens.
        record: How uploads come about.
    """

    experiment: Experiment
    output: OutputFolder
    store: Store
    progress: Progress
    record: Recorder = simulate

    def run(self, planned: Sequence[PlannedTrial]) -> None:
        """Run the trials that are not finished; failed ones are tried again.

        Every trial ends as a row: "ok", or "failed" with its error. Records of the federated run are
        kept until all are "ok", so that an interrupted run goes on from them.
        """
        missing = self._missing(planned)
        if missing:
            federation_error = self._federate(planned)
            self.progress.attacks(len(missing))
            for arm, trials in _by_arm(missing).items():
                self._attack_arm(arm, trials, federation_error)
        if not self._missing(planned) and self.output.run.root.exists():
            shutil.rmtree(self.output.run.root)

    def _missing(self, planned: Sequence[PlannedTrial]) -> list[PlannedTrial]:
        finished = self.store.finished([trial.key for trial in planned])
        return [trial for trial in planned if trial.key not in finished]

    def _federate(self, planned: Sequence[PlannedTrial]) -> str | None:
        """Have the uploads recorded, unless those of these very trials are there; return what went wrong."""
        folder, federation = self.output.run, self.experiment.federation
        # Keys cover configuration, pictures, code and versions: records of anything else are stale.
        recorded = sorted(trial.key for trial in planned)
        marker = folder.root / COMPLETED
        if marker.exists() and marker.read_text() == json.dumps(recorded):
            return None
        if folder.root.exists():
            shutil.rmtree(folder.root)
        self.progress.federation(federation.rounds * len(federation.arms))
        try:
            self.record(federation, folder, upload_tensors=self._tensors(), on_round=self.progress.round)
        except FedmjpError as error:
            return str(error)
        absent = federation.clients * federation.rounds * len(federation.arms) - folder.count()
        if absent:
            return f"the federated run completed, but {absent} uploads are missing"
        write_text(marker, json.dumps(recorded))
        return None

    def _tensors(self) -> list[str]:
        """Names of the upload tensors that some attack of the experiment reads."""
        read: set[str] = set()
        for arm in self.experiment.federation.arms:
            model = build(arm)
            for attack in self.experiment.attacks[arm.name]:
                read.update(ATTACKS.get(attack)().tensors(model))
        return sorted(read)

    def _attack_arm(self, arm: ModelConfig, trials: list[PlannedTrial], federation_error: str | None) -> None:
        """Attack and score all missing trials of one arm, one (attack, version) at a time."""
        pairs = {(p.pictures[0], p.gradient_of): (p, u) for p, u in self.output.run.pairs(arm)}
        for group in _by_reconstruction(trials):
            present = [trial for trial in group if _source(trial) in pairs]
            absent = [trial for trial in group if _source(trial) not in pairs]
            reason = federation_error or "the client's upload or private record is missing or damaged"
            if absent:  # the next run records anew
                (self.output.run.root / COMPLETED).unlink(missing_ok=True)
            self.store.put(self._failed(trial, reason) for trial in absent)
            self._attack_group(arm, present, pairs)
            self.progress.trials(len(group))

    def _attack_group(self, arm: ModelConfig, trials: list[PlannedTrial], pairs: _Pairs) -> None:
        """Trials that share attack and version: each upload is attacked once and scored per setting."""
        uploads = {trial.picture.name: pairs[_source(trial)][1] for trial in trials}
        reconstructions = self._reconstruct_each(arm, trials[0].cell.attack, uploads) if trials else {}
        saved: set[str] = set()
        rows = []
        for trial in trials:
            private, upload = pairs[_source(trial)]
            made = reconstructions[trial.picture.name]
            if isinstance(made, str):
                rows.append(self._failed(trial, made))
                continue
            rows.append(self._scored(trial, private, upload, made))
            if trial.picture.name not in saved:
                self._save_pictures(trial, private, made.reconstruction)
                saved.add(trial.picture.name)
        self.store.put(rows)  # last: a row in the store has its pictures on disk

    def _reconstruct_each(
        self, arm: ModelConfig, attack: str, uploads: dict[str, Upload]
    ) -> dict[str, _Attacked | str]:
        """Per picture the reconstruction, or the error that the attack ended with.

        Uploads of the same weights go in one stack; if that fails, one by one, so that an upload
        that cannot be attacked does not take the others with it.
        """
        made: dict[str, _Attacked | str] = {}
        for weights in dict.fromkeys(upload.weights for upload in uploads.values()):
            stack = {picture: upload for picture, upload in uploads.items() if upload.weights == weights}
            try:
                made |= self._reconstruct(arm, attack, stack)
            except Exception:  # noqa: BLE001 (any error of an attack is a result, told upload by upload)
                for picture, upload in stack.items():
                    made[picture] = self._reconstruct_or_error(arm, attack, picture, upload)
        return made

    def _reconstruct_or_error(self, arm: ModelConfig, attack: str, picture: str, upload: Upload) -> _Attacked | str:
        try:
            return self._reconstruct(arm, attack, {picture: upload})[picture]
        except Exception as error:  # noqa: BLE001 (as above)
            return _described(error)

    def _reconstruct(self, arm: ModelConfig, attack: str, stack: dict[str, Upload]) -> dict[str, _Attacked]:
        """Let the adversary at uploads of the same weights."""
        weights = next(iter(stack.values())).weights
        model = _sent_model(self.output.run.upload_folder(arm), arm, weights)
        adversary = Adversary(model, self.experiment.threat, self.experiment.federation.seed)
        started = time.perf_counter()
        reconstructions = adversary.reconstruct(attack, list(stack.values()))
        seconds = (time.perf_counter() - started) / len(stack)
        return {name: _Attacked(made, seconds) for name, made in zip(stack, reconstructions, strict=True)}

    def _scored(self, trial: PlannedTrial, private: PrivateBatch, upload: Upload, made: _Attacked) -> Trial:
        try:
            if not torch.equal(private.clean[0], trial.picture.image):
                raise RecordError(f"the client's picture {trial.picture.name!r} is not the planned one")
            values = evaluator.score(
                made.reconstruction,
                private,
                trial.cell.setting,
                metrics=self.experiment.metrics,
                protocol=self.experiment.protocol,
            )
        except Exception as error:  # noqa: BLE001 (any error of a score is a row)
            return self._failed(trial, _described(error))
        row = self._row(trial, status="ok", error=None)
        # Nothing was masked or shuffled in the gradient of an undefended clean picture.
        row.realised_ratio = float(private.mask.float().mean()) if trial.cell.mask_ratio else 0.0
        row.weights_sha256, row.attack_seconds = upload.weights, made.seconds
        row.scores = {name: None if value is None else float(value[0]) for name, value in values.items()}
        row.diagnostics = dict(made.reconstruction.diagnostics)
        return row

    def _save_pictures(self, trial: PlannedTrial, private: PrivateBatch, reconstruction: Reconstruction) -> None:
        pictures = self.output.pictures
        for version in Picture:
            save_png(private.version(version)[0], pictures.private(trial, version))
        save_png(reconstruction.images[0], pictures.reconstruction(trial))

    def _failed(self, trial: PlannedTrial, error: str) -> Trial:
        return self._row(trial, status="failed", error=error)

    def _row(self, trial: PlannedTrial, *, status: str, error: str | None) -> Trial:
        cell = trial.cell
        return Trial(
            key=trial.key,
            status=status,
            error=error,
            model=cell.model,
            defence=cell.defence,
            mask_ratio=cell.mask_ratio,
            attack=cell.attack,
            setting=str(cell.setting),
            protocol=cell.protocol,
            picture=trial.picture.name,
            picture_sha256=trial.picture.digest(),
            seed=self.experiment.federation.seed,
            scores={},
            diagnostics={},
            environment=_environment(),
        )


_environment = lru_cache(maxsize=1)(provenance.environment)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, FedmjpError) else f"{type(error).__name__}: {error}"


@lru_cache(maxsize=1)
def _sent_model(folder: UploadFolder, arm: ModelConfig, weights: str) -> VitClassifier:
    """The model as the server had sent it."""
    model = build(arm)
    model.load_state_dict(folder.weights(weights))
    return model


def _source(trial: PlannedTrial) -> tuple[str, Picture]:
    return trial.picture.name, trial.cell.setting.gradient_of


def _by_arm(trials: Iterable[PlannedTrial]) -> dict[ModelConfig, list[PlannedTrial]]:
    groups: defaultdict[ModelConfig, list[PlannedTrial]] = defaultdict(list)
    for trial in trials:
        groups[trial.arm].append(trial)
    return groups


def _by_reconstruction(trials: Iterable[PlannedTrial]) -> list[list[PlannedTrial]]:
    groups: defaultdict[tuple[str, Picture], list[PlannedTrial]] = defaultdict(list)
    for trial in trials:
        groups[trial.cell.attack, trial.cell.setting.gradient_of].append(trial)
    return list(groups.values())
