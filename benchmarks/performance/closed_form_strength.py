"""What closed forms recover, with and without MJP, in all settings, on many pictures.

``python -m benchmarks.performance.closed_form_strength --model deit_small --pictures FOLDER --n 200 --output DIR``

Writes leaderboard.csv, leaderboard.md and manifest.json; the manifest holds seconds and peak memory
too. Pictures that the prior was measured on are left out. No picture is kept.
"""

import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from attacks.natural_patches import measured_on
from benchmarks.engine import Engine
from benchmarks.experiment import Experiment, plan
from benchmarks.leaderboard.summary import leaderboard
from benchmarks.manifest import manifest
from benchmarks.output import OutputFolder, write_json
from benchmarks.report import tables
from benchmarks.report.render import notes
from benchmarks.sources import DirectUploads
from fedmjp.config import FederationConfig
from fedmjp.data.selection import open_source, select
from fedmjp.settings import Picture
from fedmjp.store import Store

ATTACKS_OF = {
    "deit_small": ("patch_embedding", "patch_embedding_wiener", "oracle_patch_embedding", "grey"),
    "deit_small_april": ("april", "april_min_norm", "oracle_april", "grey"),
}
MASK_RATIO = 0.27
SEED = 0
WIDTH = 140


class _Silent:
    """Progress of a run that nobody watches."""

    def federation(self, rounds: int) -> None:
        """Nothing."""

    def round(self) -> None:
        """Nothing."""

    def attacks(self, trials: int) -> None:
        """Nothing."""

    def trials(self, done: int) -> None:
        """Nothing."""

    def optimisation(self, done: int, total: int, loss: float) -> None:
        """Nothing."""


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(ATTACKS_OF)}.")],
    pictures: Annotated[Path, typer.Option(help="FOLDER/CLASS/picture.")],
    output: Annotated[Path, typer.Option(help="Folder for the tables.")],
    n: Annotated[int, typer.Option(help="Number of pictures.")] = 200,
) -> None:
    """Run and write."""
    experiment = _experiment(model, pictures, n)
    federation = experiment.federation
    source = open_source(federation.data, size=federation.image_size, classes=federation.classes)
    selection = select(source, n, seed=SEED, leave_out=measured_on)
    planned = plan(experiment, selection.batches(federation), uploads="direct")
    console = Console(width=WIDTH)
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = OutputFolder(Path(scratch)), time.perf_counter()
        store = Store.at(folder.database)
        Engine(experiment, folder, store, _Silent(), DirectUploads(experiment, selection)).run(planned)
        trials = store.trials([trial.key for trial in planned])
        store.close()
    about = manifest(experiment, planned, trials, uploads="computed in process (direct mode)")
    about["config"]["federation"]["data"] = "FOLDER"
    module = "python -m benchmarks.performance.closed_form_strength"
    about["command"] = f"{module} --model {model} --pictures FOLDER --n {n} --output DIR"
    about["threads"] = torch.get_num_threads()
    about["seconds"] = round(time.perf_counter() - began, 1)
    about["peak_memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)
    board = leaderboard(planned, trials, experiment.metrics)
    output.mkdir(parents=True, exist_ok=True)
    tables.write_csv(board, output / "leaderboard.csv")
    lines = [f"Threat model: {experiment.threat.sentence()}", *notes(experiment, board)]
    tables.write_markdown(board, experiment.metrics, lines, output / "leaderboard.md")
    write_json(output / "manifest.json", about)
    tables.print_table(board, experiment.metrics, console)
    console.print(f"{about['seconds']} s, peak memory {about['peak_memory_gb']} GB")


def _experiment(model: str, pictures: Path, n: int) -> Experiment:
    return Experiment(
        federation=FederationConfig(
            models=(model,),
            defences=("none", "mjp"),
            mask_ratio=MASK_RATIO,
            data=str(pictures.resolve()),
            clients=1,
            pictures_per_client=n,
            inputs=tuple(Picture),
            seed=SEED,
        ),
        attacks={model: ATTACKS_OF[model]},
        metrics=("mse", "psnr", "ssim", "fft2d"),
    )


if __name__ == "__main__":
    typer.run(main)
