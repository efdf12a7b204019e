"""Does the upload gate let honest apps pass that are no vision transformers, and does it stop uploads of one record?

``python results/honest_apps/study.py --output FOLDER``. Every app is one of two clients' ClientApp behind
``UploadGate`` with its default policy; their replies are averaged, and the next round begins with the average.

- ``honest`` rows: a row per upload of ``APPS``, under the default policy and under ``model_checks: refuse``;
- ``one`` rows: apps that train on one record, behind the decoys of ``DECOYS``, and claim 32 examples.

Records are the digits and the tumours of scikit-learn, and drawn volumes, series and sentences of ten classes.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import torchvision
import typer
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier
from torch import Tensor, nn

from fedmjp.benchmarks.scripts import keep_table
from fedmjp.clients.gate.policy import Policy
from fedmjp.clients.mods import UploadGate
from fedmjp.running import run_function
from fedmjp.seeds import numpy_generator, scoped_randomness, torch_generator
from fedmjp.tensors import average_updates

CLIENTS, ROUNDS = 2, 15
CLASSES, RECORDS = 10, 1600
UPLOADS = 3  # of one record, of each kind
BATCH, LARGEST = 16, 32
Records = tuple[Tensor, Tensor]
State = dict[str, Tensor]
Backward = Callable[[nn.Module, Tensor, Tensor], None]


class QuickstartNet(nn.Module):
    """The network of Flower's quickstart with PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        hidden = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(images))))))
        logits: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(hidden.flatten(1))))))
        return logits


class Recurrent(nn.Module):
    """An LSTM that reads series with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 32), nn.Linear(32, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        logits: Tensor = self.head(self.lstm(series.permute(2, 0, 1))[0][-1])
        return logits


class Sentences(nn.Module):
    """A transformer's encoder that classifies sentences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(200, 32), nn.Linear(32, CLASSES)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        logits: Tensor = self.head(self.encoder(self.embed(tokens)).mean(dim=1))
        return logits


def with_batch_norm(channels: int = 16) -> nn.Module:
    """Build a small network of convolutions with batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.BatchNorm2d(2 * channels), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, CLASSES),
    )  # fmt: skip


def of_volumes() -> nn.Module:
    """Build a network of convolutions over volumes."""
    return nn.Sequential(
        nn.Conv3d(1, 8, 3), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(2),
        nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def of_series() -> nn.Module:
    """Build a network of convolutions over series, as of electrocardiograms."""
    return nn.Sequential(
        nn.Conv1d(2, 16, 5), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 32, 5), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def of_tables() -> nn.Module:
    """Build a perceptron over tables, with two classes."""
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))


def transformer() -> nn.Module:
    """Build a vision transformer of torchvision's, which begins with a head of zeros."""
    model: nn.Module = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES)
    head: Any = model.get_submodule("heads.head")
    nn.init.trunc_normal_(head.weight, std=0.02)
    return model


@cache
def records(kind: str) -> Records:
    """Load or draw records and their classes.

    Args:
        kind: ``pictures``, ``tables``, ``volumes``, ``series`` or ``sentences``.
    """
    if kind == "pictures":
        digits = load_digits()
        small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
        return F.interpolate(small, 32, mode="bilinear").repeat(1, 3, 1, 1)[:RECORDS], torch.tensor(digits.target)
    if kind == "tables":
        tumours = load_breast_cancer()
        values = torch.tensor(tumours.data, dtype=torch.float32)
        return (values - values.mean(0)) / values.std(0), torch.tensor(tumours.target)
    draw = torch_generator(0, "honest_apps", kind)
    labels = torch.randint(CLASSES, (RECORDS,), generator=draw)
    if kind == "sentences":
        likely = torch.rand(CLASSES, 200, generator=draw) ** 6
        return torch.multinomial(likely[labels], 24, replacement=True, generator=draw), labels
    shape = {"volumes": (1, 12, 12, 12), "series": (2, 64)}[kind]
    centres = torch.randn(CLASSES, *shape, generator=draw)
    return centres[labels] + torch.randn(RECORDS, *shape, generator=draw), labels


