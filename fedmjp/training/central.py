"""Training with all pictures in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedmjp.data.datasets import LabelledDataset, open_dataset
from fedmjp.data.loading import evaluation_batches, steps_per_epoch, training_batches
from fedmjp.errors import CheckpointError
from fedmjp.learning import Recipe
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.training.accuracy import Accuracy, top1
from fedmjp.training.config import TrainingConfig
from fedmjp.training.history import History, draw
from fedmjp.training.loop import EpochReport, Schedule, Trainer
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.training.state import load_state, save_state, save_weights


@dataclass
class TrainingEvents:
    """Whom a run tells what; each does nothing by default.

    Attributes:
        on_start: Called with (epochs done before, epochs in all, pictures per epoch).
        on_step: Called after every step with the number of pictures in it.
        on_epoch: Called after every epoch (from 1) with its report and the validation accuracy.
        on_skipped: Called with the reason for every picture that cannot be read.
    """

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


def open_pictures(data: str, classes: int) -> Pictures:
    """Open the data of a run.

    Args:
        data: As of ``TrainingConfig``.
        classes: That the model knows.

    Raises:
        DataError: If there are no pictures, or their labels do not fit the model.
    """
    return Pictures(*(open_dataset(data, split, classes=classes) for split in ("train", "validation")))


def train(config: TrainingConfig, pictures: Pictures, folder: TrainingFolder, events: TrainingEvents) -> None:
    """Train, evaluate on the validation split after every epoch, and leave everything in the folder.

    A run that was stopped goes on from its last checkpoint and ends with the same weights, to the last
    bit on the same hardware and number of threads.

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
    folder.keep_classes(pictures.train.class_names)
    model = build(config.network, drop_path=config.recipe.drop_path).to(torch.device(config.device))
    trainer = _trainer(model, config, len(pictures.train))
    history = History(folder.history, folder.tensorboard)
    done = _resume(trainer, state, history)
    events.on_start(done, config.recipe.epochs, len(pictures.train))
    for epoch in range(done, config.recipe.epochs):
        batches = training_batches(
            pictures.train,
            np.arange(len(pictures.train)),
            config.recipe,
            size=config.model.image_size,
            seed=config.seed,
            epoch=epoch,
            on_skipped=events.on_skipped,
        )
        report = trainer.epoch(epoch, batches, on_step=events.on_step)
        accuracy = validate(model, pictures.validation, config.recipe, events.on_skipped)
        history.append(_row(epoch + 1, report, accuracy))
        if (epoch + 1) % config.checkpoint_every == 0 or epoch + 1 == config.recipe.epochs:
            _keep(trainer, config, pictures.train, folder, epoch + 1)
        events.on_epoch(epoch + 1, report, accuracy)
    if len(history.rows()):
        draw(folder.history, folder.figure, title=f"{config.label}, {pictures.train.name}")


def validate(
    model: Classifier, dataset: LabelledDataset, recipe: Recipe, on_skipped: Callable[[str], None]
) -> Accuracy:
    """Top-1 accuracy of the unshuffled pictures of a data set that can be read; of others the reason is told."""
    batches = evaluation_batches(
        dataset,
        np.arange(len(dataset)),
        recipe.crop_share,
        size=model.image_size,
        batch_size=recipe.batch_size,
        workers=recipe.workers,
        on_skipped=on_skipped,
    )
    return top1(model, batches)


def _trainer(model: Classifier, config: TrainingConfig, pictures: int) -> Trainer:
    return Trainer(
        model,
        config,
        config.pipeline,
        schedule=Schedule(config.recipe.epochs, steps_per_epoch(pictures, config.recipe)),
        seed=config.seed,
    )


def _resume(trainer: Trainer, state: dict[str, Any] | None, history: History) -> int:
    """Put the trainer into the state of the last checkpoint; how many epochs it had done."""
    if state is None:
        history.keep_until(0)
        return 0
    trainer.model.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    history.keep_until(state["epoch"])
    return int(state["epoch"])


def _keep(
    trainer: Trainer, config: TrainingConfig, pictures: LabelledDataset, folder: TrainingFolder, epoch: int
) -> None:
    weights = trainer.model.state_dict()
    save_weights(folder.weights, weights)
    about = {"config": config.digest(), "pictures": pictures.digest(), "epoch": epoch}
    save_state(folder.state, {**about, "model": weights, "optimizer": trainer.optimizer.state_dict()})


def _row(epoch: int, report: EpochReport, accuracy: Accuracy) -> dict[str, float | int | None]:
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
    }
