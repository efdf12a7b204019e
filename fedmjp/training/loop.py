"""The one training loop: central runs and Flower's clients both train with it."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn

from fedmjp.arithmetic import computing, rounded
from fedmjp.data.loading import Batch
from fedmjp.defences.base import Arranged
from fedmjp.defences.pipeline import Pipeline
from fedmjp.errors import TrainingError
from fedmjp.learning import Learning, Puzzle, Recipe
from fedmjp.models.classifier import Classifier
from fedmjp.randomness import Randomness
from fedmjp.seeds import derive, scoped_randomness
from fedmjp.tensors import to_device
from fedmjp.training.process_group import SINGLE, ProcessGroup
from fedmjp.training.puzzles import TrainingPuzzles

REFERENCE_BATCH = 512  # that the recipe's learning rates are stated for


@dataclass(frozen=True)
class Schedule:
    """A run's length: epochs in all (in a federation rounds x local epochs), and steps of each."""

    epochs: int
    steps: int


@dataclass(frozen=True)
class Anchor:
    """FedProx's addition to a client's loss: mu / 2 times the squared distance to the weights that it started from.

    Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, Eq. 2.
    """

    weights: Mapping[str, Tensor]
    mu: float


@dataclass
class EpochReport:
    """Figures of an epoch: mean losses per picture, seconds with the reading of pictures, the last learning rate."""

    loss: float
    localisation: float  # unweighted; 0 without a regressor
    pictures: int
    seconds: float
    learning_rate: float

    @property
    def images_per_second(self) -> float:
        """Return the pictures per second."""
        return self.pictures / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepInputs:
    """The network's inputs and targets of a batch: pictures are in [0, 1] where the recipe erases nothing."""

    arranged: Arranged  # on the model's device
    targets: Tensor  # (batch,) labels, or (batch, classes) where pictures were mixed
    puzzled: bool  # whether anything was done to them