@dataclass(frozen=True)
class App:
    """An honest app: what it trains, and how its reply is made of it."""

    make: Callable[[], nn.Module] = QuickstartNet
    kind: str = "pictures"
    steps: int = 15
    optimiser: str = "SGD"
    options: Mapping[str, float] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})
    part: str = ""  # beginning of the names that travel
    reply: str = "weights"  # or change, scaffold
    evaluating: bool = False

    def begin(self) -> RecordDict:
        """Make what the server sends first."""
        with scoped_randomness(1):
            state = self.make().state_dict()
        return RecordDict({"arrays": ArrayRecord(self._travelling(state))})

    def answer(self, content: RecordDict, batches: Sequence[Records]) -> RecordDict:
        """Train, and return what leaves."""
        with scoped_randomness(1):
            model = self.make()
        model.load_state_dict(tensors_of(content), strict=False)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.train(not self.evaluating)
        optimiser = getattr(torch.optim, self.optimiser)(model.parameters(), **self.options)
        for rows, labels in batches:
            optimiser.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(rows), labels))
            optimiser.step()
        state = self._travelling(model.state_dict())
        if self.reply == "change":
            state = {name: tensor - before[name] for name, tensor in state.items()}
        replied = RecordDict({"arrays": ArrayRecord(state)})
        if self.reply == "scaffold":
            rate = self.options["lr"] * len(batches)
            control = {name: (before[name] - tensor) / rate for name, tensor in state.items()}
            replied["control"] = ArrayRecord(control)
        return replied

    def go_on(self, content: RecordDict, replies: Sequence[RecordDict]) -> RecordDict:
        """Aggregate, and return what the server sends next."""
        mean = average_updates([tensors_of(reply) for reply in replies])
        if self.reply == "change":
            sent = tensors_of(content)
            mean = {name: sent[name] + tensor for name, tensor in mean.items()}
        return RecordDict({"arrays": ArrayRecord(mean)})

    def _travelling(self, state: Mapping[str, Tensor]) -> State:
        return {name: tensor for name, tensor in state.items() if name.startswith(self.part)}


class Regression(App):
    """Logistic regression of scikit-learn's, as Flower's quickstart has it."""

    def begin(self) -> RecordDict:
        """Make weights of zeros."""
        return RecordDict({"arrays": ArrayRecord([np.zeros((1, 30)), np.zeros(1)])})

    def answer(self, content: RecordDict, batches: Sequence[Records]) -> RecordDict:
        """Fit on all batches, from the weights that came in."""
        rows, labels = (torch.cat(list(parts)).numpy() for parts in zip(*batches, strict=True))
        model = LogisticRegression(max_iter=1, warm_start=True, solver="saga", random_state=0)
        model.classes_ = np.arange(2)
        model.coef_, model.intercept_ = (array.numpy() for array in tensors_of(content).values())
        model.fit(rows, labels)
        return RecordDict({"arrays": ArrayRecord([model.coef_, model.intercept_])})


class Trees(App):
    """Trees that grow from round to round, sent as bytes, as Flower's quickstart with XGBoost sends them."""

    def begin(self) -> RecordDict:
        """Make a model without trees."""
        return RecordDict({"arrays": ArrayRecord([np.zeros(0, dtype=np.uint8)])})

    def answer(self, content: RecordDict, batches: Sequence[Records]) -> RecordDict:
        """Fit a tree, and append it to those that came in."""
        rows, labels = (torch.cat(list(parts)).numpy() for parts in zip(*batches, strict=True))
        tree = DecisionTreeClassifier(max_depth=3, random_state=0).fit(rows, labels).tree_
        text = json.dumps([tree.feature.tolist(), tree.threshold.tolist(), tree.value.ravel().tolist()]).encode()
        (trees,) = tensors_of(content).values()
        return RecordDict({"arrays": ArrayRecord([np.concatenate([trees.numpy(), np.frombuffer(text, np.uint8)])])})

    def go_on(self, content: RecordDict, replies: Sequence[RecordDict]) -> RecordDict:
        """Keep the first client's trees."""
        del content
        return RecordDict({"arrays": ArrayRecord(dict(replies[0].array_records["arrays"]))})


