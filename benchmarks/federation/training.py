"""One federated training run on this machine: deals the pictures, starts Flower, and goes on where it was stopped."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.federation.round_records import describe_records
from benchmarks.federation.simulation import Resources, run_app
from fedmjp import provenance
from fedmjp.data.loading import steps_per_epoch
from fedmjp.data.partitions import Partition, partition
from fedmjp.errors import ConfigError, DataError
from fedmjp.learning import Training
from fedmjp.scenario import Scenario, run_config_of
from fedmjp.training.central import Pictures, open_pictures
from fedmjp.training.history import History, draw
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.training.state import load_state

# As the server logs them; what it quotes of a client stands further right.
SKIPPED = re.compile(r"^INFO\s*:\s+\[SKIPPED\] (.*)")
ROUND_DONE = re.compile(r"^INFO\s*:\s+\[ROUND (\d+)/\d+\] done")
SHARE_DIGITS = 10_000  # Ray counts a GPU's shares with four decimals


@dataclass(frozen=True)
class RoundReport:
    """A round, as it is told to the user.

    Attributes:
        round: Its number, from 1.
        top1: Validation accuracy after it.
        loss: Mean training loss of the clients; None if none told one.
        images_per_second: Of all clients together.
        clients: Whose replies were used.
        refused: Whose were not.
        skipped: Pictures that clients could not read.
    """

    round: int
    top1: float
    loss: float | None
    images_per_second: float
    clients: int
    refused: int
    skipped: int


class Listener(Protocol):
    """Who is told how a run goes on."""

    def round(self, report: RoundReport) -> None:
        """A round is done."""

    def skipped(self, reason: str) -> None:
        """A picture of the validation split cannot be read."""


def train_federated(
    scenario: Scenario, dealt: Partition, folder: TrainingFolder, resources: Resources, listener: Listener
) -> None:
    """Train, and leave everything in the folder.

    Args:
        scenario: What to train.
        dealt: Which client has which pictures, as it is in the partition file.
        folder: Of the run. If it holds a checkpoint of the same configuration, the run goes on there.
        resources: Of the simulation.
        listener: Is told how it goes on.

    Raises:
        DataError: If there are no pictures, or they cannot be dealt as asked.
        CheckpointError: If the folder's state is of another configuration.
        FederationError: If the run failed.
    """
    history = History(folder.history, folder.tensorboard)

    def on_line(line: str) -> None:
        if found := ROUND_DONE.search(line):
            rows = history.rows()
            listener.round(_report(rows[rows["round"] == int(found[1])].iloc[-1].to_dict()))
        elif found := SKIPPED.search(line):
            listener.skipped(found[1])

    training = training_of(scenario)
    records = str(records_folder(folder).resolve()) if training.records else ""
    run = run_config_of(
        [scenario],
        output_folder=str(folder.root.resolve()),
        partition_file=str(partition_file(folder).resolve()),
        share_sizes=tuple(map(len, dealt.shares)),
        uploads_folder=records,
        evaluator_folder=records,
    )
    run_app([(run.flat(), resources)], on_line)
    describe_records(scenario, records_folder(folder), tuple(map(len, dealt.shares)))
    draw(folder.history, folder.figure, title=f"{scenario.label}, {training.strategy}")


def training_of(scenario: Scenario) -> Training:
    """The training of a scenario.

    Raises:
        ConfigError: If it has none.
    """
    if scenario.training is None:
        raise ConfigError(f"{scenario.label} is a scenario of single batches: set training")
    return scenario.training


def rounds_done(scenario: Scenario, folder: TrainingFolder) -> int:
    """How many rounds the folder's last checkpoint had done.

    Raises:
        CheckpointError: If it is of another configuration.
    """
    state = load_state(folder.state, config=scenario.digest_of_run())
    return 0 if state is None else int(state["round"])


def partition_file(folder: TrainingFolder) -> Path:
    """Where a run keeps which client has which pictures."""
    return folder.root / "partition.npz"


def records_folder(folder: TrainingFolder) -> Path:
    """Where the rounds that are recorded go."""
    return folder.root / "records"


def deal(scenario: Scenario, kept: Path | None = None) -> tuple[Pictures, Partition]:
    """The pictures of a run, and which client has which.

    Args:
        scenario: Of the run.
        kept: The file of a run that goes on: what was dealt stays with whom it is.

    Raises:
        DataError: If there are no pictures, they cannot be dealt as asked, or are not those that were dealt.
    """
    pictures = open_pictures(scenario.data, scenario.model.classes)
    labels, config = pictures.train.labels, training_of(scenario).partition
    if kept is not None:
        return pictures, Partition.load(kept, labels, config, clients=scenario.clients, seed=scenario.seed)
    return pictures, partition(labels, config, clients=scenario.clients, seed=scenario.seed)


def plan_for(scenario: Scenario, dealt: Partition) -> Scenario:
    """The same with what follows for its defences from the pictures that clients have."""
    return scenario.planned(steps_per_epoch(max(map(len, dealt.shares)), training_of(scenario).recipe))


def check_recordable(scenario: Scenario, dealt: Partition) -> None:
    """Uploads of a batch that a record cannot describe are refused before anything is trained.

    Raises:
        ConfigError: With what to change.
        DataError: If a client has too few pictures for a batch.
    """
    training = training_of(scenario)
    if not training.records or training.update != "gradient":
        return
    recipe = training.recipe
    # A record holds pictures in [0, 1], each once and as it went into the network.
    for name, harmless in (("mixup", 0), ("cutmix", 0), ("random_erasing", 0), ("repeats", 1)):
        if getattr(recipe, name) != harmless:
            raise ConfigError(
                f"training.recipe.{name}={getattr(recipe, name):g} forbids recorded uploads: set it to {harmless}"
            )
    smallest = min(range(len(dealt.shares)), key=lambda client: len(dealt.shares[client]))
    if len(dealt.shares[smallest]) < recipe.batch_size:
        raise DataError(
            f"client {smallest} has {len(dealt.shares[smallest])} pictures, fewer than a recorded batch of "
            f"{recipe.batch_size}: set a smaller training.recipe.batch_size"
        )


def resources_for(scenario: Scenario, *, gpus_per_client: float | None) -> Resources:
    """As many clients at a time as there are cores, each with an equal share of cores and GPUs.

    Args:
        scenario: Of the run.
        gpus_per_client: Share of a GPU; None divides what there is.

    Raises:
        ConfigError: If a share was asked for that no GPU here can give.
    """
    cores = provenance.hardware()["cores"]
    processes = min(cores, len(scenario.participants(1)))
    if scenario.device == "cpu":
        if gpus_per_client:
            raise ConfigError(f"--gpus-per-client {gpus_per_client:g} was asked for, but the run is on the CPU")
        return Resources(scenario.clients, processes, cores // processes, 0)
    gpus = torch.cuda.device_count()
    if gpus_per_client is None:
        share = math.floor(SHARE_DIGITS / math.ceil(processes / gpus)) / SHARE_DIGITS
    elif 0 < gpus_per_client <= gpus:
        share = gpus_per_client
        processes = min(processes, int(gpus / share + 1e-6) if share >= 1 else gpus * int(1 / share + 1e-6))
    else:
        raise ConfigError(f"--gpus-per-client {gpus_per_client:g} is not above 0 and at most {gpus}")
    return Resources(scenario.clients, processes, cores // processes, share)


def _report(row: Mapping[Any, Any]) -> RoundReport:
    return RoundReport(
        round=int(row["round"]),
        top1=row["top1"],
        loss=None if math.isnan(row["loss"]) else row["loss"],
        images_per_second=row["images_per_second"],
        clients=int(row["clients"]),
        refused=int(row["refused"]),
        skipped=int(row["skipped"]),
    )
