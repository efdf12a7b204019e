"""Small experiments that tests run in direct mode."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.federation.simulation import RunFolder
from benchmarks.folder.output import OutputFolder
from benchmarks.folder.store import Store
from benchmarks.plan.experiment import Experiment, Plan, PlannedTrial
from benchmarks.plan.planning import plan
from benchmarks.running.engine import Engine, JobReport, Silent
from benchmarks.running.retention import Keep
from benchmarks.running.workers import Setup
from benchmarks.uploads.direct import DirectUploads
from benchmarks.uploads.source import FederatedUploads, Recorded, Recorder
from fedmjp.config import FederationConfig
from fedmjp.data.selection import select_for
from fedmjp.records import record_name
from fedmjp.settings import Picture
from server.uploads import UploadFolder


def small_experiment(**federation: object) -> Experiment:
    """DeiT-Ti at 64 x 64, with and without MJP, four pictures."""
    values = {"clients": 2, "pictures_per_client": 2, "image_size": 64, "patch_size": 8, **federation}
    return Experiment(
        federation=FederationConfig(
            models=("deit_tiny", "deit_tiny_april"), defences=("none", "mjp"), inputs=tuple(Picture), **values
        ),
        attacks={"deit_tiny": ("patch_embedding", "grey"), "deit_tiny_april": ("april", "grey")},
    )


ATTACKS = ("patch_embedding", {"name": "patch_embedding", "options": {"reading": "zeros"}}, "grey")


def small_campaign(
    folder: Path,
    *,
    pictures: int = 4,
    seeds: Sequence[int] = (0, 1),
    mask_ratios: Sequence[float] = (0.27, 0.5),
    attacks: Sequence[object] = ATTACKS,
    keep: Keep = "extremes",
) -> tuple[Plan, Setup]:
    """DeiT-Ti with and without MJP, one part per seed and mask ratio, all on the same pictures."""
    experiments = [
        Experiment(
            federation=FederationConfig(
                models=("deit_tiny",),
                defences=("none", "mjp"),
                inputs=tuple(Picture),
                clients=1,
                pictures_per_client=pictures,
                image_size=64,
                patch_size=8,
                seed=seed,
                mask_ratio=mask_ratio,
            ),
            attacks={"deit_tiny": attacks},
            metrics=("mse", "psnr"),
        )
        for seed in seeds
        for mask_ratio in mask_ratios
    ]
    selection = select_for(experiments[0].federation)
    batches = [selection.batches(experiment.federation) for experiment in experiments]
    output = OutputFolder(folder)
    output.prepare(fresh=False)
    setup = Setup(output, tuple(experiments), selection, keep=keep, threads=1)
    return plan(experiments, batches, uploads="direct"), setup


def moved(setup: Setup, folder: Path, keep: Keep = "extremes") -> Setup:
    """The same campaign in another folder."""
    output = OutputFolder(folder)
    output.prepare(fresh=False)
    return replace(setup, output=output, keep=keep)


def rows(plan: Plan, setup: Setup) -> dict[str, dict[str, Any]]:
    """What is in the store of a plan's trials, without times."""
    found = setup.store().trials([trial.key for trial in plan.trials])
    times = {"attack_seconds": None, "recorded_at": None}
    return {trial.key: asdict(trial) | times for trial in found}


def files(setup: Setup) -> dict[str, bytes]:
    """All files in the folder of pictures."""
    root = setup.output.pictures.root
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Told(Silent):
    """Progress that remembers."""

    def __init__(self) -> None:
        self.announced = self.done = 0
        self.reports: list[JobReport] = []

    def attacks(self, trials: int) -> None:
        self.announced = trials

    def trials(self, done: int) -> None:
        self.done += done

    def job(self, report: JobReport) -> None:
        self.reports.append(report)


def planned_trials(experiment: Experiment) -> list[PlannedTrial]:
    batches = select_for(experiment.federation).batches(experiment.federation)
    return plan([experiment], [batches], uploads="federated").trials


def record_directly(
    config: FederationConfig,
    folder: RunFolder,
    *,
    upload_tensors: Sequence[str] = (),
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Records what Flower would, without it: same uploads, a client's node is its number."""
    whole = {"attacks": dict.fromkeys(config.models, ("grey",)), "settings": (), "federation": config}
    source = DirectUploads(Experiment(**whole), select_for(config))
    batches = [tuple(entry.name for entry in batch) for batch in source.selection.batches(config)]
    for arm in config.arms:
        kept = UploadFolder(folder.uploads / arm.label, frozenset(upload_tensors))
        kept.keep_weights(source.model(arm, "").state_dict())
        for version in config.inputs:
            on_round()
            for made in source.uploads(arm, version, batches).values():
                assert isinstance(made, Recorded)
                kept.keep(made.upload)
                path = folder.evaluator / arm.label / record_name(made.upload.server_round, made.upload.node)
                made.private.save(path)


def engine_of(experiment: Experiment, output: OutputFolder, record: Recorder = record_directly) -> Engine:
    source = FederatedUploads(experiment, output.run, lambda: None, record)
    return Engine(experiment, output, Store.at(output.database), Silent(), source)


def run_small(root: Path) -> None:
    experiment, output = small_experiment(), OutputFolder(root)
    output.prepare(fresh=False)
    engine_of(experiment, output).run(planned_trials(experiment))