ADAM = {"lr": 1e-3}
APPS: Mapping[str, App] = {
    "quickstart CNN, SGD, 15 steps": App(),
    "quickstart CNN, SGD, 50 steps": App(steps=50),
    "quickstart CNN, SGD, 125 steps": App(steps=125),
    "quickstart CNN, Adam, 50 steps": App(steps=50, optimiser="Adam", options=ADAM),
    "quickstart CNN, change of weights": App(reply="change"),
    "CNN with batch norm, Adam": App(with_batch_norm, optimiser="Adam", options={"lr": 1e-2}),
    "CNN with batch norm, evaluation mode": App(with_batch_norm, evaluating=True),
    "CNN, head alone": App(part="fc3"),
    "CNN, body alone (FedPer)": App(part="conv"),
    "CNN, SCAFFOLD": App(reply="scaffold", options={"lr": 0.05}),
    "3-D CNN": App(of_volumes, "volumes"),
    "1-D CNN with batch norm": App(of_series, "series", optimiser="Adam", options=ADAM),
    "LSTM": App(Recurrent, "series", optimiser="Adam", options={"lr": 5e-3}),
    "transformer over tokens": App(Sentences, "sentences", optimiser="Adam", options=ADAM),
    "perceptron over tables": App(of_tables, "tables", steps=8),
    "logistic regression, scikit-learn": Regression(kind="tables", steps=4),
    "trees as bytes": Trees(kind="tables", steps=4),
}


def tensors_of(content: RecordDict) -> State:
    """Read the arrays of a message."""
    return dict(content.array_records["arrays"].to_torch_state_dict())


