"""Manifests of the recorded rounds of a training run, with which they are attacked like any other recording."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedmjp import provenance
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.folder.output import write_json
from fedmjp.data.loading import steps_per_epoch
from fedmjp.learning import Training
from fedmjp.scenario import Scenario, TrainingScenario
from fedmjp.training.loop import localisation_weight
from fedmjp.wire import round_folder

ROUND_OF_TRAINING = "round of a federated training run"


def describe_records(scenario: TrainingScenario, records: Path, shares: Sequence[int]) -> list[RunFolder]:
    """Write the manifest of every round that was recorded.

    Args:
        scenario: Of the run.
        records: Folder of all rounds.
        shares: Number of pictures of each client.
    """
    training = scenario.training
    folders = {number: RunFolder(round_folder(records, number)) for number in sorted(training.records)}
    folders = {number: folder for number, folder in folders.items() if folder.root.exists()}
    for server_round, folder in folders.items():
        localised = _localisation_weights(scenario, training, server_round, shares)
        about = _manifest(scenario, training, folder) | {"localisation_weights": localised}
        write_json(folder.root / "manifest.json", about | provenance.environment())
    return list(folders.values())


def _localisation_weights(
    scenario: TrainingScenario, training: Training, server_round: int, shares: Sequence[int]
) -> dict[str, float]:
    """Compute the weight of the localisation loss in each client's gradient, where the server can compute that loss.

    "pca" depends on the client's draws, masks of single pictures cannot be read off the gradient of several, and
    a defence's change of an update cannot be undone.
    """
    recipe, puzzle, network = training.recipe, training.puzzle, scenario.network
    readable = recipe.batch_size == 1 or puzzle.masks == "batch" or not network.unknown_embedding
    computed = training.update == "gradient" and network.localisation in ("linear", "nonlinear")
    if not (computed and readable) or scenario.threat.defences:
        return {}
    weights = {}
    for client, pictures in enumerate(shares):
        steps = steps_per_epoch(pictures, recipe)
        epoch, epochs = (server_round - 1) // steps, -(-training.rounds // steps)
        weights[str(client)] = localisation_weight(puzzle, recipe, epoch, epochs)
    return weights


def _manifest(scenario: TrainingScenario, training: Training, folder: RunFolder) -> dict[str, Any]:
    recorded = describe_round(scenario, training, uploads=folder.count())
    pictures: dict[str, str] = {}
    for paths in folder.index(recorded).values():
        for path in paths:
            private, _ = folder.record(recorded, path)
            pictures |= {name: private.sha256(place) for place, name in enumerate(private.pictures)}
    about = {"kind": ROUND_OF_TRAINING, "scenarios": [recorded.published()], "pictures": pictures}
    # The upload is the change of the weights under this recipe, which is none of plain SGD.
    return about | ({} if training.update == "gradient" else {"recipe": training.recipe.model_dump(mode="json")})


def describe_round(scenario: TrainingScenario, training: Training, *, uploads: int) -> Scenario:
    """Describe a round of a training run as a scenario in which every client uploads one batch.

    Args:
        scenario: Of the training.
        training: Its settings.
        uploads: Number of uploads in the round.
    """
    shared = ("model", "defences", "data", "labels_known", "seed", "device")
    size, gradients = training.recipe.batch_size, training.update == "gradient"
    return Scenario.parse(
        {
            **{name: getattr(scenario, name) for name in shared},
            "clients": max(uploads, 1) * scenario.pipeline.clients,
            "pictures_per_client": size,
            **training.step.model_dump(),
            "mixup": 0.0,  # not described: whose upload is mixed is not attacked
            "server_learning_rate": scenario.server_rate if gradients else 0.0,
        }
    )
