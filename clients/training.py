"""A client's part in a round of federated training."""

import json
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from clients.private_records import PrivateRecords
from fedmjp.config import ModelConfig, RecordingConfig, TrainingRun, from_run_config
from fedmjp.data.datasets import LabelledDataset, open_dataset
from fedmjp.data.loading import steps_per_epoch, training_batches
from fedmjp.data.partitions import Partition
from fedmjp.errors import CheckpointError, ConfigError, FedmjpError, TrainingError
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.seeds import derive
from fedmjp.training.config import FederatedConfig
from fedmjp.training.loop import Anchor, Schedule, Trainer
from fedmjp.wire import ARRAYS, BUFFERS, EXAMPLES, METRICS

REFUSED = 1000  # Flower leaves codes from here on to apps


def train_round(message: Message, context: Context) -> Message:
    """Answer a round with weights (FedSGD: a gradient), or with an error of one line."""
    run = from_run_config(TrainingRun, context.run_config)
    try:
        local = _local(FederatedConfig.parse(json.loads(run.training)), Path(run.partition_file), context)
        content = local.answer(message.content)
    except FedmjpError as error:
        return Message(Error(code=REFUSED, reason=f"{type(error).__name__}: {error}"), reply_to=message)
    return Message(content=content, reply_to=message)


# One process serves several clients in turn; what is kept between messages holds for all of them.
_dataset = lru_cache(maxsize=1)(open_dataset)


@lru_cache(maxsize=1)
def _architecture(arm: ModelConfig, drop_path: float) -> Classifier:
    return build(arm, drop_path=drop_path)


@lru_cache(maxsize=1)
def _shares(path: Path, config: FederatedConfig) -> tuple[np.ndarray, ...]:
    labels = _dataset(config.training.data, "train", classes=config.training.model.classes).labels
    return Partition.load(path, labels, config.partition, seed=config.training.seed).shares


@dataclass
class LocalTraining:
    """One client in one round.

    Attributes:
        config: Of the run.
        client: Its number, from 0.
        pictures: The data set that its pictures are in.
        indices: Those that are its own.
        records: Where it leaves private pictures for the evaluator.
        skipped: Why pictures could not be read.
    """

    config: FederatedConfig
    client: int
    pictures: LabelledDataset
    indices: np.ndarray
    records: PrivateRecords
    skipped: list[str] = field(default_factory=list)

    def answer(self, asked: RecordDict) -> RecordDict:
        """What the client sends back.

        Raises:
            CheckpointError: If the weights are of another architecture.
            TrainingError: If no picture can be read, or the loss is no longer finite.
        """
        started = time.perf_counter()
        instructions: Any = asked["config"]
        server_round = int(instructions["server-round"])
        model = self._model(asked)
        if self.config.strategy == "fedsgd":
            arrays, metrics = self._gradient(model, server_round)
        else:
            arrays, metrics = self._weights(model, server_round, float(instructions.get("proximal-mu", 0.0)))
        content = RecordDict({ARRAYS: ArrayRecord(arrays)})
        if buffers := _buffers(model):
            content[BUFFERS] = ArrayRecord(buffers)
        measured = {"seconds": time.perf_counter() - started, "skipped": len(set(self.skipped))}
        content[METRICS] = MetricRecord({**metrics, **measured})
        return content

    def _weights(self, model: Classifier, server_round: int, mu: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """All parameters after the local epochs."""
        config = self.config
        anchor = Anchor({name: value.detach().clone() for name, value in model.named_parameters()}, mu) if mu else None
        trainer = self._trainer(model, Schedule(config.rounds * config.local_epochs, self._steps))
        first = (server_round - 1) * config.local_epochs
        reports = []
        for epoch in range(first, first + config.local_epochs):
            batches = self.records.watch(self._batches(epoch), trainer, server_round, epoch, self._single_step)
            reports.append(trainer.epoch(epoch, batches, anchor=anchor))
        metrics = {
            EXAMPLES: len(self.indices),
            "pictures": sum(report.pictures for report in reports),
            "loss": reports[-1].loss,
            "learning-rate": reports[-1].learning_rate,
        }
        return {name: value.detach().cpu() for name, value in model.named_parameters()}, metrics

    def _gradient(self, model: Classifier, server_round: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """FedSGD: of the client's next batch."""
        epoch, step = divmod(server_round - 1, self._steps)
        batch = next(iter(self._batches(epoch, skip=step)), None)
        if batch is None:
            raise TrainingError(f"client {self.client} has no picture that can be read in round {server_round}")
        trainer = self._trainer(model, Schedule(-(-self.config.rounds // self._steps), self._steps))
        self.records.leave(batch, trainer, server_round, epoch, step)
        gradient, loss = trainer.gradient(batch, epoch, step)
        metrics = {
            EXAMPLES: len(batch.labels),
            "pictures": len(batch.labels),
            "loss": loss,
            "learning-rate": self.config.server_rate,
        }
        return {name: value.cpu() for name, value in gradient.items()}, metrics

    @property
    def _steps(self) -> int:
        return steps_per_epoch(len(self.indices), self.config.training.recipe)

    @property
    def _single_step(self) -> bool:
        """Whether a round is one step on one batch."""
        return self.config.local_epochs == 1 and self._steps == 1

    def _model(self, asked: RecordDict) -> Classifier:
        training = self.config.training
        # The weights are the server's: those of a file, if any, need not be here.
        arm = training.model.model_copy(update={"weights": None})
        model = _architecture(arm, training.recipe.drop_path).to(torch.device(training.device))
        weights = {name: value for record in asked.array_records.values() for name, value in _tensors(record).items()}
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"the server's weights do not fit {arm.label}: {reason}") from None
        return model

    def _trainer(self, model: Classifier, schedule: Schedule) -> Trainer:
        training = self.config.training
        return Trainer(
            model,
            training.puzzle,
            training.recipe,
            classes=training.model.classes,
            schedule=schedule,
            seed=training.seed,
            purpose=("client", self.client),
        )

    def _batches(self, epoch: int, skip: int = 0) -> Any:
        training = self.config.training
        return training_batches(
            self.pictures,
            self.indices,
            training.recipe,
            size=training.model.image_size,
            seed=derive(training.seed, "client", self.client),
            epoch=epoch,
            skip=skip,
            on_skipped=self.skipped.append,
        )


def _local(config: FederatedConfig, partition_file: Path, context: Context) -> LocalTraining:
    node = context.node_config
    client, clients = int(node["partition-id"]), int(node["num-partitions"])
    if clients != config.partition.clients:
        raise ConfigError(
            f"partition.clients = {config.partition.clients}, but the federation has {clients}; "
            "set both to the same number"
        )
    # In a deployment a client's pictures may lie with it alone.
    own = node.get("data")
    pictures = _dataset(str(own or config.training.data), "train", classes=config.training.model.classes)
    indices = np.arange(len(pictures)) if own else _shares(partition_file, config)[client]
    folder = from_run_config(RecordingConfig, context.run_config).evaluator_folder
    records = PrivateRecords(Path(folder) if folder else None, config, client, pictures)
    return LocalTraining(config, client, pictures, indices, records)


def _buffers(model: Classifier) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value.cpu() for name, value in model.state_dict().items() if name not in parameters}


def _tensors(record: ArrayRecord) -> dict[str, Tensor]:
    return dict(record.to_torch_state_dict())