def batches_of(app: App, client: int, turn: int) -> list[Records]:
    """Deal a client's batches of a round, of its half of the records."""
    rows, labels = records(app.kind)
    own = np.arange(client, len(rows), CLIENTS)
    drawn = numpy_generator(0, "honest_apps", app.kind, client, turn)
    order = np.concatenate([drawn.permutation(own) for _ in range(1 + app.steps * BATCH // len(own))])
    return [(rows[part], labels[part]) for part in np.split(order[: app.steps * BATCH], app.steps)]


def exchange(
    gate: UploadGate, content: RecordDict, client: int, turn: int, answer: Callable[[RecordDict], Any]
) -> Message:
    """Send a message to an app behind the gate, and return its reply."""
    app = ClientApp(mods=[gate])

    @app.train()
    def train(message: Message, _: Context) -> Message:
        replied, examples = answer(message.content)
        replied["metrics"] = MetricRecord({"num-examples": examples})
        return Message(replied, reply_to=message)

    sent = RecordDict({**content.array_records, "config": ConfigRecord({"server-round": turn})})
    message = Message(content=sent, message_type="train", dst_node_id=client + 1, group_id=str(turn))
    message.metadata.__dict__["_message_id"] = f"{client}-{turn}"
    node = Context(run_id=1, node_id=client + 1, node_config={}, state=RecordDict(), run_config={})
    return app(message, node)


def play(name: str, policy: Mapping[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Play rounds of two honest clients, and return a row per upload."""
    app, rows = APPS[name], []
    with tempfile.TemporaryDirectory() as folder:
        gate, content = UploadGate(Policy.parse(policy), ledger=Path(folder) / "gate.jsonl"), app.begin()
        for turn in range(1, rounds + 1):
            replies = []
            for client in range(CLIENTS):
                batches = batches_of(app, client, turn)
                answer = partial(
                    lambda content, batches: (app.answer(content, batches), app.steps * BATCH), batches=batches
                )
                reply = exchange(gate, content, client, turn, answer)
                if not reply.has_error():
                    replies.append(reply.content)
            content = app.go_on(content, replies) if replies else content
        for entry in gate.ledger.entries():
            told = {"verdict": entry.verdict, "reasons": "; ".join(entry.reasons), "checks": "; ".join(entry.checks)}
            counts = {"round": int(entry.round), "records": entry.pictures, "not_judged": entry.not_judged}
            rows.append({"question": "honest", "app": name, "policy": json.dumps(dict(policy)), **told, **counts})
    return rows


def unused(model: nn.Module, decoys: Tensor, labels: Tensor) -> None:
    """Pass decoys through the network, without a loss."""
    del labels
    model(decoys)


def cleared(model: nn.Module, decoys: Tensor, labels: Tensor) -> None:
    """Compute gradients of decoys, and clear them."""
    torch.autograd.backward(F.cross_entropy(model(decoys), labels))
    model.zero_grad()


def weighted(model: nn.Module, decoys: Tensor, labels: Tensor, factor: float) -> None:
    """Add a loss of decoys with a small factor."""
    torch.autograd.backward(factor * F.cross_entropy(model(decoys), labels))


def frozen(model: nn.Module, decoys: Tensor, labels: Tensor) -> None:
    """Take a step of decoys with a learning rate of zero."""
    torch.autograd.backward(F.cross_entropy(model(decoys), labels))
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.zero_grad()


def elsewhere(model: nn.Module, decoys: Tensor, labels: Tensor) -> None:
    """Take a step of decoys that changes another tensor alone."""
    tensor = nn.Parameter(torch.ones(1))
    torch.autograd.backward(F.cross_entropy(model(decoys), labels) * tensor.sum())
    torch.optim.SGD([tensor], lr=0.1).step()
    model.zero_grad()


DECOYS: Mapping[str, Backward | None] = {
    "none": None,
    "passed without a loss": unused,
    "in the batch, not in the loss": None,
    "gradients cleared": cleared,
    "loss times 0": partial(weighted, factor=0.0),
    "loss times 1e-6": partial(weighted, factor=1e-6),
    "step of rate 0": frozen,
    "step of another tensor": elsewhere,
}
NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "quickstart CNN": (QuickstartNet, "pictures"),
    "CNN with batch norm": (with_batch_norm, "pictures"),
    "vision transformer": (transformer, "pictures"),
    "3-D CNN": (of_volumes, "volumes"),
    "1-D CNN": (of_series, "series"),
    "LSTM": (Recurrent, "series"),
    "transformer over tokens": (Sentences, "sentences"),
    "perceptron over tables": (of_tables, "tables"),
}


def train_on_one(content: RecordDict, network: str, decoys: str, steps: int, place: int) -> tuple[RecordDict, int]:
    """Train on one record behind decoys, and claim many."""
    make, kind = NETWORKS[network]
    (rows, labels), model = records(kind), make()
    model.load_state_dict(tensors_of(content))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    one, others = slice(place, place + 1), slice(place + 1, place + 1 + LARGEST)
    for _ in range(steps):
        optimiser.zero_grad()
        if decoys == "in the batch, not in the loss":
            torch.autograd.backward(F.cross_entropy(model(rows[place : place + LARGEST])[:1], labels[one]))
        else:
            if (feed := DECOYS[decoys]) is not None:
                feed(model, rows[others], labels[others])
            # Twice, where batch norm needs more than one.
            torch.autograd.backward(
                F.cross_entropy(model(rows[one].repeat_interleave(2, 0)), labels[one].repeat_interleave(2))
            )
        optimiser.step()
    return RecordDict({"arrays": ArrayRecord(model.state_dict())}), LARGEST


def hide_one(network: str, decoys: str, steps: int, uploads: int) -> list[dict[str, Any]]:
    """Return a row per upload of one record."""
    with scoped_randomness(1):
        content = RecordDict({"arrays": ArrayRecord(NETWORKS[network][0]().state_dict())})
    rows = []
    for place in range(uploads):
        with tempfile.TemporaryDirectory() as folder:
            gate = UploadGate(Policy(), ledger=Path(folder) / "gate.jsonl")
            exchange(
                gate, content, 0, 1, partial(train_on_one, network=network, decoys=decoys, steps=steps, place=place)
            )
            (entry,) = gate.ledger.entries()
        told = {"verdict": entry.verdict, "reasons": "; ".join(entry.reasons), "records": entry.pictures}
        rows.append({"question": "one", "app": network, "decoys": decoys, "steps": steps, **told})
    return rows


def main(
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")] = Path("results/honest_apps"),
    rounds: Annotated[int, typer.Option(help="Of every app under each policy.", min=1)] = ROUNDS,
) -> None:
    """Play every app under both policies and try every decoy; keep the rows."""
    torch.set_num_threads(1)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    policies: list[dict[str, Any]] = [{"model_checks": "refuse"}, {}]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        parts = [
            *(pool.submit(play, name, policy, rounds) for name in reversed(list(APPS)) for policy in policies),
            *(pool.submit(hide_one, *case, UPLOADS) for case in product(NETWORKS, DECOYS, (1, 3))),
        ]
        for part in parts:
            typer.echo(
                f"{part.result()[0]['app']}: {sum(row['verdict'] == 'refused' for row in part.result())} refused"
            )
    table = pd.DataFrame([row for part in parts for row in part.result()])
    keep_table(output, table, {"study": "honest_apps", "rounds": rounds, "clients": CLIENTS, "seed": 0})
    for question, columns in (("honest", ["app", "policy"]), ("one", ["app", "decoys"])):
        rows = table[table["question"] == question]
        counts = rows.assign(refused=rows["verdict"] == "refused", alarms=rows["checks"].fillna("") != "")
        sums = counts.groupby(columns, sort=False)[["refused", "alarms"]].agg(["sum", "size"])
        typer.echo(sums.to_string())


if __name__ == "__main__":
    run_function(main)
