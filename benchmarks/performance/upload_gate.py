"""The upload gate on apps as their libraries' documentation teaches them: what it stops, what it lets pass, its cost.

``python benchmarks/performance/run.py upload_gate --data FOLDER --classes 32 --json FILE``

- *honest*: 50 rounds of FedAvg with two clients, batches of 8 and 16, under the default policy;
- *one picture*: uploads of a single picture, by one step and by several;
- *cost*: CPU seconds of a local round, and of the gate around it;
- *node*: one upload of DeiT-S, 88 MB, through a real gated SuperNode, and one of a single picture.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import timm
import torch
import torch.nn.functional as F
import torchvision
import typer
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitins_to_recorddict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

from fedmjp.benchmarks.federation.superlink import PrivateSuperLink
from fedmjp.benchmarks.performance.harness import Measurement, benchmark
from fedmjp.benchmarks.scripts import load_unseen
from fedmjp.clients.gate.ledger import Entry, GateLedger
from fedmjp.clients.gate.policy import Policy
from fedmjp.clients.gate.reading import read_reply
from fedmjp.clients.gate.self_attack import try_tensors
from fedmjp.clients.mods import UploadGate
from fedmjp.clients.replies import SentArrays
from fedmjp.config import ModelConfig
from fedmjp.seeds import scoped_randomness, torch_generator
from fedmjp.tensors import average_updates

ROUNDS, CLIENTS = 50, 2
SIZE = 32
COST_ROUNDS = {SIZE: 5, 224: 1}  # by pixels per side
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class UploadRecipe:
    """How an app trains in a round."""

    model: str
    optimiser: str
    rate: float
    batches: int
    batch_size: int
    numpy_client: bool = False
    classes_per_client: int = 0  # 0: any
    options: tuple[tuple[str, float], ...] = ()

    @property
    def text(self) -> str:
        """One line."""
        kind = "client_fn" if self.numpy_client else "message API"
        share = f", {self.classes_per_client} classes a client" if self.classes_per_client else ""
        return f"{self.model}, {kind}, {self.optimiser} {self.rate:g}, {self.batches} x {self.batch_size}{share}"


HONEST = (
    UploadRecipe("torchvision ViT", "SGD", 0.05, 1, 8),
    UploadRecipe("torchvision ViT", "SGD", 0.05, 10, 16),
    UploadRecipe("transformers ViT", "AdamW", 1e-3, 2, 8),
    UploadRecipe("timm deit_micro", "SGD", 0.05, 2, 8, numpy_client=True, classes_per_client=2),
    UploadRecipe("convolutions", "SGD", 0.01, 10, 16, numpy_client=True, options=(("momentum", 0.9),)),
)
COST = (
    ("deit_micro, 32 pixels", "timm deit_micro", SIZE, "off"),
    ("deit_micro, 32 pixels", "timm deit_micro", SIZE, "say"),
    ("DeiT-S, 224 pixels", "timm deit_small", 224, "say"),
)


@benchmark
def upload_gate(
    data: Annotated[str, typer.Option(help="FOLDER/CLASS/picture.", metavar="FOLDER")],
    classes: Annotated[int, typer.Option(help="Of the pictures.")],
    parts: Annotated[list[str] | None, typer.Option("--part", help="honest, one-picture, cost, node.")] = None,
) -> Measurement:
    """Measure, print and write."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    config = ModelConfig(name="deit_micro", image_size=SIZE, patch_size=4, classes=classes)
    drawn = load_unseen(data, 1024, config, seed=0)
    pictures = (torch.stack([p.image for p in drawn]) - 0.5) / 0.25, torch.tensor([p.label for p in drawn])
    measures: dict[str, Callable[[], Any]] = {
        "honest": lambda: {recipe.text: honest(recipe, pictures, classes) for recipe in HONEST},
        "one-picture": lambda: one_picture(pictures, classes),
        "cost": lambda: {
            f"{title}, model checks {checks}": cost(name, size, classes, checks) for title, name, size, checks in COST
        },
        "node": through_a_node,
    }
    figures = {part: measures[part]() for part in parts or measures}
    return Measurement(figures, {"rounds": ROUNDS, "clients": CLIENTS, "policy": "default"})


