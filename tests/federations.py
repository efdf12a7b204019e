"""A federation in this process: real server loop, real clients, no Flower engine between them."""

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Message, MessageType
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

from fedmjp.benchmarks.federation.training import check_recordable, deal, plan_for
from fedmjp.clients.app import evaluate, query, train
from fedmjp.data.partitions import Partition
from fedmjp.learning import Training
from fedmjp.scenario import AnyScenario, TrainingScenario, make_run_config, read_scenarios
from fedmjp.server.loop import Federation
from fedmjp.training.run_folder import TrainingFolder

PLAIN = {
    "batch_size": 2, "learning_rate": 0.05, "warmup_epochs": 0, "repeats": 1, "rand_augment": "", "color_jitter": 0,
    "random_erasing": 0, "mixup": 0, "cutmix": 0,
}  # fmt: skip
MICRO = {"name": "deit_micro", "image_size": 64, "patch_size": 8, "classes": 4}
Answer = Callable[[int, int, Message], Message | None]  # (round, client, reply) to what arrives


PLACES = {"reads": "/", "leaves": "/"}  # of the node: it allows everything
HOME = tempfile.TemporaryDirectory()  # removed with the process


@cache
def pictures() -> str:
    """A folder of eight small pictures in four classes."""
    root, generator = Path(HOME.name), np.random.default_rng(0)
    for number in range(8):
        path = root / f"class-{number % 4}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((72, 72), Image.Resampling.BICUBIC).save(path)
    return str(root)


def scenario_of(**changes: Any) -> TrainingScenario:
    """Two clients with four pictures each that train for three rounds, unless said otherwise, however few answer.

    Args:
        changes: Keys of the scenario, and of its training.
    """
    own = {key: value for key, value in changes.items() if key in Training.model_fields}
    shared = {key: value for key, value in changes.items() if key not in own}
    training = {"recipe": PLAIN, "rounds": 3, "quorum": 0, **own}
    return TrainingScenario.parse({"model": MICRO, "data": pictures(), "clients": 2, "training": training, **shared})


class InProcess:
    """A Grid that asks the real ClientApp.

    Args:
        scenario: Of the run.
        folder: Of the run.
        shares: How many pictures each client has.
        nodes: Node of each client, to vary.
        answer: What becomes of a reply on its way; None loses it.
        own: Pictures that lie with a client alone, as in a deployment.
    """

    def __init__(
        self,
        scenario: TrainingScenario,
        folder: TrainingFolder,
        shares: tuple[int, ...] = (),
        *,
        nodes: tuple[int, ...] | None = None,
        answer: Answer = lambda _round, _client, reply: reply,
        own: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.nodes = nodes or tuple(range(10, 10 + scenario.clients))
        self.answer, self.own = answer, own
        self.query: Callable[[Message, Any], Message] = query
        self.replies: dict[tuple[int, int], Message] = {}
        records = str(folder.records) if scenario.training and scenario.training.records else ""
        self.run = make_run_config(
            [scenario],
            output_folder=str(folder.root),
            partition_file=str(folder.partition),
            share_sizes=() if own else shares,
            class_names=json.dumps([f"class-{label}" for label in range(4)]) if own else "",
            uploads_folder=records,
            evaluator_folder=records,
        )

    @property
    def scenarios(self) -> tuple[AnyScenario, ...]:
        """What is played, with what was planned."""
        return read_scenarios(self.run)

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"message-{number}"
            client = self.nodes.index(message.metadata.dst_node_id)
            node: dict[str, Any] = {"partition-id": client, "num-partitions": len(self.nodes), **PLACES}
            if client in self.own:
                node = {**node, "data": self.own[client], "reads": "/nowhere", "leaves": "/nowhere"}
            context: Any = SimpleNamespace(run_config=self.run.flat(), node_config=node, node_id=self.nodes[client])
            if message.metadata.message_type == MessageType.QUERY:
                reply: Message | None = self.query(message, context)
            elif message.metadata.message_type == MessageType.EVALUATE:
                reply = evaluate(message, context)
            else:
                server_round = int(message.content["config"]["server-round"])  # type: ignore[index]
                reply = self.answer(server_round, client, train(message, context))
            if reply is not None:
                reply.metadata.__dict__["_src_node_id"] = self.nodes[client]
                replies.append(reply)
                if message.metadata.message_type == MessageType.TRAIN:
                    self.replies[server_round, client] = reply
        random.Random(self.nodes[0]).shuffle(replies)
        return replies


def prepare(scenario: TrainingScenario, folder: TrainingFolder) -> tuple[TrainingScenario, Partition]:
    """What the launcher does before Flower starts."""
    _, dealt = deal(scenario)
    check_recordable(scenario, dealt)
    folder.root.mkdir(parents=True, exist_ok=True)
    dealt.save(folder.partition)
    return plan_for(scenario, dealt), dealt


def play(scenario: TrainingScenario, root: Path, **grid: Any) -> tuple[dict[str, torch.Tensor], InProcess]:
    """Train, or go on; the last weights, and the grid."""
    folder = TrainingFolder(root)
    planned, dealt = prepare(scenario, folder)
    between = InProcess(planned, folder, tuple(map(len, dealt.shares)), **grid)
    Federation(between, planned, between.run).play()  # type: ignore[arg-type]
    state = torch.load(folder.state, weights_only=True)
    return state["weights"], between
