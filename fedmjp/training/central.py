"""Training with all pictures in one place."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fedmjp.data.datasets import LabelledDataset, open_dataset
from fedmjp.data.loading import steps_per_epoch, training_epochs
from fedmjp.defences.base import Spent
from fedmjp.defences.pipeline import Pipeline
from fedmjp.errors import CheckpointError
from fedmjp.models.build import build
from fedmjp.training.accuracy import Accuracy, validate
from fedmjp.training.config import TrainingConfig
from fedmjp.training.curves import draw
from fedmjp.training.history import History, Value
from fedmjp.training.loop import EpochReport, Schedule, Trainer
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.training.state import load_state, save_checkpoint
from fedmjp.training.together import ALONE, Together


@dataclass
class TrainingEvents:
    """Whom a run tells what; each does nothing by default."""

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
        """Whether they are not the same pictures, as they are where there is no validation split."""
        return self.train.digest() != self.validation.digest()

    def digest(self) -> str:
        """SHA-256 of which pictures there are in both, as hex."""
        return hashlib.sha256(f"{self.train.digest()} {self.validation.digest()}".encode()).hexdigest()


def open_pictures(data: str, classes: int) -> Pictures:
    """Open the data of a run, as ``TrainingConfig`` names it.

    Raises:
        DataError: If there are no pictures, or their labels do not fit the model.
    """
    return Pictures(*(open_dataset(data, split, classes=classes) for split in ("train", "validation")))


def train(
    config: TrainingConfig,
    pictures: Pictures,
    folder: TrainingFolder,
    events: TrainingEvents,
    together: Together = ALONE,
) -> None:
    """Train, evaluate on the validation split after every epoch, and leave everything in the folder.

    A run that was stopped goes on from its last checkpoint and ends with the same weights, to the last bit on the same
    hardware and number of threads and processes. Of several processes the first one writes; with another number of
    them sums are rounded otherwise, and drop path draws otherwise.

    Raises:
        DataError: If no picture can be read.
        CheckpointError: If the folder's state is of another configuration, or of other pictures.
        TrainingError: If the loss is no longer finite.
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
    trainer = Trainer(model, config, pipeline, schedule=schedule, seed=config.seed, together=together)
    done = 0
    if state is not None:
        model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        done = int(state["epoch"])
    epochs = training_epochs(
        pictures.train,
        np.arange(len(pictures.train)),
        config.recipe,
        size=config.model.image_size,
        seed=config.seed,
        epochs=range(done, config.recipe.epochs),
        part=together.part,
        pinned=device.type == "cuda",
        draw=trainer.puzzles.ahead,
        on_skipped=events.on_skipped,
    )
    writer = _Writer(config, pictures, folder, pipeline, done) if together.first else None
    events.on_start(done, config.recipe.epochs, len(pictures.train))
    for epoch, batches in epochs:
        report = trainer.epoch(epoch, batches, on_step=events.on_step)
        accuracy = validate(model, pictures.validation, config.recipe, events.on_skipped, together)
        if writer is not None:
            writer.write(epoch + 1, report, accuracy, trainer)
        events.on_epoch(epoch + 1, report, accuracy)
    if writer is not None:
        writer.draw()


class _Writer:
    """Leaves in a run's folder what its epochs came to."""

    def __init__(
        self, config: TrainingConfig, pictures: Pictures, folder: TrainingFolder, pipeline: Pipeline, done: int
    ) -> None:
        self._config, self._pictures, self._folder, self._pipeline = config, pictures, folder, pipeline
        folder.keep_classes(pictures.train.class_names)
        self._history = History(folder.history, folder.tensorboard)
        self._history.keep_until(done)

    def write(self, epoch: int, report: EpochReport, accuracy: Accuracy, trainer: Trainer) -> None:
        """Of an epoch, counted from 1."""
        config = self._config
        self._history.append(_row(epoch, report, accuracy, self._pipeline.spent(epoch)))
        if epoch % config.checkpoint_every == 0 or epoch == config.recipe.epochs:
            about = {"config": config.digest(), "pictures": self._pictures.train.digest(), "epoch": epoch}
            weights, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
            save_checkpoint(self._folder, weights, {**about, "model": weights, "optimizer": optimizer})

    def draw(self) -> None:
        """Draw the curves, of all epochs that there were."""
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