def honest(recipe: UploadRecipe, pictures: Batch, classes: int) -> dict[str, Any]:
    """Play rounds of FedAvg under the default policy."""
    with tempfile.TemporaryDirectory() as scratch:
        gate = UploadGate(Policy(), ledger=Path(scratch) / "gate.jsonl")
        model, shown_by_tensors = made(recipe.model, classes), 0
        for turn in range(ROUNDS):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            replies = []
            for client in range(CLIENTS):
                chosen = batches_of(recipe, pictures, client, turn)
                message, reply = answer(recipe, state, chosen, classes, gate, turn=turn, client=client)
                if not reply.has_error():
                    (record,) = reply.content.array_records.values()
                    reading = read_reply(reply, SentArrays(message), None, "gate")
                    shown_by_tensors += any(outcome.came_back for outcome in try_tensors(reading).outcomes)
                    values = record.to_torch_state_dict().values()
                    replies.append(dict(zip(state, values, strict=True)))
            if replies:
                model.load_state_dict(average_updates(replies))
        entries = gate.ledger.entries()
    refused = [entry for entry in entries if entry.verdict == "refused"]
    return {
        "rounds": ROUNDS,
        "uploads": len(entries),
        "rounds_with_a_refusal": len({entry.round for entry in refused}),
        "taken_for_one_picture_in_the_supernode": shown_by_tensors,
        "rounds_with_a_suspicious_model": len({entry.round for entry in entries if entry.checks}),
        "suspicious": sorted({check for entry in entries for check in entry.checks}),
        "reasons": sorted({reason for entry in refused for reason in entry.reasons}),
        "said": totals(entries),
    }


def one_picture(pictures: Batch, classes: int) -> dict[str, Any]:
    """Upload updates of a single picture, under the default policy and without its count of pictures."""
    figures: dict[str, Any] = {}
    for name in dict.fromkeys(recipe.model for recipe in HONEST):
        for optimiser, rate, steps in (("SGD", 0.05, 1), ("SGD", 0.05, 5), ("AdamW", 1e-3, 5)):
            recipe = UploadRecipe(name, optimiser, rate, steps, 1)
            counts = {"uploads": 0, "refused": 0, "refused_by_what_came_back": 0}
            for place in range(10):
                batch = pictures[0][place : place + 1], pictures[1][place : place + 1]
                for column, policy in (
                    ("refused", Policy()),
                    ("refused_by_what_came_back", Policy(fewest_pictures=1, features="refuse")),
                ):
                    with tempfile.TemporaryDirectory() as scratch:
                        gate = UploadGate(policy, ledger=Path(scratch) / "gate.jsonl")
                        state = made(name, classes).state_dict()
                        _, reply = answer(recipe, state, [batch] * steps, classes, gate)
                    counts[column] += reply.has_error()
                counts["uploads"] += 1
            figures[recipe.text] = counts
    return figures


def cost(name: str, size: int, classes: int, checks: str) -> dict[str, float]:
    """CPU seconds of rounds of ten batches of sixteen: in the app, and in the gate around it."""
    recipe = UploadRecipe(name, "SGD", 0.01, 10, 16)
    draw = torch_generator(0, "cost", name)
    chosen = [
        (torch.randn(16, 3, size, size, generator=draw), torch.randint(classes, (16,), generator=draw))
        for _ in range(recipe.batches)
    ]
    state = made(name, classes, size).state_dict()
    policy = Policy.parse({"model_checks": checks})
    whole: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        gate = UploadGate(policy, ledger=Path(scratch) / "gate.jsonl", clock=time.process_time)
        rounds = COST_ROUNDS[size]
        for turn in range(rounds + 1):
            for given in (gate, None) if size == SIZE else (gate,):
                began = time.process_time()
                _, reply = answer(recipe, state, chosen, classes, given, turn=turn, size=size)
                if reply.has_error():
                    raise RuntimeError(f"the gate refused an honest round: {reply.error.reason}")
                (bare if given is None else whole).append(time.process_time() - began)
        # The first of each imports and allocates.
        inside = median([entry.seconds for entry in gate.ledger.entries()][1:])
    figures = {"rounds": rounds, "gate_seconds": inside, "share": round(inside / (median(whole[1:]) - inside), 4)}
    if bare:  # what hooks cost inside of the app shows in the difference alone
        figures["share_with_hooks"] = round(median(whole[1:]) / median(bare[1:]) - 1, 4)
    return figures


