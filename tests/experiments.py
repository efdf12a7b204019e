"""A small experiment that tests run in direct mode; also a program that tests can kill."""

import sys
from pathlib import Path

from benchmarks.campaign import Experiment, PlannedTrial, plan
from benchmarks.direct import record_directly
from benchmarks.engine import Engine
from benchmarks.output import OutputFolder
from fedmjp.config import FederationConfig
from fedmjp.data.selection import select_for
from fedmjp.settings import Picture
from fedmjp.store import Store


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


def planned_trials(experiment: Experiment) -> list[PlannedTrial]:
    return plan(experiment, select_for(experiment.federation).pictures)


def run_small(root: Path) -> None:
    experiment, output = small_experiment(), OutputFolder(root)
    output.prepare(fresh=False)
    Engine(experiment, output, Store(output.database), Printed(), record=record_directly).run(
        planned_trials(experiment)
    )


if __name__ == "__main__":
    run_small(Path(sys.argv[1]))
