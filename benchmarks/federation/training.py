"""One federated training run on this machine: deals the pictures, starts Flower, and goes on where it was stopped."""

import json
import re
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
from fedmjp.training.central import Pictures, open_pictures
from fedmjp.training.curves import draw
from fedmjp.training.history import History
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.training.state import load_state

# As the server logs them; what it quotes of a client stands further right.
SKIPPED = re.compile(r"^INFO\s*:\s+\[SKIPPED\] (.*)")
ROUND_DONE = re.compile(r"^INFO\s*:\s+\[ROUND (\d+)/\d+\] done")
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
        scenario: What to train.
        dealt: Which client has which pictures, as it is in the partition file.
        folder: Of the run.
        resources: Of the simulation.
        on_round: Called with the row of the history that a round left.
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
    )
    on_line = watch(folder, on_round, on_skipped)
    try:
        play_again(lambda: run_app([(run.flat(), resources)], on_line), lambda: rounds_done(scenario, folder), on_again)
    except FederationError as error:
        raise type(error)(f"{error}; {KEPT}") from None
    describe_records(scenario, folder.records, shares)
    draw_history(scenario, folder)


def play_again(play: Callable[[], None], done: Callable[[], int], on_again: Callable[[str], None]) -> None:
    """Play a run to its end; from its last checkpoint, with processes of its own, where too few clients answered.

    Args:
        play: Plays the rounds that are left.
        done: How many rounds the last checkpoint had done.
        on_again: Called with the reason before every play but the first.

    Raises:
        QuorumError: If it does not get on in three times.
    """
    left = TRIES
    while True:
        before = done()
        try:
            return play()
        except QuorumError as error:
            left = TRIES - 1 if done() > before else left - 1
            if not left:
                raise
            on_again(str(error))


def watch(
    folder: TrainingFolder,
    on_round: Callable[[Mapping[Any, Any]], None],
    on_skipped: Callable[[str], None],
) -> Callable[[str], None]:
    """What is to be called with every line of a training run's log; see ``train_federated``."""
    history = History(folder.history, folder.tensorboard)

    def on_line(line: str) -> None:
        if matched := ROUND_DONE.search(line):
            rows = history.rows()
            on_round(rows[rows["round"] == int(matched[1])].iloc[-1].to_dict())
        elif matched := SKIPPED.search(line):
            on_skipped(matched[1])

    return on_line


def draw_history(scenario: TrainingScenario, folder: TrainingFolder) -> None:
    """Draw the curves of a training run."""
    draw(folder.history, folder.figure, title=f"{scenario.label}, {scenario.training.strategy}")


def rounds_done(scenario: TrainingScenario, folder: TrainingFolder) -> int:
    """How many rounds the folder's last checkpoint had done; CheckpointError if it is of another configuration."""
    state = load_state(folder.state, config=scenario.digest_of_run())
    return 0 if state is None else int(state["round"])


def deal(scenario: TrainingScenario, kept: Path | None = None) -> tuple[Pictures, Partition]:
    """The pictures of a run, and which client has which; in a run that goes on as the kept file says.

    Raises:
        DataError: If there are no pictures, they cannot be dealt as asked, or are not those that were dealt.
    """
    pictures = open_pictures(scenario.data, scenario.model.classes)
    labels, config = pictures.train.labels, scenario.training.partition
    if kept is not None:
        return pictures, Partition.load(kept, labels, config, clients=scenario.clients, seed=scenario.seed)
    return pictures, partition(labels, config, clients=scenario.clients, seed=scenario.seed)


def plan_for(scenario: TrainingScenario, dealt: Partition) -> TrainingScenario:
    """The same with what follows for its defences from the pictures that clients have."""
    return scenario.planned(steps_per_epoch(max(map(len, dealt.shares)), scenario.training.recipe))


def require_public(scenario: TrainingScenario) -> None:
    """ConfigError if Top-1 is to be measured by sites, which a simulation has not."""
    if scenario.training.validation == "sites":
        raise ConfigError(
            "validation=sites: clients of a simulation have no pictures of their own, sites of `fedmjp deploy run` have"
        )


def check_recordable(scenario: TrainingScenario, dealt: Partition) -> None:
    """ConfigError, with all that is to be changed, if uploads cannot be recorded: before anything is trained."""
    training = scenario.training
    if not training.records or training.update != "gradient":
        return
    recipe = training.recipe
    wanted = {**AS_SHOWN, "batch_size": min(recipe.batch_size, *map(len, dealt.shares))}
    if changes := {name: value for name, value in wanted.items() if getattr(recipe, name) != value}:
        said = ", ".join(f"{name} {getattr(recipe, name):g}" for name in changes)
        settings = " ".join(f"recipe.{name}={value}" for name, value in changes.items())
        raise ConfigError(f"uploads cannot be recorded with {said}: set {settings}")