def totals(entries: Sequence[Entry]) -> dict[str, str]:
    """Return what came back of all that left, by attack and kind."""
    sums: dict[str, list[int]] = {}
    for entry in entries:
        for outcome in entry.outcomes:
            pair = sums.setdefault(f"{outcome.attack}: {outcome.of}", [0, 0])
            pair[0] += outcome.came_back
            pair[1] += outcome.among
    return {title: f"{back} of {among}" for title, (back, among) in sums.items()}


def batches_of(recipe: UploadRecipe, pictures: Batch, client: int, turn: int) -> list[Batch]:
    """Return a client's batches of a round, of its own half of the pictures."""
    images, labels = pictures
    mine = torch.arange(client, len(labels), CLIENTS)
    if recipe.classes_per_client:
        kept = torch.unique(labels)[client * recipe.classes_per_client :][: recipe.classes_per_client]
        mine = torch.arange(len(labels))[torch.isin(labels, kept)]
    draw = torch_generator(0, "batches", recipe.text, client, turn)
    order = mine[torch.randperm(len(mine), generator=draw)][: recipe.batches * recipe.batch_size]
    return [(images[part], labels[part]) for part in torch.split(order, recipe.batch_size)]


def made(name: str, classes: int, size: int = SIZE) -> nn.Module:
    """Build a network with drawn weights, as its library makes it."""
    with scoped_randomness(1):
        if name == "torchvision ViT":
            shape = {"num_layers": 2, "num_heads": 2, "hidden_dim": 64, "mlp_dim": 128, "num_classes": classes}
            model: nn.Module = torchvision.models.VisionTransformer(image_size=size, patch_size=8, **shape)
            head: Any = model.get_submodule("heads.head")
            nn.init.trunc_normal_(head.weight, std=0.02)  # torchvision begins with a head of zeros
            return model
        if name == "transformers ViT":
            from transformers import ViTConfig, ViTForImageClassification

            small: Any = {
                "hidden_size": 128,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 256,
            }
            config: Any = ViTConfig
            whole: nn.Module = ViTForImageClassification(
                config(image_size=size, patch_size=8, num_labels=classes, **small)
            )
            return whole
        if name == "convolutions":
            return nn.Sequential(
                nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
            )  # fmt: skip
        smaller: dict[str, Any] = (
            {"embed_dim": 64, "depth": 4, "num_heads": 2, "patch_size": 4} if name.endswith("micro") else {}
        )
        base = "deit_tiny_patch16_224" if smaller else "deit_small_patch16_224"
        of_timm: nn.Module = timm.create_model(base, num_classes=classes, img_size=size, **smaller)
        return of_timm


def train(model: nn.Module, batches: Sequence[Batch], recipe: UploadRecipe) -> float:
    """Train in a loop as Flower's own examples have it."""
    model.train()
    options = dict(recipe.options)
    optimiser, loss = getattr(torch.optim, recipe.optimiser)(model.parameters(), lr=recipe.rate, **options), 0.0
    for images, labels in batches:
        optimiser.zero_grad()
        output: Any = model(images)
        error = F.cross_entropy(getattr(output, "logits", output), labels)
        torch.autograd.backward(error)
        optimiser.step()
        loss += float(error.detach())
    return loss / len(batches)


def answer(  # noqa: PLR0913 (a message, and who answers it)
    recipe: UploadRecipe,
    state: Mapping[str, Tensor],
    batches: Sequence[Batch],
    classes: int,
    gate: UploadGate | None,
    *,
    client: int = 0,
    turn: int = 0,
    size: int = SIZE,
) -> tuple[Message, Message]:
    """Return a message with these weights, and the reply of an app."""
    model = made(recipe.model, classes, size)
    mods = [] if gate is None else [gate]
    content, app = (_numpy_app if recipe.numpy_client else _message_app)(model, state, batches, recipe, mods)
    message = Message(content=content, message_type="train", dst_node_id=client + 1, group_id=str(turn))
    message.metadata.__dict__["_message_id"] = f"message-{client}-{turn}"
    node = Context(run_id=1, node_id=client + 1, node_config={}, state=RecordDict(), run_config={})
    return message, app(message, node)


