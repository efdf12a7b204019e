"""A small experiment that tests run in direct mode; also a program that tests can kill."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engine import Engine
from benchmarks.experiment import Experiment, PlannedTrial, plan
from benchmarks.federation.simulation import RunFolder
from benchmarks.output import OutputFolder
from benchmarks.sources import DirectUploads, FederatedUploads, Recorded, Recorder
from fedmjp.config import FederationConfig
from fedmjp.data.selection import select_for
from fedmjp.records import record_name
from fedmjp.settings import Picture
from fedmjp.store import Store
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


class Printed:
    """Progress as lines, so that a test knows when to strike."""

    def federation(self, rounds: int) -> None:
        print("federation", rounds, flush=True)

    def round(self) -> None:
        pass

    def attacks(self, trials: int) -> None:
        print("attacks", trials, flush=True)

    def trials(self, done: int) -> None:
        print("trials", done, flush=True)

    def optimisation(self, done: int, total: int, loss: float) -> None:
        pass


def planned_trials(experiment: Experiment) -> list[PlannedTrial]:
    return plan(experiment, select_for(experiment.federation).batches(experiment.federation), uploads="federated")


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
    return Engine(experiment, output, Store.at(output.database), Printed(), source)


def run_small(root: Path) -> None:
    experiment, output = small_experiment(), OutputFolder(root)
    output.prepare(fresh=False)
    engine_of(experiment, output).run(planned_trials(experiment))


if __name__ == "__main__":
    run_small(Path(sys.argv[1]))
