"""Runs what is missing of an experiment: federation, attacks, scores, rows."""

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from attacks import ATTACKS
from benchmarks import evaluator
from benchmarks.campaign import Experiment, PlannedTrial
from benchmarks.federation.simulation import RunFolder, simulate
from benchmarks.output import OutputFolder, write_json
from benchmarks.pictures import save_png
from fedmjp.config import FederationConfig, ModelConfig
from fedmjp.errors import FedmjpError
from fedmjp.models.build import build
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import PrivateBatch, Reconstruction, Upload
from fedmjp.settings import Picture
from fedmjp.store import Store, Trial
from server.adversary import Adversary
from server.uploads import UploadFolder


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
        if not missing:
            return
        federation_error = self._federate()
        self.progress.attacks(len(missing))
        for arm, trials in _by_arm(missing).items():
            self._attack_arm(arm, trials, federation_error)
        if not self._missing(planned):
            shutil.rmtree(self.output.run.root)

    def _missing(self, planned: Sequence[PlannedTrial]) -> list[PlannedTrial]:
        finished = self.store.finished([trial.key for trial in planned])
        return [trial for trial in planned if trial.key not in finished]

    def _federate(self) -> str | None:
        """Have the uploads recorded, unless they are there; return the error of a failed run."""
        folder, federation, tensors = self.output.run, self.experiment.federation, self._tensors()
        marker = folder.root / "completed.json"
        recorded = {"config": federation.digest(), "tensors": tensors}
        if marker.exists() and json.loads(marker.read_text()) == recorded:
            return None
        if folder.root.exists():
            shutil.rmtree(folder.root)
        self.progress.federation(federation.rounds * len(federation.arms))
        try:
            self.record(federation, folder, upload_tensors=tensors, on_round=self.progress.round)
        except FedmjpError as error:
            return str(error)
        write_json(marker, recorded)
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
            reason = federation_error or "the client uploaded nothing"
            self.store.put(_failed(trial, self.experiment, reason) for trial in absent)
            self._attack_group(arm, present, [pairs[_source(trial)] for trial in present])
            self.progress.trials(len(group))

    def _attack_group(
        self, arm: ModelConfig, trials: list[PlannedTrial], pairs: list[tuple[PrivateBatch, Upload]]
    ) -> None:
        """Trials that share attack and version: each upload is attacked once and scored per setting."""
        if not trials:
            return
        uploads = {trial.picture.name: upload for trial, (_, upload) in zip(trials, pairs, strict=True)}
        started = time.perf_counter()
        try:
            reconstructions = self._reconstruct(arm, trials[0].cell.attack, uploads)
        except FedmjpError as error:
            self.store.put(_failed(trial, self.experiment, str(error)) for trial in trials)
            return
        seconds = (time.perf_counter() - started) / len(uploads)
        self._save_pictures(trials, pairs, reconstructions)
        self.store.put(
            self._score(trial, private, upload, reconstructions[trial.picture.name], seconds)
            for trial, (private, upload) in zip(trials, pairs, strict=True)
        )

    def _save_pictures(
        self,
        trials: list[PlannedTrial],
        pairs: list[tuple[PrivateBatch, Upload]],
        reconstructions: dict[str, Reconstruction],
    ) -> None:
        """Before the rows: a row in the store means that its pictures are on disk."""
        folder = self.output.pictures
        once = {trial.picture.name: (trial, private) for trial, (private, _) in zip(trials, pairs, strict=True)}
        for name, (trial, private) in once.items():
            for version in Picture:
                save_png(private.version(version)[0], folder.private(name, version))
            save_png(reconstructions[name].images[0], folder.reconstruction(name, trial.cell))

    def _reconstruct(self, arm: ModelConfig, attack: str, uploads: dict[str, Upload]) -> dict[str, Reconstruction]:
        """Let the adversary at the uploads, those of the same weights in one stack."""
        made: dict[str, Reconstruction] = {}
        for weights in dict.fromkeys(upload.weights for upload in uploads.values()):
            stack = {picture: upload for picture, upload in uploads.items() if upload.weights == weights}
            model = _sent_model(self.output.run.upload_folder(arm), arm, weights)
            adversary = Adversary(model, self.experiment.threat, self.experiment.federation.seed)
            made.update(zip(stack, adversary.reconstruct(attack, list(stack.values())), strict=True))
        return made

    def _score(
        self,
        trial: PlannedTrial,
        private: PrivateBatch,
        upload: Upload,
        reconstruction: Reconstruction,
        seconds: float,
    ) -> Trial:
        try:
            values = evaluator.score(
                reconstruction,
                private,
                trial.cell.setting,
                metrics=self.experiment.metrics,
                protocol=self.experiment.protocol,
            )
        except FedmjpError as error:
            return _failed(trial, self.experiment, str(error))
        row = _row(trial, self.experiment)
        row.status, row.error = "ok", None
        # Nothing was masked or shuffled in the gradient of an undefended clean picture.
        row.realised_ratio = float(private.mask.float().mean()) if trial.cell.mask_ratio else 0.0
        row.weights_sha256, row.attack_seconds = upload.weights, seconds
        row.scores = {name: None if value is None else float(value[0]) for name, value in values.items()}
        row.diagnostics = dict(reconstruction.diagnostics)
        return row


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


def _row(trial: PlannedTrial, experiment: Experiment) -> Trial:
    cell = trial.cell
    return Trial(
        key=trial.key,
        model=cell.model,
        defence=cell.defence,
        mask_ratio=cell.mask_ratio,
        attack=cell.attack,
        setting=str(cell.setting),
        protocol=cell.protocol,
        picture=trial.picture.name,
        picture_sha256=trial.picture.digest(),
        seed=experiment.federation.seed,
        scores={},
        diagnostics={},
    )


def _failed(trial: PlannedTrial, experiment: Experiment, error: str) -> Trial:
    row = _row(trial, experiment)
    row.status, row.error = "failed", error
    return row
