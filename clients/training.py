"""A client's part in a round of federated training."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from clients.private_records import PrivateRecords
from fedmjp.config import ModelConfig, RunConfig
from fedmjp.data.datasets import LabelledDataset, open_dataset
from fedmjp.data.loading import Batch, steps_per_epoch, training_batches
from fedmjp.data.partitions import Partition
from fedmjp.defences.base import Arranged
from fedmjp.errors import CheckpointError, DefenceError, TrainingError
from fedmjp.exchange import protect_trained
from fedmjp.learning import PartitionConfig, Training
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.randomness import Randomness, SeededRandomness, SystemRandomness
from fedmjp.scenario import Scenario
from fedmjp.seeds import derive
from fedmjp.training.loop import Anchor, Schedule, Trainer
from fedmjp.wire import ARRAYS, BUFFERS, EXAMPLES, METRICS


def train_round(
    scenario: Scenario, run: RunConfig, content: RecordDict, client: int, server_round: int, *, own: str | None
) -> RecordDict:
    """What a client sends back in a round.

    Args:
        scenario: Of a training run.
        run: Says where files lie.
        content: Of the server's message.
        client: Its number, from 0.
        server_round: From 1.
        own: In a deployment, where the client's pictures lie with it alone.

    Raises:
        CheckpointError: If the weights are of another architecture.
        DataError: If the pictures or their partition cannot be read.
        DefenceError: If a defence cannot protect the update.
        TrainingError: If no picture can be read, or the loss is no longer finite.
    """
    assert scenario.training is not None  # noqa: S101 (the caller looked)
    training, data = scenario.training, own or scenario.data
    pictures = _dataset(data, "train", classes=scenario.model.classes)
    if own:
        indices = np.arange(len(pictures))
    else:
        dealt = (training.partition, scenario.data, scenario.model.classes, scenario.clients, scenario.seed)
        indices = _shares(Path(run.partition_file), *dealt)[client]
    records = Path(run.evaluator_folder) if run.evaluator_folder else None
    left = PrivateRecords(records, scenario, training, client, pictures)
    # The server knows the scenario's seed: who has pictures of its own draws from the system instead.
    noise = SystemRandomness() if own else None
    return LocalTraining(scenario, training, client, pictures, indices, left, noise).answer(content, server_round)


# One process serves several clients in turn; what is kept between messages holds for all of them.
_dataset = lru_cache(maxsize=1)(open_dataset)


@lru_cache(maxsize=1)
def _architecture(network: ModelConfig, drop_path: float) -> Classifier:
    return build(network, drop_path=drop_path)


@lru_cache(maxsize=1)
def _shares(
    path: Path, config: PartitionConfig, data: str, classes: int, clients: int, seed: int
) -> tuple[np.ndarray, ...]:
    labels = _dataset(data, "train", classes=classes).labels
    return Partition.load(path, labels, config, clients=clients, seed=seed).shares


@dataclass
class LocalTraining:
    """One client in one round.

    Attributes:
        scenario: Of the run.
        training: Its part that says how.
        client: Its number, from 0.
        pictures: The data set that its pictures are in.
        indices: Those that are its own.
        records: Where it leaves private pictures for the evaluator.
        noise: What defences of updates draw from; None draws from the scenario's seed.
        skipped: Why pictures could not be read.
    """

    scenario: Scenario
    training: Training
    client: int
    pictures: LabelledDataset
    indices: np.ndarray
    records: PrivateRecords
    noise: Randomness | None = None
    skipped: list[str] = field(default_factory=list)

    def answer(self, asked: RecordDict, server_round: int) -> RecordDict:
        """What the client sends back; see ``train_round``."""
        started = time.perf_counter()
        model = self._model(asked)
        buffers = _buffers(model)
        if buffers and self.scenario.threat.defences:
            label = self.scenario.threat.pipeline.label
            raise DefenceError(
                f"{self.scenario.model.name} uploads running statistics, which {label} does not protect: take a model "
                "without batch normalisation"
            )
        # What is sent is the difference to these; a defence may compute with the model as it was.
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        if self.training.update == "gradient":
            update, metrics, seen = self._gradient(model, server_round)
        else:
            update, metrics, seen = self._change(model, before, server_round, asked)
            buffers = _buffers(model)
            model.load_state_dict(before, strict=False)
        trained = time.perf_counter()
        seeded = SeededRandomness(self.scenario.seed, ("defences", "client", self.client, server_round))
        sent = protect_trained(
            update,
            model,
            self.scenario.threat,
            examples=int(metrics[EXAMPLES]),
            shown=seen,
            randomness=self.noise or seeded,
        )
        done = time.perf_counter()
        content = RecordDict({ARRAYS: ArrayRecord({name: value.cpu() for name, value in sent.items()})})
        if buffers:
            content[BUFFERS] = ArrayRecord(buffers)
        measured = {"seconds": done - started, "upload-seconds": done - trained, "skipped": len(set(self.skipped))}
        content[METRICS] = MetricRecord({**metrics, **measured})
        return content

    def _change(
        self, model: Classifier, before: dict[str, Tensor], server_round: int, asked: RecordDict
    ) -> tuple[dict[str, Tensor], dict[str, float], list[Arranged]]:
        """How the local epochs changed what is not frozen."""
        instructions: Any = asked["config"]
        mu, epochs = float(instructions.get("proximal-mu", 0.0)), self.training.local_epochs
        trainer = self._trainer(model, Schedule(self.training.rounds * epochs, self._steps))
        first, reports = (server_round - 1) * epochs, []
        seen: list[Arranged] = []
        for epoch in range(first, first + epochs):
            batches = self._seen(trainer, epoch, seen)
            watched = self.records.watch(batches, trainer, server_round, epoch, self._single_step)
            reports.append(trainer.epoch(epoch, watched, anchor=Anchor(before, mu) if mu else None))
        metrics = {
            EXAMPLES: len(self.indices),
            "pictures": sum(report.pictures for report in reports),
            "loss": reports[-1].loss,
            "learning-rate": reports[-1].learning_rate,
        }
        learnt = {name: value for name, value in model.named_parameters() if value.requires_grad}
        return {name: value.detach() - before[name] for name, value in learnt.items()}, metrics, seen

    def _seen(self, trainer: Trainer, epoch: int, seen: list[Arranged]) -> Iterator[Batch]:
        """The batches of an epoch; what the network sees of them is noted where a defence computes with it."""
        for step, batch in enumerate(self._batches(epoch)):
            if any(each.needs_model for each in self.scenario.pipeline.made):
                seen.append(trainer.shown(batch, epoch, step).arranged)
            yield batch

    def _gradient(
        self, model: Classifier, server_round: int
    ) -> tuple[dict[str, Tensor], dict[str, float], list[Arranged]]:
        """FedSGD: of the client's next batch."""
        epoch, step = divmod(server_round - 1, self._steps)
        batch = next(iter(self._batches(epoch, skip=step)), None)
        if batch is None:
            raise TrainingError(f"client {self.client} has no picture that can be read in round {server_round}")
        trainer = self._trainer(model, Schedule(-(-self.training.rounds // self._steps), self._steps))
        self.records.leave(batch, trainer, server_round, epoch, step)
        gradient, loss = trainer.gradient(batch, epoch, step)
        metrics = {
            EXAMPLES: len(batch.labels),
            "pictures": len(batch.labels),
            "loss": loss,
            "learning-rate": self.scenario.server_rate,
        }
        return gradient, metrics, [trainer.shown(batch, epoch, step).arranged]

    @property
    def _steps(self) -> int:
        return steps_per_epoch(len(self.indices), self.training.recipe)

    @property
    def _single_step(self) -> bool:
        """Whether a round is one step on one batch."""
        return self.training.local_epochs == 1 and self._steps == 1

    def _model(self, asked: RecordDict) -> Classifier:
        # The weights are the server's: those of a file, if any, need not be here.
        network = self.scenario.network.model_copy(update={"weights": None})
        model = _architecture(network, self.training.recipe.drop_path).to(torch.device(self.scenario.device))
        weights = {name: value for record in asked.array_records.values() for name, value in _tensors(record).items()}
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"the server's weights do not fit {self.scenario.label}: {reason}") from None
        return model

    def _trainer(self, model: Classifier, schedule: Schedule) -> Trainer:
        return Trainer(
            model,
            self.training,
            self.scenario.pipeline,
            schedule=schedule,
            seed=self.scenario.seed,
            purpose=("client", self.client),
            noise=self.noise,
        )

    def _batches(self, epoch: int, skip: int = 0) -> Any:
        return training_batches(
            self.pictures,
            self.indices,
            self.training.recipe,
            size=self.scenario.model.image_size,
            seed=derive(self.scenario.seed, "client", self.client),
            epoch=epoch,
            skip=skip,
            on_skipped=self.skipped.append,
        )


def _buffers(model: Classifier) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value.cpu() for name, value in model.state_dict().items() if name not in parameters}


def _tensors(record: ArrayRecord) -> dict[str, Tensor]:
    return dict(record.to_torch_state_dict())
