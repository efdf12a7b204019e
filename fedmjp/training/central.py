"""Training with all pictures in one place."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedmjp.claims import claim_folder, is_gone
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import steps_per_epoch, training_epochs
from fedmjp.data.pictures import LabelledDataset
from fedmjp.defences.base import Spent
from fedmjp.defences.pipeline import Pipeline
from fedmjp.errors import CheckpointError, OutputGoneError
from fedmjp.models.build import build
from fedmjp.training.accuracy import Accuracy, validate
from fedmjp.training.config import TrainingConfig
from fedmjp.training.curves import draw
from fedmjp.training.history import History, Value
from fedmjp.training.loop import EpochReport, Schedule, Trainer
from fedmjp.training.process_group import SINGLE, ProcessGroup
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.training.state import load_state, save_checkpoint


@dataclass
class TrainingEvents:
    """Callbacks of a training run; each does nothing by default."""

    # Epochs done before, epochs in all, pictures per epoch; pictures of a step; an epoch (from 1) and what came of it.
    on_start: Callable[[int, int, int], None] = lambda _done, _epochs, _pictures: None
    on_step: Callable[[int], None] = lambda _pictures: None
    on_epoch: Callable[[int, EpochReport, Accuracy], None] = lambda _epoch, _report, _accuracy: None
    on_skipped: Callable[[str], None] = lambda _reason: None


@dataclass(frozen=True)
class Pictures:
    """What a run trains on, and what it is measured on after every epoch."""

    train: LabelledDataset
    validation: LabelledDataset

    @property
    def held_out(self) -> bool:
        """Tell whether the validation split differs from the training split."""
        return self.train.digest() != self.validation.digest()

    def digest(self) -> str:
        """Return the SHA-256, as hex, of the names of the pictures in both splits."""
        return hashlib.sha256(f"{self.train.digest()} {self.validation.digest()}".encode()).hexdigest()


def open_pictures(data: str, classes: int) -> Pictures:
    """Open the data of a training run.

    Args:
        data: As ``TrainingConfig.data``.
        classes: Number of classes of the model.

    Raises:
        DataError: If there are no pictures, or their labels do not fit the model.
    """
    return Pictures(*(open_dataset(data, split, classes=classes) for split in ("train", "validation")))


def train(
    config: TrainingConfig,
    pictures: Pictures,
    folder: TrainingFolder,
    events: TrainingEvents,
    group: ProcessGroup = SINGLE,
) -> None:
    """Train, evaluate on the validation split after every epoch, and leave everything in the folder.

    A run that was stopped goes on from its last checkpoint and ends with the same weights, to the last bit on the same
    hardware and number of threads and processes. Of several processes the first one writes; with another number of
    them sums are rounded otherwise, and drop path draws otherwise.

    Args:
        config: The run.
        pictures: Its training and validation splits.
        folder: Where weights, history and state go.
        events: Callbacks for progress.
        group: Processes that train together.

    Raises:
        DataError: If no picture can be read.
        CheckpointError: If the folder's state is of another configuration, or of other pictures.
        TrainingError: If the loss is no longer finite.
        OutputGoneError: If the folder went away.
    """
    state = load_state(folder.state, config=config.digest())
    if state is not None and state["pictures"] != pictures.train.digest():
        raise CheckpointError(
            f"{folder.state} is of a run on other pictures: restore {pictures.train.name} as it was, or give --fresh"
        )
    device = torch.device(config.device)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    model = build(config.network, drop_path=config.recipe.drop_path).to(device).to(memory_format=layout)
    schedule = Schedule(config.recipe.epochs, steps_per_epoch(len(pictures.train), config.recipe))
    pipeline = config.planned(schedule.steps)
    trainer = Trainer(model, config, pipeline, schedule=schedule, seed=config.seed, group=group)
    first = 0
    if state is not None:
        model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        first = int(state["epoch"])
    epochs = training_epochs(
        pictures.train,
        np.arange(len(pictures.train)),
        config.recipe,
        size=config.model.image_size,
        seed=config.seed,
        epochs=range(first, config.recipe.epochs),
        part=group.part,
        pinned=device.type == "cuda",
        draw=trainer.puzzles.ahead,
        on_skipped=events.on_skipped,
    )
    writer = _Writer(config, pictures, folder, pipeline, first) if group.first else None
    events.on_start(first, config.recipe.epochs, len(pictures.train))
    for epoch, batches in epochs:
        report = trainer.epoch(epoch, batches, on_step=events.on_step)
        accuracy = validate(model, pictures.validation, config.recipe, events.on_skipped, group)
        if writer is not None:
            writer.write(epoch + 1, report, accuracy, trainer)
        events.on_epoch(epoch + 1, report, accuracy)
    if writer is not None:
        writer.draw()


class _Writer:
    """A writer of history, checkpoints and curves of a run."""

    def __init__(
        self, config: TrainingConfig, pictures: Pictures, folder: TrainingFolder, pipeline: Pipeline, epochs: int
    ) -> None:
        self._config, self._pictures, self._folder, self._pipeline = config, pictures, folder, pipeline
        folder.keep_classes(pictures.train.class_names)
        self._history = History(folder.history, folder.tensorboard)
        self._history.keep_until(epochs)

    def write(self, epoch: int, report: EpochReport, accuracy: Accuracy, trainer: Trainer) -> None:
        """Record an epoch, counted from 1, and its checkpoint if one is due; at once where the folder went away."""
        config = self._config
        if is_gone(self._folder.root):
            claim_folder(self._folder.root)
            self._keep(epoch, trainer)
            raise OutputGoneError(
                f"{self._folder.root} was removed, moved or replaced during the training; the weights after epoch "
                f"{epoch} were written again, without the history: run the same command again"
            )
        self._history.append(_row(epoch, report, accuracy, self._pipeline.spent(epoch)))
        if epoch % config.checkpoint_every == 0 or epoch == config.recipe.epochs:
            self._keep(epoch, trainer)

    def _keep(self, epoch: int, trainer: Trainer) -> None:
        about = {"config": self._config.digest(), "pictures": self._pictures.train.digest(), "epoch": epoch}
        weights, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
        save_checkpoint(self._folder, weights, {**about, "model": weights, "optimizer": optimizer})

    def draw(self) -> None:
        """Draw the curves of all epochs."""
        if len(self._history.rows()):
            title = f"{self._config.label}, {self._pictures.train.name}"
            draw(self._folder.history, self._folder.figure, title=title)


def _row(epoch: int, report: EpochReport, accuracy: Accuracy, spent: Spent | None) -> dict[str, Value]:
    return {
        "epoch": epoch,
        "loss": report.loss,
        "localisation": report.localisation,
        "validation_loss": accuracy.loss,
        "top1": accuracy.top1,
        "learning_rate": report.learning_rate,
        "pictures": report.pictures,
        "seconds": report.seconds,
        "images_per_second": report.images_per_second,
        "epsilon": None if spent is None else spent.epsilon,
    }
