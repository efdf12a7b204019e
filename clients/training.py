"""A client's part in a round of federated training."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from fedmjp.clients.consent import Consent
from fedmjp.clients.several_gpus import count_processes, start_helpers
from fedmjp.config import RunConfig
from fedmjp.data.datasets import open_dataset
from fedmjp.data.layout import Split
from fedmjp.data.loading import Batch, steps_per_epoch, training_epochs
from fedmjp.data.partitions import Partition
from fedmjp.data.pictures import LabelledDataset
from fedmjp.defences.base import Arranged
from fedmjp.errors import CheckpointError, DataError, DefenceError, TrainingError
from fedmjp.exchange import protect_trained
from fedmjp.learning import PartitionConfig, Training
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.private import PrivateBatch
from fedmjp.randomness import Randomness, SeededRandomness, SystemRandomness
from fedmjp.records import record_name
from fedmjp.scenario import TrainingScenario
from fedmjp.seeds import derive
from fedmjp.training.loop import Anchor, EpochReport, Schedule, Trainer
from fedmjp.training.process_group import SINGLE, ProcessGroup
from fedmjp.wire import ARRAYS, BUFFERS, EXAMPLES, METRICS, evaluator_folder


def train_round(
    scenario: TrainingScenario,
    training: Training,
    run: RunConfig,
    content: RecordDict,
    client: int,
    server_round: int,
    allowed: Consent,
) -> RecordDict:
    """Train a client's part of a round, and return what leaves it.

    Args:
        scenario: Of the run.
        training: Its training.
        run: The run config.
        content: The server's message, with the weights.
        client: Number of the client, from 0.
        server_round: Number of the round, from 1.
        allowed: What the node's config allows.

    Raises:
        CheckpointError: If the weights are of another architecture.
        DataError: If the pictures or their partition cannot be read, are of a class that the run has not, or lie with
            the client alone while the run does not say which label is which class.
        DefenceError: If a defence cannot protect the update.
        TrainingError: If no picture can be read, or the loss is no longer finite.
    """
    pictures = open_split(scenario, run, allowed.own, "train")
    if allowed.own:
        indices = np.arange(len(pictures))
    else:
        dealt = (training.partition, scenario.data, scenario.model.classes, scenario.clients, scenario.seed)
        indices = _shares(Path(run.partition_file), *dealt)[client]
    evaluator_place = None
    if allowed.private is not None and server_round in training.records:
        evaluator_place = evaluator_folder(allowed.private, server_round) / scenario.folder
    # The server knows the scenario's seed: who has pictures of its own draws from the system instead.
    noise, seed = (SystemRandomness(), secrets.randbits(63)) if allowed.own else (None, scenario.seed)
    local = LocalTraining(scenario, training, client, server_round, pictures, indices, seed, evaluator_place, noise)
    return local.answer(content, processes=count_processes(scenario))


def open_split(scenario: TrainingScenario, run: RunConfig, folder: str | None, split: Split) -> LabelledDataset:
    """Open pictures of a client's own folder, or the run's, with the run's labels.

    Args:
        scenario: Of the run.
        run: The run config, which names the classes.
        folder: The client's own pictures; None takes the run's.
        split: ``train`` or ``validation``.

    Raises:
        DataError: If the folder is the client's own and nobody told the labels.
    """
    pictures = _dataset(folder or scenario.data, split, classes=scenario.model.classes)
    if folder and not run.classes:
        raise DataError(
            "the run does not say which label is which class, and the pictures are my own: set class-names to a JSON "
            "list of the classes, in the order of their labels"
        )
    return pictures.labelled_as(run.classes) if run.classes else pictures


def load_weights(scenario: TrainingScenario, training: Training, content: RecordDict) -> Classifier:
    """Build the scenario's model with the weights of a message.

    Args:
        scenario: Of the run.
        training: Its training.
        content: The server's message.

    Raises:
        CheckpointError: If the weights are of another architecture.
    """
    # The weights are the server's: those of a file, if any, need not be here.
    network = scenario.network.model_copy(update={"weights": None})
    model = _architecture(network, drop_path=training.recipe.drop_path)
    weights: dict[str, Tensor] = {}
    for record in content.array_records.values():
        weights |= record.to_torch_state_dict()
    try:
        model.to(torch.device(scenario.device)).load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the server's weights do not fit {scenario.label}: {reason}") from None
    return model


# One process serves several clients in turn; what is kept between messages holds for all of them.
_dataset = lru_cache(maxsize=2)(open_dataset)  # both splits
_architecture = lru_cache(maxsize=1)(build)


@lru_cache(maxsize=1)
def _shares(
    path: Path, config: PartitionConfig, data: str, classes: int, clients: int, seed: int
) -> tuple[np.ndarray, ...]:
    labels = _dataset(data, "train", classes=classes).labels
    return Partition.load(path, labels, config, clients=clients, seed=seed).shares


@dataclass
class LocalTraining:
    """One client in one round."""

    scenario: TrainingScenario
    training: Training
    client: int
    server_round: int
    pictures: LabelledDataset
    indices: np.ndarray  # of the pictures that are its own
    seed: int  # of puzzles, mixup and drop path
    # Folder in which it leaves the pictures behind its upload for the evaluator; None leaves nothing.
    left: Path | None = None
    noise: Randomness | None = None  # what defences of updates draw from; None draws from the scenario's seed
    skipped: list[str] = field(default_factory=list)  # why pictures could not be read
    seen: list[Arranged] = field(default_factory=list)  # what the network saw, where a defence computes with it

    def answer(self, content_received: RecordDict, processes: int = 1) -> RecordDict:
        """Train, and make what the client sends back; see ``train_round``.

        Args:
            content_received: The server's message.
            processes: How many share the work, with this one.
        """
        started = time.perf_counter()
        self._require_guarantees()
        model = load_weights(self.scenario, self.training, content_received)
        buffers = _buffers(model)
        if buffers and self.scenario.threat.defences:
            label = self.scenario.threat.pipeline.label
            raise DefenceError(
                f"{self.scenario.model.name} uploads running statistics, which {label} does not protect: take a model "
                "without batch normalisation"
            )
        # What is sent is the difference to these; a defence may compute with the model as it was.
        start = {name: value.detach().clone() for name, value in model.named_parameters()}
        if self.training.update == "gradient":
            update, metrics = self._gradient(model)
        else:
            update, metrics = self._change(model, start, content_received, processes)
            buffers = _buffers(model)
            model.load_state_dict(start, strict=False)
        trained = time.perf_counter()
        seeded = SeededRandomness(self.scenario.seed, ("defences", "client", self.client, self.server_round))
        sent = protect_trained(
            update,
            model,
            self.scenario.threat,
            examples=int(metrics[EXAMPLES]),
            arranged=self.seen,
            randomness=self.noise or seeded,
        )
        finished = time.perf_counter()
        content = RecordDict({ARRAYS: ArrayRecord({name: value.cpu() for name, value in sent.items()})})
        if buffers:
            content[BUFFERS] = ArrayRecord(buffers)
        measured = {
            "seconds": finished - started,
            "upload-seconds": finished - trained,
            "skipped": len(set(self.skipped)),
        }
        content[METRICS] = MetricRecord({**metrics, **measured})
        return content

    def _require_guarantees(self) -> None:
        """Refuse to answer where a defence would state an epsilon that is of a shorter training than this one."""
        planned = self.scenario.planned(self._steps)
        if planned.defences != self.scenario.defences:
            guarantees = " and ".join(f"--defence {defence.text}" for defence in planned.defences)
            raise DefenceError(f"a guarantee is of the whole run, so that its length must be said: {guarantees}")
        steps = self.training.steps_per_upload(self._steps)
        for defence in self.scenario.pipeline.defences:
            stated = getattr(defence.options, "steps_per_upload", steps)
            if steps > stated:
                raise DefenceError(
                    f"{defence.name}: this client takes {steps} steps for an upload, steps_per_upload says {stated}: "
                    "set it to the largest number of any client"
                )

    def help(self, content: RecordDict, group: ProcessGroup) -> None:
        """Train this process's part of every batch, for the process that answers.

        Args:
            content: The server's message.
            group: The processes and this one's number.
        """
        self._train(load_weights(self.scenario, self.training, content), content, group)

    def _change(
        self, model: Classifier, start: dict[str, Tensor], content: RecordDict, processes: int
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute how the local epochs changed what is not frozen."""
        # Whole batches are needed for what is left of them, and for what batch normalisation or a defence computes.
        shared = self.left is None and not _buffers(model) and not self._defences_need_model
        with start_helpers(self, content, processes if shared else 1) as group:
            reports = self._train(model, content, group)
        metrics = {
            EXAMPLES: len(self.indices),
            "pictures": sum(report.pictures for report in reports),
            "loss": reports[-1].loss,
            "learning-rate": reports[-1].learning_rate,
        }
        learnt = {name: value for name, value in model.named_parameters() if value.requires_grad}
        return {name: value.detach() - start[name] for name, value in learnt.items()}, metrics

    def _train(self, model: Classifier, content: RecordDict, group: ProcessGroup) -> list[EpochReport]:
        """Train the local epochs, and report each."""
        instructions: Any = content["config"]
        mu, epochs = float(instructions.get("proximal-mu", 0.0)), self.training.local_epochs
        anchor = Anchor({name: value.detach().clone() for name, value in model.named_parameters()}, mu) if mu else None
        trainer = self._trainer(model, self.training.rounds * epochs, group)
        first = (self.server_round - 1) * epochs
        return [
            trainer.epoch(epoch, self._watched(trainer, epoch, batches), anchor=anchor)
            for epoch, batches in self._epochs(trainer, range(first, first + epochs), group=group)
        ]

    @property
    def _defences_need_model(self) -> bool:
        return any(defence.needs_model for defence in self.scenario.pipeline.defences)

    def _watched(self, trainer: Trainer, epoch: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an epoch, and note what the network sees where a defence or the evaluator needs it."""
        recipe = self.training.recipe
        alone = self.training.local_epochs == 1 and self._steps == 1
        # Mixed pictures are of two labels, erased ones outside [0, 1]: no record can describe them.
        described = alone and not (recipe.mixup or recipe.cutmix or recipe.random_erasing)
        for step, batch in enumerate(batches):
            if described:
                self._leave(batch, trainer, epoch, step)
            if self._defences_need_model:
                self.seen.append(trainer.prepare(batch, epoch, step).arranged)
            yield batch

    def _gradient(self, model: Classifier) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute the gradient of the client's next batch, for FedSGD."""
        epoch, step = divmod(self.server_round - 1, self._steps)
        trainer = self._trainer(model, -(-self.training.rounds // self._steps))
        _, batches = next(self._epochs(trainer, (epoch,), skip=step))
        batch = next(batches, None)
        if batch is None:
            raise TrainingError(f"client {self.client} has no picture that can be read in round {self.server_round}")
        self._leave(batch, trainer, epoch, step)
        gradient, loss = trainer.gradient(batch, epoch, step)
        self.seen.append(trainer.prepare(batch, epoch, step).arranged)
        metrics = {
            EXAMPLES: len(batch.labels),
            "pictures": len(batch.labels),
            "loss": loss,
            "learning-rate": self.scenario.server_rate,
        }
        return gradient, metrics

    def _leave(self, batch: Batch, trainer: Trainer, epoch: int, step: int) -> None:
        """Leave a batch that an upload is computed from, as it goes into the network."""
        if self.left is None:
            return
        visible = trainer.prepare(batch, epoch, step).arranged
        private = PrivateBatch(
            clean=batch.images,
            shuffled=visible.images.cpu(),
            mask=visible.mask,
            source=visible.source,
            labels=batch.labels,
            pictures=tuple(self.pictures.key(index) for index in batch.indices),
            gradient_of=self.scenario.gradient_of,
        )
        private.save(self.left / record_name(self.server_round, self.client))

    @property
    def _steps(self) -> int:
        return steps_per_epoch(len(self.indices), self.training.recipe)

    def _trainer(self, model: Classifier, epochs: int, group: ProcessGroup = SINGLE) -> Trainer:
        return Trainer(
            model,
            self.training,
            self.scenario.pipeline,
            schedule=Schedule(epochs, self._steps),
            seed=self.seed,
            purpose=("client", self.client),
            noise=self.noise,
            group=group,
        )

    def _epochs(
        self, trainer: Trainer, epochs: Sequence[int], *, skip: int = 0, group: ProcessGroup = SINGLE
    ) -> Iterator[tuple[int, Iterator[Batch]]]:
        return training_epochs(
            self.pictures,
            self.indices,
            self.training.recipe,
            size=self.scenario.model.image_size,
            seed=derive(self.scenario.seed, "client", self.client),
            epochs=epochs,
            skip=skip,
            part=group.part,
            pinned=self.scenario.device == "cuda",
            draw=trainer.puzzles.ahead,
            on_skipped=self.skipped.append,
        )


def _buffers(model: Classifier) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value.cpu() for name, value in model.state_dict().items() if name not in parameters}
