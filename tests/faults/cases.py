"""The table of cases: what is started, which processes may be killed, what must hold at the end."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.errors import FedmjpError
from fedmjp.server.refusals import RefusalFile
from fedmjp.training.run_folder import TrainingFolder
from tests.faults.harness import Case

MODEL = {"name": "deit_micro", "image_size": 64, "patch_size": 8, "classes": 4}
RECIPE = {"batch_size": 2, "learning_rate": 0.05, "warmup_epochs": 0, "mixup": 0, "cutmix": 0}
CLIENTS, PICTURES = 3, 12
TIMES = ["seconds", "images_per_second", "upload_seconds"]  # columns of the history that no two runs share
CAMPAIGN: dict[str, Any] = {
    "name": "faults",
    "data": {"pictures": 4},
    "image_size": 64,
    "patch_size": 8,
    "metrics": ["mse", "psnr", "ssim"],
    "grids": [
        {
            "models": ["deit_micro"],
            "defences": ["none", "mjp", "round"],
            "attacks": ["patch_embedding", "patch_embedding_wiener", "mjp_prior", "grey"],
        }
    ],
}


def write_pictures(folder: Path) -> None:
    """Write pictures of noise, in as many classes as the model knows."""
    generator = np.random.default_rng(0)
    for number in range(PICTURES):
        path = folder / "pictures" / f"class-{number % int(str(MODEL['classes']))}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((72, 72), Image.Resampling.BICUBIC).save(path)


def simulation(rounds: int) -> Case:
    """A federated run of so many rounds on this machine; ``quorum=1``: a round that lacks a client does not count."""

    def words(inputs: Path, output: Path) -> list[str]:
        command = ["simulate", "--data", str(inputs / "pictures"), "--output", str(output), "--device", "cpu"]
        command += ["--clients", str(CLIENTS), "--rounds", str(rounds), "--strategy", "fedadam", "--defence", "mjp"]
        command += ["quorum=1", *(f"model.{key}={value}" for key, value in MODEL.items())]
        return command + [f"recipe.{key}={value}" for key, value in RECIPE.items()]

    return Case(
        words,
        write_pictures,
        victims={
            "guard": "fedmjp.benchmarks.federation.guard",  # its command line holds the SuperLink's
            "follower of the log": "flwr log",
            "SuperLink": "locked_superlink",
            "SuperExec": "flower-superexec",
            "the server's app": "flwr-simulation",
            "a client": "ray::ClientAppActor",
            "raylet": "raylet/raylet",
            "Ray's GCS": "gcs_server",
            "an agent of Ray": "Agent",
        },
        progress=_rounds,
        differences=_differences_in_training,
        pauses=(45.0, 10.0),
    )


def campaign(draws: int) -> Case:
    """A campaign in two processes, of so many draws of weights."""

    def prepare(folder: Path) -> None:
        (folder / "campaign.yaml").write_text(yaml.safe_dump({**CAMPAIGN, "seeds": list(range(draws))}))

    def words(inputs: Path, output: Path) -> list[str]:
        return ["campaign", "run", str(inputs / "campaign.yaml"), "--output", str(output), "--workers", "2"]

    return Case(
        words,
        prepare,
        victims={"a worker": "ray::Worker", "raylet": "raylet/raylet", "Ray's GCS": "gcs_server"},
        progress=_trials,
        differences=_differences_in_trials,
        pauses=(10.0, 2.0),
    )


# By name, with rounds or draws of weights of a long run.
CASES = {"simulation": (simulation, 20), "campaign": (campaign, 8)}


def _rounds(output: Path) -> int:
    path = TrainingFolder(output).history
    return max(path.read_text().count("\n") - 1, 0) if path.exists() else 0


def _differences_in_training(output: Path, expected: Path) -> list[str]:
    ours, theirs = TrainingFolder(output), TrainingFolder(expected)
    faults = []
    weights, reference = load_file(ours.weights), load_file(theirs.weights)
    if weights.keys() != reference.keys() or any(not torch.equal(weights[name], reference[name]) for name in reference):
        faults.append("the weights differ")
    histories = [pd.read_csv(folder.history).drop(columns=TIMES) for folder in (ours, theirs)]
    if not histories[0].equals(histories[1]):
        faults.append("the history differs")
    if refused := RefusalFile(ours.refused).read():
        faults.append(f"replies are listed as refused: {refused}")
    return faults


def _trials(output: Path) -> int:
    folder = OutputFolder(output)
    if not folder.database.exists():
        return 0
    try:
        store = folder.store()
        count = store.counts().get("ok", 0)
        store.close()
    except FedmjpError:  # it is being made
        return 0
    return count


def _differences_in_trials(output: Path, expected: Path) -> list[str]:
    folders = OutputFolder(output), OutputFolder(expected)
    ours, theirs = ({trial.key: trial for trial in folder.store().trials([*_keys(folder)])} for folder in folders)
    faults = []
    if ours.keys() != theirs.keys() or {trial.status for trial in ours.values()} != {"ok"}:
        faults.append(f"{len(ours)} trials instead of {len(theirs)}, or failed ones")
    elif any(ours[key].scores != theirs[key].scores for key in theirs):
        faults.append("scores differ")
    pictures = [
        {path.relative_to(folder.pictures): path.read_bytes() for path in folder.pictures.rglob("*.png")}
        for folder in folders
    ]
    if pictures[0] != pictures[1]:
        faults.append("pictures differ")
    return faults


def _keys(folder: OutputFolder) -> list[str]:
    return [str(key) for key in folder.store().frame()["key"]]