class Trainer:
    """A model, its optimiser and its schedule; the model is trained in place, what defences withhold is frozen.

    All randomness (mixup, puzzles, drop path, what defences draw) of a step depends on the seed, ``purpose``, the epoch
    and the step alone: a run that goes on from a checkpoint takes the same steps as one that was never stopped.

    Args:
        model: On its device.
        learning: Recipe, and the puzzle's schedule.
        pipeline: Defences; those of pictures and of single pictures' gradients act here.
        schedule: How long the run is, for the learning rate.
        seed: Of all randomness.
        purpose: Names that tell this run's randomness from others' of the same seed, such as a client's.
        noise: What protects single pictures draws from it; None draws from the seed, which others may know.
        group: Processes that train the same model; batches are this process's part then.

    Raises:
        TrainingError: If several processes cannot train this together.
    """

    def __init__(  # noqa: PLR0913 (a run, and its place in it)
        self,
        model: Classifier,
        learning: Learning,
        pipeline: Pipeline,
        *,
        schedule: Schedule,
        seed: int,
        purpose: tuple[str | int, ...] = (),
        noise: Randomness | None = None,
        group: ProcessGroup = SINGLE,
    ) -> None:
        self.model, self.puzzle, self.recipe, self._pipeline = model, learning.puzzle, learning.recipe, pipeline
        from timm.optim import create_optimizer_v2  # noqa: PLC0415 (seconds, for what does not train)

        recipe, frozen = learning.recipe, pipeline.withheld(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self._schedule, self._seed, self._purpose, self._noise = schedule, seed, purpose, noise
        self._group = group
        self.puzzles = TrainingPuzzles(pipeline, learning.puzzle, model.grid, seed, purpose)
        scale = recipe.batch_size / REFERENCE_BATCH
        self.optimizer: torch.optim.Optimizer = create_optimizer_v2(
            model,
            opt="adamw",
            lr=recipe.learning_rate * scale,
            weight_decay=recipe.weight_decay,
            fused=self._device.type == "cuda",
        )
        self._scheduler = CosineLRScheduler(
            self.optimizer,
            t_initial=schedule.epochs * schedule.steps,
            lr_min=recipe.final_learning_rate * scale,
            warmup_t=recipe.warmup_epochs * schedule.steps,
            warmup_lr_init=recipe.warmup_learning_rate * scale,
            t_in_epochs=False,
        )
        self._mixup = _mixup(recipe, int(model.backbone.num_classes))
        self._normalises_batches = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        self._require_trainable_in_group()
        # CUDA has no algorithm for the gradient of max pooling that repeats.
        self._repeats = not any(isinstance(module, nn.MaxPool2d) for module in model.modules())
        self._forward: Any = torch.compile(model) if recipe.compile else model

    def epoch(
        self,
        epoch: int,
        batches: Iterable[Batch],
        *,
        anchor: Anchor | None = None,
        on_step: Callable[[int], None] = lambda _step: None,
    ) -> EpochReport:
        """Train for one epoch.

        Args:
            epoch: From 0.
            batches: Of the epoch, in order.
            anchor: FedProx's addition to the loss.
            on_step: Called after each step with about the number of its pictures.

        Raises:
            TrainingError: If no picture could be read, or loss or weights are no longer finite.
        """
        self.model.train()
        started = time.perf_counter()
        sums: list[Tensor] = []  # of a step's losses, and its pictures; left on the device until the epoch ends
        for step, batch in enumerate(batches):
            self._scheduler.step_update(epoch * self._schedule.steps + step)
            self.optimizer.zero_grad()
            part = torch.stack(self._differentiate(batch, epoch, step, anchor)).detach()
            sums.append(self._group.average(self.model.parameters(), part, len(batch.labels)))
            self._take_step()
            on_step(len(batch.labels) * self._group.of)
        self.model.eval()
        *losses, pictures = torch.stack(sums).sum(dim=0).tolist() if sums else (0.0, 0.0, 0.0)
        seconds = time.perf_counter() - started
        if not pictures:
            raise TrainingError(f"epoch {epoch + 1} had no picture that can be read; see what was skipped")
        mean, localised = (loss / pictures for loss in losses)
        self._require_finite(mean + localised, epoch)
        return EpochReport(mean, localised, int(pictures), seconds, self.optimizer.param_groups[0]["lr"])

    def gradient(self, batch: Batch, epoch: int, step: int) -> tuple[dict[str, Tensor], float]:
        """Compute the gradient of a batch's whole loss without taking a step, as FedSGD does.

        Args:
            batch: The pictures.
            epoch: From 0.
            step: From 0.

        Returns:
            The gradient by parameter name, and the classification loss.
        """
        self.model.train()
        self.optimizer.zero_grad()
        loss, _ = self._differentiate(batch, epoch, step, None)
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in self.model.named_parameters()
            if value.requires_grad
        }
        self.optimizer.zero_grad()
        self.model.eval()
        return gradients, loss.item()

    def losses(self, batch: Batch, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Compute the classification loss and the DAL loss (0 without a regressor) of a batch, scalars.

        Args:
            batch: The pictures.
            epoch: From 0.
            step: From 0.

        Raises:
            TrainingError: If the model has batch normalisation and the batch is a single picture.
        """
        return self._losses(self.prepare(batch, epoch, step), self._randomness(epoch, step))

    def _require_trainable_in_group(self) -> None:
        if self._group.of == 1:
            return
        if self._pipeline.by_example:
            raise TrainingError(
                f"{self._pipeline.label} draws one noise for all pictures of a step, which {self._group.of} "
                "processes do not share: train in one process"
            )
        if self._normalises_batches:
            raise TrainingError(
                "a model that normalises over its batch learns something else from its parts: train in one process"
            )

    def _losses(self, inputs: StepInputs, randomness: AbstractContextManager[None]) -> tuple[Tensor, Tensor]:
        targets, mask = inputs.targets, None
        if self._normalises_batches and (len(targets) == 1 or self.recipe.at_once):
            subject = (
                f"a batch in parts (at_once={self.recipe.at_once})" if self.recipe.at_once else "a batch of one picture"
            )
            raise TrainingError(f"{subject} cannot train a model that normalises over its batch: take more at once")
        images = inputs.arranged.images
        if inputs.puzzled and self.model.defended:
            mask = to_device(inputs.arranged.mask, images.device)
        with randomness:
            with rounded(self.recipe.precision, self._device):
                smoothing = self.recipe.label_smoothing if targets.ndim == 1 else 0.0  # mixup has smoothed them
                loss = F.cross_entropy(self._forward(images, mask), targets, label_smoothing=smoothing)
            if self.model.localisation is None:
                return loss, loss.new_zeros(())
            return loss, self.model.localisation_loss(mask)

    def prepare(self, batch: Batch, epoch: int, step: int) -> StepInputs:
        """Prepare a batch for the network: mix and shuffle its pictures.

        Args:
            batch: The pictures.
            epoch: From 0.
            step: From 0.
        """
        with self._randomness(epoch, step):
            images = batch.images.to(self._device, non_blocking=True)
            targets = batch.labels.to(self._device, non_blocking=True)
            if self._mixup is not None and len(images) % 2 == 0:  # timm mixes pairs
                images, targets = self._mixup(images.clone(), targets)
        places = [batch.place(number) for number in range(len(images))]
        moved = self.puzzles.arrange(images, epoch, step, places, batch.drawn)
        return StepInputs(
            moved or Pipeline().arrange(images, self.model.grid, randomness=()), targets, moved is not None
        )

    @property
    def _device(self) -> torch.device:
        return self.model.mean.device

    def _randomness(self, *step: int) -> AbstractContextManager[None]:
        return scoped_randomness(derive(self._seed, "step", *self._purpose, *step))

    def localisation_weight(self, epoch: int) -> float:
        """Return the weight of the DAL loss.

        Args:
            epoch: From 0.
        """
        return localisation_weight(self.puzzle, self.recipe, epoch, self._schedule.epochs)

    def _total(self, loss: Tensor, localisation: Tensor, epoch: int, anchor: Anchor | None) -> Tensor:
        total = loss
        if self.model.localisation is not None:
            total = total + self.localisation_weight(epoch) * localisation
        if anchor is not None:
            distances = [(value - anchor.weights[name]).pow(2).sum() for name, value in self.model.named_parameters()]
            total = total + anchor.mu / 2 * torch.stack(distances).sum()
        return total

    def _differentiate(self, batch: Batch, epoch: int, step: int, anchor: Anchor | None) -> tuple[Tensor, Tensor]:
        """Leave the gradient of a batch's whole loss with the parameters; return both losses."""
        if not len(batch.labels):  # of this part nothing could be read
            nothing = torch.zeros((), device=self._device)
            return nothing, nothing
        with computing(self.recipe.precision, self._device, repeats=self._repeats):
            if self._pipeline.by_example:
                return self._differentiate_singly(batch, epoch, step, anchor)
            return self._accumulate(batch, epoch, step, anchor)

    def _accumulate(self, batch: Batch, epoch: int, step: int, anchor: Anchor | None) -> tuple[Tensor, Tensor]:
        """Add up the gradient of a batch in parts of the recipe's ``at_once`` pictures, each with draws of its own."""
        inputs = self.prepare(batch, epoch, step)
        pictures = len(inputs.targets)
        at_once = self.recipe.at_once or pictures
        losses = []
        for first in range(0, pictures, at_once):
            part = _pictures(inputs, first, at_once)
            share = len(part.targets) / pictures
            place = batch.place(first)
            drawn = self._randomness(epoch, step, *([place] if place else []))
            loss, localisation = self._losses(part, drawn)
            (share * self._total(loss, localisation, epoch, anchor)).backward()  # type: ignore[no-untyped-call]
            losses.append(share * torch.stack([loss, localisation]).detach())
        loss, localisation = torch.stack(losses).sum(dim=0)
        return loss, localisation

    def _differentiate_singly(
        self, batch: Batch, epoch: int, step: int, anchor: Anchor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradient of each picture, and combine them as the defences say."""
        inputs = self.prepare(batch, epoch, step)
        learnt = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        losses, single = [], []
        for place in range(len(batch.labels)):
            pair = self._losses(_pictures(inputs, place, 1), self._randomness(epoch, step, place))
            total = self._total(*pair, epoch, anchor)
            gradients = torch.autograd.grad(total, list(learnt.values()), materialize_grads=True)
            single.append(dict(zip(learnt, gradients, strict=True)))
            losses.append(torch.stack(pair).detach())
        source = self._noise or self.puzzles.randomness(epoch, step)
        protected = self._pipeline.combine(single, randomness=source.of("step", 0))
        for name, parameter in learnt.items():
            parameter.grad = protected[name]
        loss, localisation = torch.stack(losses).mean(dim=0)
        return loss, localisation

    def _take_step(self) -> None:
        if self.recipe.clip_gradient:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_gradient)
        self.optimizer.step()

    def _require_finite(self, loss: float, epoch: int) -> None:
        finite = all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())
        if not finite or not math.isfinite(loss):
            state = f"loss {loss:g}, weights {'' if finite else 'not '}finite"
            raise TrainingError(
                f"epoch {epoch + 1} broke down ({state}): lower recipe.learning_rate "
                f"(now {self.recipe.learning_rate:g}) and start over; what was trained before is kept"
            )


def _pictures(inputs: StepInputs, first: int, count: int) -> StepInputs:
    """Cut some pictures out of a batch."""
    part = slice(first, first + count)
    whole = inputs.arranged
    return StepInputs(
        Arranged(whole.images[part], whole.mask[part], whole.source[part]), inputs.targets[part], inputs.puzzled
    )


def localisation_weight(puzzle: Puzzle, recipe: Recipe, epoch: int, epochs: int) -> float:
    """Return the weight of the DAL loss.

    Args:
        puzzle: Its schedule.
        recipe: Gives the epochs of warm-up.
        epoch: From 0.
        epochs: Number of epochs of the run.
    """
    if puzzle.localisation_schedule == "constant":
        return puzzle.localisation_weight
    if epoch < recipe.warmup_epochs:
        return puzzle.localisation_weight * epoch / max(recipe.warmup_epochs - 1, 1)
    progress = (epoch - recipe.warmup_epochs) / (epochs - recipe.warmup_epochs)
    return puzzle.localisation_weight * (0.75 + 0.25 * math.cos(math.pi * progress))


def _mixup(recipe: Recipe, classes: int) -> Mixup | None:
    if not recipe.mixup and not recipe.cutmix:
        return None
    return Mixup(  # type: ignore[no-untyped-call]
        mixup_alpha=recipe.mixup,
        cutmix_alpha=recipe.cutmix,
        label_smoothing=recipe.label_smoothing,
        num_classes=classes,
    )
