"""A federation in this process: real server loop, real clients, no Flower engine between them."""

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

from benchmarks.federation.training import check_recordable, deal, partition_file, records_folder
from clients.app import query, train
from fedmjp.config import FederationConfig, RecordingConfig, TrainingRun, to_run_config
from fedmjp.data.partitions import Partition
from fedmjp.training.config import FederatedConfig
from fedmjp.training.run_folder import TrainingFolder
from server.training import FederatedTraining

PLAIN = {
    "batch_size": 2, "learning_rate": 0.05, "warmup_epochs": 0, "repeats": 1, "rand_augment": "", "color_jitter": 0,
    "random_erasing": 0, "mixup": 0, "cutmix": 0,
}  # fmt: skip
MICRO = {"name": "deit_micro", "image_size": 64, "patch_size": 8, "classes": 4}
Answer = Callable[[int, int, Message], Message | None]  # (round, client, reply) to what arrives


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


def config_of(**changes: Any) -> FederatedConfig:
    """Two clients with four pictures each, unless said otherwise."""
    training = {"model": MICRO, "data": pictures(), "recipe": PLAIN, **changes.pop("training", {})}
    return FederatedConfig.parse({"training": training, "partition": {"clients": 2}, "rounds": 3, **changes})


class InProcess:
    """A Grid that asks the real ClientApp.

    Args:
        config: Of the run.
        folder: Of the run.
        nodes: Node of each client, to vary.
        answer: What becomes of a reply on its way; None loses it.
        own: Pictures that lie with a client alone, as in a deployment.
    """

    def __init__(
        self,
        config: FederatedConfig,
        folder: TrainingFolder,
        *,
        nodes: tuple[int, ...] | None = None,
        answer: Answer = lambda _round, _client, reply: reply,
        own: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.nodes = nodes or tuple(range(10, 10 + config.partition.clients))
        self.answer, self.own = answer, own
        self.query: Callable[[Message, Any], Message] = query
        self.replies: dict[tuple[int, int], Message] = {}
        records = str(records_folder(folder)) if config.uploads else ""
        run = TrainingRun(
            training=config.model_dump_json(),
            output_folder=str(folder.root),
            partition_file=str(partition_file(folder)),
        )
        recording = RecordingConfig(uploads_folder=records, evaluator_folder=records)
        self.run_config = to_run_config(FederationConfig(), recording, run)

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"message-{number}"
            client = self.nodes.index(message.metadata.dst_node_id)
            node: dict[str, Any] = {"partition-id": client, "num-partitions": len(self.nodes)}
            if client in self.own:
                node["data"] = self.own[client]
            context: Any = SimpleNamespace(run_config=self.run_config, node_config=node, node_id=self.nodes[client])
            if message.metadata.message_type == MessageType.QUERY:
                reply: Message | None = self.query(message, context)
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


def prepare(config: FederatedConfig, folder: TrainingFolder) -> Partition:
    """What the launcher does before Flower starts."""
    _, dealt = deal(config)
    check_recordable(config, dealt)
    folder.root.mkdir(parents=True, exist_ok=True)
    dealt.save(partition_file(folder))
    return dealt


def play(config: FederatedConfig, root: Path, **grid: Any) -> tuple[dict[str, torch.Tensor], InProcess]:
    """Train, or go on; the last weights, and the grid."""
    folder = TrainingFolder(root)
    dealt = prepare(config, folder)
    between = InProcess(config, folder, **grid)
    records = records_folder(folder) if config.uploads else None
    shares = () if between.own else tuple(map(len, dealt.shares))
    FederatedTraining(between, config, folder, records, shares=shares).run()  # type: ignore[arg-type]
    state = torch.load(folder.state, weights_only=True)
    return state["weights"], between
