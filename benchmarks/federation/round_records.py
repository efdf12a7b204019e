"""The recorded rounds of a training run, described so that they can be attacked like any other recording."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.federation.simulation import RECORDS, RunFolder
from benchmarks.folder.output import write_json
from fedmjp import provenance
from fedmjp.config import Checkpoint, FederationConfig
from fedmjp.data.loading import steps_per_epoch
from fedmjp.private import PrivateBatch
from fedmjp.settings import Picture
from fedmjp.training.config import FederatedConfig
from fedmjp.training.loop import localisation_weight
from fedmjp.training.run_folder import published
from fedmjp.wire import of_round
from server.uploads import WEIGHTS

ROUND_OF_TRAINING = "round of a federated training run"


def describe_records(config: FederatedConfig, records: Path, shares: Sequence[int]) -> list[RunFolder]:
    """Write the manifest of every round that was recorded.

    Args:
        config: Of the run.
        records: Folder of all rounds.
        shares: Number of pictures of each client.

    Returns:
        The rounds' folders.
    """
    found = {each: RunFolder(of_round(records, each)) for each in sorted(config.uploads)}
    found = {each: folder for each, folder in found.items() if folder.root.exists()}
    for server_round, folder in found.items():
        localised = {"localisation_weights": _localisation_weights(config, server_round, shares)}
        write_json(folder.root / "manifest.json", _manifest(config, folder) | localised)
    return list(found.values())


def _localisation_weights(config: FederatedConfig, server_round: int, shares: Sequence[int]) -> dict[str, float]:
    """Of the localisation loss in each client's gradient, where the server can compute what it adds.

    "pca" depends on what the client draws, and masks of single pictures cannot be read off the gradient of several.
    """
    training = config.training
    recipe, puzzle = training.recipe, training.puzzle
    told = recipe.batch_size == 1 or puzzle.masks == "batch" or training.model.defence != "mjp"
    if config.strategy != "fedsgd" or training.model.localisation not in ("linear", "nonlinear") or not told:
        return {}
    weights = {}
    for client, pictures in enumerate(shares):
        steps = steps_per_epoch(pictures, recipe)
        epoch, epochs = (server_round - 1) // steps, -(-config.rounds // steps)
        weights[str(client)] = localisation_weight(puzzle, recipe, epoch, epochs)
    return weights


def _manifest(config: FederatedConfig, folder: RunFolder) -> dict[str, Any]:
    pictures: dict[str, str] = {}
    for path in sorted((folder.evaluator / config.training.model.label).glob(RECORDS)):
        private = PrivateBatch.load(path)
        pictures |= {name: private.sha256(place) for place, name in enumerate(private.pictures)}
    recorded = published(recorded_as(config, uploads=folder.count()))
    about = {"kind": ROUND_OF_TRAINING, "config": recorded, "pictures": pictures}
    # What was uploaded is the change of the weights under this recipe, which is none of plain SGD.
    recipe = {} if config.strategy == "fedsgd" else {"recipe": config.training.recipe.model_dump(mode="json")}
    return about | recipe | dict(provenance.environment())


def sent_weights(folder: RunFolder, config: FederationConfig) -> dict[str, Checkpoint]:
    """The trained weights that uploads were computed with, by arm; none if the folder is not of a training run."""
    about = json.loads((folder.root / "manifest.json").read_text(encoding="utf-8"))
    if about.get("kind") != ROUND_OF_TRAINING:
        return {}
    files = [(arm.label, path) for arm in config.arms for path in (folder.uploads / arm.label).glob(WEIGHTS)]
    return {label: Checkpoint.of(path) for label, path in files}


def recorded_as(config: FederatedConfig, *, uploads: int) -> FederationConfig:
    """A round of a training run as a federation of which every client uploads one batch."""
    training, fedsgd = config.training, config.strategy == "fedsgd"
    puzzled = training.puzzle.shuffle == "jigsaw"
    shared = ("image_size", "patch_size", "classes", "index_embedding", "localisation", "localisation_layers", "seed")
    return FederationConfig.parse(
        {
            **{name: getattr(training.model, name) for name in shared},
            "models": (training.model.name,),
            "defences": (training.model.defence,),
            "mask_ratio": training.puzzle.mask_ratio if puzzled else 0.0,
            "data": training.data,
            "clients": max(uploads, 1),
            "pictures_per_client": training.recipe.batch_size,
            "batch_size": training.recipe.batch_size,
            "inputs": (Picture.SHUFFLED if puzzled else Picture.CLEAN,),
            "update": "gradient" if fedsgd else "delta",
            "server_learning_rate": config.server_rate if fedsgd else 0.0,
            "device": training.device,
        }
    )
