"""Small experiments that tests run in direct mode."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment, Keep, experiments_of, named
from fedmjp.benchmarks.plan.planning import plan
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.running.engine import Engine
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import Recorder, run_experiment
from fedmjp.benchmarks.running.workbench import Setup
from fedmjp.benchmarks.uploads.direct import DirectUploads
from fedmjp.benchmarks.uploads.source import FederatedRun, RecordedUploads
from fedmjp.data.pictures import PictureEntry
from fedmjp.data.selection import select_for
from fedmjp.exchange import Exchange
from fedmjp.models.build import build_vit
from fedmjp.records import record_name
from fedmjp.scenario import Scenario
from fedmjp.server.uploads import UploadFolder
from fedmjp.settings import Picture, Setting

MODELS = {"deit_tiny": "patch_embedding", "deit_tiny_april": "april"}


def small_experiments(
    *, models: Mapping[str, object] = MODELS, mask_ratio: float = 0.27, **scenario: object
) -> list[Experiment]:
    """DeiT-Ti at 64 x 64, with and without MJP, four pictures, three settings."""
    found: list[Experiment] = []
    for name, attack in models.items():
        for defences in ("none", f"mjp:mask_ratio={mask_ratio}"):
            values = {"clients": 2, "pictures_per_client": 2, **scenario}
            model = {"name": name, "image_size": 64, "patch_size": 8, "seed": values.get("seed", 0)}
            asked = Scenario.parse({"model": model, "defences": defences, **values})
            attacks = tuple(AttackConfig.parse(named(each)) for each in (attack, "grey"))
            found += experiments_of(asked, tuple(Setting), attacks, mask_ratio=mask_ratio)
    return found


ATTACKS = ("patch_embedding", {"name": "patch_embedding", "options": {"reading": "zeros"}}, "grey")


def small_campaign(
    folder: Path,
    *,
    pictures: int = 4,
    seeds: Sequence[int] = (0, 1),
    mask_ratios: Sequence[float] = (0.27, 0.5),
    attacks: Sequence[object] = ATTACKS,
    keep: Keep = "extremes",
    source: str = "bundled",
    **grid: object,
) -> tuple[TrialPlan, Setup]:
    """DeiT-Ti with and without MJP in three settings, all on the same pictures, unless the grid says otherwise."""
    campaign = Campaign.parse(
        {
            "name": "small",
            "data": {"source": source, "pictures": pictures},
            "grids": [{"models": ["deit_tiny"], "attacks": attacks, "mask_ratios": mask_ratios, **grid}],
            "seeds": seeds,
            "metrics": ("mse", "psnr"),
            "image_size": 64,
            "patch_size": 8,
        }
    )
    experiments = campaign.experiments(device="cpu")
    selection = select_for(experiments[0].scenario)
    batches = [selection.batches(experiment.scenario) for experiment in experiments]
    output = OutputFolder(folder)
    output.prepare(fresh=False)
    setup = Setup(output, tuple(experiments), selection, keep=keep, threads=1)
    return plan(experiments, batches, uploads="direct"), setup


def moved(setup: Setup, folder: Path, keep: Keep = "extremes") -> Setup:
    """The same campaign in another folder."""
    output = OutputFolder(folder)
    output.prepare(fresh=False)
    return replace(setup, output=output, keep=keep)


def rows(plan: TrialPlan, setup: Setup) -> dict[str, dict[str, Any]]:
    """What is in the store of a plan's trials, without times."""
    found = setup.store().trials([trial.key for trial in plan.tasks])
    times = {"attack_seconds": None, "recorded_at": None}
    return {trial.key: asdict(trial) | times for trial in found}


def files(setup: Setup) -> dict[str, bytes]:
    """All files in the folder of pictures."""
    root = setup.output.pictures
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Told(RunProgress):
    """Progress that remembers."""

    def __init__(self) -> None:
        self.announced = self.done = 0

    def attacks(self, trials: int) -> None:
        self.announced = trials

    def trials(self, done: int) -> None:
        self.done += done


def planned(experiments: Sequence[Experiment]) -> TrialPlan:
    selection = select_for(experiments[0].scenario)
    return plan(experiments, [selection.batches(each.scenario) for each in experiments], uploads="federated")


def record_directly(
    scenarios: Sequence[Scenario],
    folder: RunFolder,
    *,
    upload_tensors: Sequence[str] = (),
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Records what Flower would, without it: same uploads, a client's node is its number."""
    for scenario in scenarios:
        recorded = _recorded(scenario, tuple(upload_tensors), select_for(scenario).entries)
        on_round()
        for records in (recorded.uploads, recorded.evaluator):
            shutil.copytree(records, folder.root / records.name, dirs_exist_ok=True)


HOME = tempfile.TemporaryDirectory()  # removed with the process


@cache
def _recorded(scenario: Scenario, upload_tensors: tuple[str, ...], _entries: Sequence[PictureEntry]) -> RunFolder:
    """The records of one scenario on these pictures, which several tests take copies of."""
    folder = RunFolder(Path(tempfile.mkdtemp(dir=HOME.name)))
    setting = Setting.A if scenario.gradient_of is Picture.CLEAN else Setting.B
    experiment = Experiment.parse({"scenario": scenario, "attacks": ("grey",), "settings": (setting,)})
    source = DirectUploads(experiment, select_for(scenario))
    batches = [tuple(entry.name for entry in batch) for batch in source.selection.batches(scenario)]
    kept = UploadFolder(folder.uploads / scenario.folder, frozenset(upload_tensors))
    kept.keep_weights(build_vit(scenario.network).state_dict())
    for made in source.uploads(batches).values():
        assert isinstance(made, Exchange)
        kept.keep(made.upload)
        path = folder.evaluator / scenario.folder / record_name(made.upload.server_round, made.upload.node)
        made.private.save(path)
    return folder


def run(plan: TrialPlan, output: OutputFolder, record: Callable[..., None] = record_directly) -> None:
    """What the quickstart does with a plan."""
    store = Store.at(output.database)
    keys = [trial.key for trial in plan.tasks]
    federated = FederatedRun(plan, output.run, RunProgress(), record)
    error = federated.prepare() if len(store.finished(keys)) < len(keys) else None
    for part in plan.parts:
        engine = Engine(part.experiment, RecordedUploads(part.experiment, output.run))
        run_experiment(engine, part.trials, Recorder(output, store, RunProgress()), error)
    if len(store.finished(keys)) == len(keys):
        federated.finish()


def run_small(root: Path) -> None:
    output = OutputFolder(root)
    output.prepare(fresh=False)
    run(planned(small_experiments()), output)
