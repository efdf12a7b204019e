"""Which hostile clients a federation survives, by the strategy of its server.

``python results/hostile_clients/study.py --data FOLDER --output FOLDER``. Ten clients with equal shares go on
training a small model that is trained already, for a few rounds: the server's own loop and the clients' own training,
without Flower's engine between them. One or three of the ten are hostile, in one of ten ways (``KINDS``).
The server does not know how many pictures a client has, as in a deployment.

A row per run: Top-1 of the validation pictures after the last round, how many replies were refused, and how many steps
were not taken because they would have spoilt the model. A run is survived where its Top-1 is less than ``MARGIN`` below
that of the undisturbed run with the same strategy.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from fedmjp.benchmarks.scripts import Pictures, keep_table
from fedmjp.clients.training import LocalTraining
from fedmjp.config import Checkpoint
from fedmjp.data.datasets import open_dataset
from fedmjp.data.partitions import Partition, partition
from fedmjp.data.pictures import LabelledDataset
from fedmjp.learning import ROBUST, Recipe
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.records import weights_digest
from fedmjp.running import run_function
from fedmjp.scenario import TrainingScenario, make_run_config
from fedmjp.server.loop import Federation
from fedmjp.server.validation import Validation
from fedmjp.training.accuracy import Accuracy
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.wire import ARRAYS, EXAMPLES, METRICS
from fedmjp.zoo import zoo_model

WEIGHTS = "zoo:coarse-none-0"
CLIENTS = 10
HOSTILE = (1, 3)
PICTURES = 64  # of a client
RECIPE = {
    "batch_size": 32, "learning_rate": 0.032, "warmup_epochs": 0, "drop_path": 0.0, "repeats": 1, "crop_scale": 1.0,
    "color_jitter": 0.0, "rand_augment": "", "random_erasing": 0.0, "mixup": 0.0, "cutmix": 0.0, "crop_share": 1.0,
}  # fmt: skip
MARGIN = 0.03
NOBODY = "none"
# By the name in the table. Servers with moments take smaller steps than they would from the start.
SERVERS: dict[str, dict[str, Any]] = {
    "fedavg, no bound": {"strategy": "fedavg", "max_norm": 0},
    "fedavg": {"strategy": "fedavg"},
    "fedprox": {"strategy": "fedprox"},
    "fedavgm": {"strategy": "fedavgm", "server_momentum": 0.5},
    "fedadam": {"strategy": "fedadam"},
    "fedsgd": {"strategy": "fedsgd"},
    **{name: {"strategy": name} for name in ROBUST},
}
RATES = {"fedadam": 0.001}
SCALE = 1e4
WITHIN_BOUND = 5.0  # times its length, that a flipped update is sent at: half of what max_norm lets pass
LARGEST = 3e38  # that float32 holds, nearly
DEVIATIONS = 1.5  # of honest updates, that "little is enough" stays away from their mean
CLAIMED = 2**31  # pictures that nobody has
Update = Mapping[str, Tensor]


@dataclass(frozen=True)
class Situation:
    """What a hostile client may use in a round: what it and all others would send honestly, and what it sent first."""

    client: int
    honest: Callable[[int], RecordDict]  # what a client would send in this round
    flipped: Callable[[int], RecordDict]  # the same if it took each label for its opposite
    clients: int
    first: RecordDict  # what this client would have sent in the first round

    @property
    def own(self) -> RecordDict:
        """What it would send honestly."""
        return self.honest(self.client)

    def changed(self, change: Callable[[Tensor], Tensor], examples: int | None = None) -> RecordDict:
        """Its honest answer with every tensor changed, and another number of pictures if one is given."""
        update = {name: change(tensor) for name, tensor in update_of(self.own).items()}
        return answer_of(self.own, update, examples)


Kind = Callable[[Situation], RecordDict | None]


def update_of(answer: RecordDict) -> Update:
    """Return the tensors of an answer."""
    return answer.array_records[ARRAYS].to_torch_state_dict()


def answer_of(answer: RecordDict, update: Update, examples: int | None = None) -> RecordDict:
    """Copy the answer with another update and metrics of its own, and with another number of pictures if given."""
    metrics = dict(answer.metric_records[METRICS])
    if examples is not None:
        metrics[EXAMPLES] = examples
    return RecordDict({ARRAYS: ArrayRecord(dict(update)), METRICS: MetricRecord(metrics)})


def send_honestly(situation: Situation) -> RecordDict:
    """Return what an honest client sends; hostile is when it arrives."""
    return situation.own


def stay_away(situation: Situation) -> RecordDict:
    """Little is enough: the mean of all honest updates less some deviations (Baruch et al., NeurIPS 2019)."""
    updates = [update_of(situation.honest(client)) for client in range(situation.clients)]
    stacked = {name: torch.stack([update[name] for update in updates]) for name in updates[0]}
    update = {name: values.mean(dim=0) - DEVIATIONS * values.std(dim=0) for name, values in stacked.items()}
    return answer_of(situation.own, update)


def repeat(situation: Situation) -> RecordDict:
    """Return what it sent in the first round, in every round."""
    return situation.first


LATE = "late"  # an honest answer, a round too late
KINDS: dict[str, Kind] = {
    "scaling": lambda situation: situation.changed(lambda tensor: SCALE * tensor),
    "sign flip": lambda situation: situation.changed(lambda tensor: -WITHIN_BOUND * tensor),
    "label flip": lambda situation: situation.flipped(situation.client),
    "little is enough": stay_away,
    "NaN": lambda situation: situation.changed(lambda tensor: tensor * float("nan")),
    "wrong counts": lambda situation: situation.changed(lambda tensor: -tensor, CLAIMED),
    "replay": repeat,
    LATE: send_honestly,
    "huge": lambda situation: situation.changed(lambda tensor: torch.full_like(tensor, LARGEST)),
    "silent": lambda _situation: None,
}


def main(
    data: Pictures,
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")],
    rounds: Annotated[int, typer.Option(help="Of each run.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of shares and training.", min=0)] = 0,
    servers: Annotated[list[str] | None, typer.Option("--server", help="By the name in the table; all.")] = None,
) -> None:
    """Play every strategy with every kind of hostile client, and keep a row per run."""
    torch.set_num_threads(1)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as inside a run of Flower's
    any_server = scenario_of(data, next(iter(SERVERS)), rounds, seed)
    measured = Remembering(build(any_server.network), any_server, any_server.training.recipe)
    made = (rows(data, server, rounds, seed, measured) for server in servers or SERVERS)
    table = pd.DataFrame(itertools.chain.from_iterable(made))
    about = {"weights": WEIGHTS, "rounds": rounds, "seed": seed, "clients": CLIENTS, "pictures": PICTURES}
    keep_table(output, table, about)
    typer.echo(table.pivot_table("top1", ["attack", "hostile"], "strategy", sort=False).round(3).to_string())


def rows(data: str, server: str, rounds: int, seed: int, measured: "Remembering") -> Iterator[dict[str, Any]]:
    """Build a row for the undisturbed run of a server, then for each kind and number of hostile clients."""
    cohort = Cohort.of(scenario_of(data, server, rounds, seed), measured)
    undisturbed = 0.0
    for attack, hostile in [(NOBODY, 0), *itertools.product(KINDS, HOSTILE)]:
        row = play(cohort, attack, hostile)
        undisturbed = row["top1"] if attack == NOBODY else undisturbed
        survived = row["top1"] > undisturbed - MARGIN
        yield {"strategy": server, "attack": attack, "hostile": hostile, **row, "survived": survived}
        typer.echo(f"{server}, {attack} {hostile}: Top-1 {row['top1']:.1%}, {row['refused']} refused")


def scenario_of(data: str, server: str, rounds: int, seed: int) -> TrainingScenario:
    """Return the federation of a server that goes on from trained weights."""
    values: dict[str, Any] = {"data": data, "clients": CLIENTS, "seed": seed}
    values |= {"server_learning_rate": RATES[server]} if server in RATES else {}
    values |= {"training": {"rounds": rounds, "recipe": RECIPE, **SERVERS[server]}}
    return TrainingScenario.parse({**values, "model": {**zoo_model(WEIGHTS).model, "weights": Checkpoint.of(WEIGHTS)}})


def play(cohort: "Cohort", attack: str, hostile: int) -> dict[str, Any]:
    """Train with so many hostile clients; what came of it."""
    with tempfile.TemporaryDirectory() as name:
        folder, grid = TrainingFolder(Path(name)), HostileGrid(cohort, attack, hostile)
        run = make_run_config([cohort.scenario], output_folder=name)
        Federation(grid, cohort.scenario, run, validation=cohort.measured).play()  # type: ignore[arg-type]
        last = pd.read_csv(folder.history).iloc[-1]
        refused = pd.read_csv(folder.refused) if folder.refused.exists() else pd.DataFrame({"client": []})
    return {
        "top1": float(last["top1"]),
        "validation_loss": float(last["validation_loss"]),
        "refused": int(refused["client"].notna().sum()),
        "steps_not_taken": int(refused["client"].isna().sum()),
    }


class Remembering(Validation):
    """Measures the same weights once, in whichever run they come."""

    def __init__(self, model: Classifier, scenario: TrainingScenario, recipe: Recipe) -> None:
        super().__init__(model, scenario, recipe)
        self._known: dict[str, Accuracy] = {}

    def accuracy(self, weights: Mapping[str, Tensor]) -> Accuracy:
        """Top-1 accuracy of weights."""
        digest = weights_digest(weights)
        if digest not in self._known:
            self._known[digest] = super().accuracy(weights)
        return self._known[digest]


@dataclass
class Cohort:
    """What honest clients send, and those that take each label for its opposite: computed once for the same weights."""

    scenario: TrainingScenario
    pictures: LabelledDataset
    opposite: LabelledDataset
    dealt: Partition
    measured: Remembering
    answers: dict[tuple[str, int, int, bool], RecordDict] = field(default_factory=dict)

    @classmethod
    def of(cls, scenario: TrainingScenario, measured: Remembering) -> "Cohort":
        """Deal the pictures."""
        pictures = open_dataset(scenario.data, "train", classes=scenario.model.classes)
        opposite = replace(pictures, labels=pictures.labels.max() - pictures.labels)
        config = scenario.training.partition
        dealt = partition(pictures.labels, config, clients=scenario.clients, seed=scenario.seed)
        return cls(scenario, pictures, opposite, dealt, measured)

    def answer(self, message: Message, client: int, *, flipped: bool) -> RecordDict:
        """Return what a client makes of a message."""
        server_round = round_of(message)
        digest = weights_digest(message.content.array_records[ARRAYS].to_torch_state_dict())
        key = digest, server_round, client, flipped
        if key not in self.answers:
            local = LocalTraining(
                self.scenario,
                self.scenario.training,
                client,
                server_round,
                self.opposite if flipped else self.pictures,
                self.dealt.shares[client][:PICTURES],
                self.scenario.seed,
            )
            self.answers[key] = local.answer(message.content)
        return self.answers[key]


class HostileGrid:
    """A Grid of clients, of which the first ones are hostile in the same way."""

    def __init__(self, cohort: Cohort, attack: str, hostile: int) -> None:
        self._cohort, self._attack, self._hostile = cohort, attack, hostile
        self._first: dict[int, RecordDict] = {}  # what each would have sent in the first round
        self._late: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        """Return a node for each client, from 1."""
        return range(1, CLIENTS + 1)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return what arrives in time, with what was late before."""
        del timeout
        asked = {message.metadata.dst_node_id - 1: message for message in messages}
        if any(message.metadata.message_type == MessageType.QUERY for message in asked.values()):
            return [_reply(message, _number(client), client) for client, message in asked.items()]
        for client, message in asked.items():
            message.metadata.__dict__["_message_id"] = f"{round_of(message)}-{client}"
        arriving, self._late = self._late, []
        for client, message in asked.items():
            content = self._content(asked, client)
            if content is not None:
                queue = self._late if self._attack == LATE and client < self._hostile else arriving
                queue.append(_reply(message, answer_of(content, update_of(content)), client))
        return arriving

    def _content(self, asked: dict[int, Message], client: int) -> RecordDict | None:
        def made(flipped: bool, of: int) -> RecordDict:
            return self._cohort.answer(asked[of], of, flipped=flipped)

        if client >= self._hostile:
            return made(False, client)
        first = self._first.setdefault(client, made(False, client))
        situation = Situation(client, lambda of: made(False, of), lambda of: made(True, of), len(asked), first)
        return KINDS[self._attack](situation)


def round_of(message: Message) -> int:
    """Return the round that a message is of."""
    asked: Any = message.content["config"]
    return int(asked["server-round"])


def _number(client: int) -> RecordDict:
    return RecordDict({"config": ConfigRecord({"partition-id": client})})


def _reply(message: Message, content: RecordDict, client: int) -> Message:
    reply = Message(content=content, reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = client + 1
    return reply


if __name__ == "__main__":
    run_function(main)