def _message_app(
    model: nn.Module, state: Mapping[str, Tensor], batches: Sequence[Batch], recipe: UploadRecipe, mods: list[Any]
) -> tuple[RecordDict, ClientApp]:
    app = ClientApp(mods=mods)

    def fit(message: Message, _: Context) -> Message:
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        loss = train(model, batches, recipe)
        examples = sum(len(labels) for _, labels in batches) if recipe.batch_size > 1 else 1
        metrics = MetricRecord({"train_loss": loss, "num-examples": examples})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    app.train()(fit)
    return RecordDict({"arrays": ArrayRecord(dict(state)), "config": ConfigRecord({"lr": recipe.rate})}), app


def _numpy_app(
    model: nn.Module, state: Mapping[str, Tensor], batches: Sequence[Batch], recipe: UploadRecipe, mods: list[Any]
) -> tuple[RecordDict, ClientApp]:
    class HonestClient(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            del config
            named = zip(model.state_dict(), parameters, strict=True)
            model.load_state_dict({name: torch.tensor(value) for name, value in named})
            loss = train(model, batches, recipe)
            weights = [value.cpu().numpy() for value in model.state_dict().values()]
            return weights, sum(len(labels) for _, labels in batches), {"loss": loss}

    make: Callable[[Context], Any] = lambda _context: HonestClient().to_client()  # noqa: E731
    parameters = ndarrays_to_parameters([value.numpy() for value in state.values()])
    return fitins_to_recorddict(FitIns(parameters, {"lr": recipe.rate}), keep_input=True), ClientApp(make, mods=mods)


PROJECT = """
[project]
name = "large"
version = "0.1.0"
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "large.server:app"
clientapp = "large.client:app"
[tool.flwr.app.config]
output = ""
"""
SERVER = """
import json, time
import timm
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.5)
    state, got = timm.create_model("deit_small_patch16_224").state_dict(), {}
    for turn, pictures in {"batch of 8": 8, "one picture": 1}.items():
        content = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord({"pictures": pictures})})
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=nodes[0], message_type="train", group_id=turn)])
        got[turn] = reply.error.reason if reply.has_error() else sum(
            len(array.data) for array in reply.content["arrays"].values()
        )
    with open(context.run_config["output"], "w") as file:
        json.dump(got, file)
"""
CLIENT = """
import time
import timm
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    torch.set_num_threads(1)
    count = message.content["config"]["pictures"]
    model = timm.create_model("deit_small_patch16_224").train()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.nn.functional.cross_entropy(model(torch.randn(count, 3, 224, 224)), torch.arange(count)).backward()
    optimiser.step()
    metrics = MetricRecord({"num-examples": count})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
"""


def through_a_node() -> dict[str, Any]:
    """Return what a server got from a gated SuperNode, and what its ledger says."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        app, output, ledger = root / "app", root / "got.json", root / "gate.jsonl"
        (app / "large").mkdir(parents=True)
        (app / "pyproject.toml").write_text(PROJECT)
        for name, source in {"__init__": "", "server": SERVER, "client": CLIENT}.items():
            (app / "large" / f"{name}.py").write_text(source)
        (root / "policy.yaml").write_text("ledger: gate.jsonl\n")
        (root / "run.toml").write_text(f'output = "{output}"\n')
        with PrivateSuperLink(simulation=False) as superlink:
            command = [sys.executable, "-P", "-m", "fedmjp", "supernode", "--policy", str(root / "policy.yaml"), "--"]
            superlink.start_node(*command, number=0, log=root / "node.log")
            run = superlink.submit(app, root / "run.toml")
            for _ in superlink.log(run):
                pass
            status = superlink.status(run)
        entries = [
            entry.model_dump(include={"round", "place", "verdict", "reasons", "seconds"})
            for entry in GateLedger(ledger).entries()
        ]
        return {"status": status, "server_got": json.loads(output.read_text()), "ledger": entries}
