"""One federated training run on this machine: deals the pictures, starts Flower, and goes on where it was stopped."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedmjp.benchmarks.federation.round_records import describe_records
from fedmjp.benchmarks.federation.simulation import Resources, run_app
from fedmjp.data.loading import steps_per_epoch
from fedmjp.data.partitions import Partition, partition
from fedmjp.errors import ConfigError, FederationError, QuorumError
from fedmjp.running import KEPT
from fedmjp.scenario import TrainingScenario, make_run_config
from fedmjp.server.events import Event
from fedmjp.training.central import Pictures, open_pictures
from fedmjp.training.curves import draw
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.training.state import load_state

# A record holds pictures in [0, 1], each once and as it went into the network, and batches that every client can fill.
AS_SHOWN = {"mixup": 0, "cutmix": 0, "random_erasing": 0, "repeats": 1}
TRIES = 3  # of a round in which too few clients answer


def train_federated(
    scenario: TrainingScenario,
    dealt: Partition,
    folder: TrainingFolder,
    resources: Resources,
    on_round: Callable[[Mapping[Any, Any]], None] = lambda _row: None,
    on_skipped: Callable[[str], None] = lambda _reason: None,
    on_again: Callable[[str], None] = lambda _reason: None,
) -> None:
    """Train, and leave everything in the folder; a run goes on from the folder's checkpoint.

    Args:
        scenario: Of the training.
        dealt: The pictures of each client, as in the partition file.
        folder: Of the run.
        resources: Of the simulation.
        on_round: Called with each round's row of the history; it holds NaN where the history holds nothing.
        on_skipped: Called with the reason for every picture of the validation split that cannot be read.
        on_again: Called with the reason whenever a round is played again.

    Raises:
        CheckpointError: If the folder's state is of another configuration.
        FederationError: If the run failed; QuorumError after the third time in which too few clients answered.
    """
    training, shares = scenario.training, tuple(map(len, dealt.shares))
    records = str(folder.records.resolve()) if training.records else ""
    run = make_run_config(
        [scenario],
        output_folder=str(folder.root.resolve()),
        partition_file=str(folder.partition.resolve()),
        share_sizes=shares,
        class_names=json.dumps(folder.kept_classes()),
        uploads_folder=records,
        evaluator_folder=records,
        events_file=str(folder.events.resolve()),
    )
    on_event = watch(on_round, on_skipped)
    try:
        play_again(lambda: run_app([(run, resources)], on_event), lambda: rounds_done(scenario, folder), on_again)
    except FederationError as error:
        raise type(error)(f"{error}; {KEPT}") from None
    describe_records(scenario, folder.records, shares)
    draw_history(scenario, folder)


def play_again(play: Callable[[], None], count_rounds: Callable[[], int], on_again: Callable[[str], None]) -> None:
    """Play a run to its end; start it again from its last checkpoint whenever too few clients answered.

    Args:
        play: Plays the remaining rounds.
        count_rounds: Counts the rounds of the last checkpoint.
        on_again: Called with the reason before every play but the first.

    Raises:
        QuorumError: If three plays in a row finish no round.
    """
    tries = TRIES
    while True:
        rounds = count_rounds()
        try:
            return play()
        except QuorumError as error:
            tries = TRIES - 1 if count_rounds() > rounds else tries - 1
            if not tries:
                raise
            on_again(str(error))


def watch(on_round: Callable[[Mapping[Any, Any]], None], on_skipped: Callable[[str], None]) -> Callable[[Event], None]:
    """Make what is called with every event of a training run.

    Args:
        on_round: See ``train_federated``.
        on_skipped: See there.
    """

    def on_event(event: Event) -> None:
        if event.kind == "round done":
            on_round({name: math.nan if value is None else value for name, value in event.values.items()})
        elif event.kind == "picture skipped":
            on_skipped(str(event.values["reason"]))

    return on_event


def draw_history(scenario: TrainingScenario, folder: TrainingFolder) -> None:
    """Draw the curves of a training run.

    Args:
        scenario: Names the figure.
        folder: Of the run.
    """
    draw(folder.history, folder.figure, title=f"{scenario.label}, {scenario.training.strategy}")


def rounds_done(scenario: TrainingScenario, folder: TrainingFolder) -> int:
    """Count the rounds that a folder's last checkpoint had done.

    Args:
        scenario: Of the run.
        folder: Of the run.

    Raises:
        CheckpointError: If it is of another configuration.
    """
    state = load_state(folder.state, config=scenario.digest_of_run())
    return 0 if state is None else int(state["round"])


def deal(scenario: TrainingScenario, partition_file: Path | None = None) -> tuple[Pictures, Partition]:
    """Open the pictures of a run and deal them to clients.

    Args:
        scenario: Of the run.
        partition_file: Of a run that goes on: it says which client has which pictures. None deals them anew.

    Raises:
        DataError: If there are no pictures, they cannot be dealt as asked, or are not those that were dealt.
    """
    pictures = open_pictures(scenario.data, scenario.model.classes)
    labels, config = pictures.train.labels, scenario.training.partition
    if partition_file is not None:
        return pictures, Partition.load(partition_file, labels, config, clients=scenario.clients, seed=scenario.seed)
    return pictures, partition(labels, config, clients=scenario.clients, seed=scenario.seed)


def plan_for(scenario: TrainingScenario, dealt: Partition) -> TrainingScenario:
    """Fill in what a scenario's defences derive from the numbers of pictures that clients have.

    Args:
        scenario: Of the run.
        dealt: The pictures of each client.
    """
    return scenario.planned(steps_per_epoch(max(map(len, dealt.shares)), scenario.training.recipe))


def require_public(scenario: TrainingScenario) -> None:
    """Refuse a Top-1 that sites would measure, which a simulation does not have.

    Args:
        scenario: Of the run.

    Raises:
        ConfigError: If it asks for that.
    """
    if scenario.training.validation == "sites":
        raise ConfigError(
            "validation=sites: clients of a simulation have no pictures of their own, sites of `fedmjp deploy run` have"
        )


def check_recordable(scenario: TrainingScenario, dealt: Partition) -> None:
    """Refuse to record uploads that no attack could read, before anything is trained.

    Args:
        scenario: Of the run.
        dealt: The pictures of each client.

    Raises:
        ConfigError: With all settings that are to be changed.
    """
    training = scenario.training
    if not training.records or training.update != "gradient":
        return
    recipe = training.recipe
    recordable = {**AS_SHOWN, "batch_size": min(recipe.batch_size, *map(len, dealt.shares))}
    if changes := {name: value for name, value in recordable.items() if getattr(recipe, name) != value}:
        present = ", ".join(f"{name} {getattr(recipe, name):g}" for name in changes)
        settings = " ".join(f"recipe.{name}={value}" for name, value in changes.items())
        raise ConfigError(f"uploads cannot be recorded with {present}: set {settings}")
