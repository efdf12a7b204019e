"""Training of a segmentation network, which goes on where it was stopped."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedmjp.arithmetic import computing
from fedmjp.config import Checkpoint
from fedmjp.errors import BadInputError, CheckpointError, ConfigError, DataError, OutputError, TrainingError
from fedmjp.files import read_file, replacing
from fedmjp.models.checkpoints import read_weights
from fedmjp.seeds import derive, scoped_randomness
from fedmjp.segmentation.config import SegmentationConfig, SegmentationRecipe
from fedmjp.segmentation.crops import Crops
from fedmjp.segmentation.network import UperNet, build_network
from fedmjp.segmentation.scenes import IGNORED, Scenes
from fedmjp.training.run_folder import LARGEST
from fedmjp.training.state import load_state, save_state, save_weights

KIND = "segmentation"
FIRST = 1e-6  # of the learning rate, at the start of the warm-up
TABLES = ("relative_position_bias_table", "position_embeddings")  # which do not decay; nor do norms
Row = dict[str, float]  # of the history


class SegmentationFolder:
    """The folder of such a training."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "manifest.json"
        self.history = root / "history.csv"  # iteration, mean loss since the last line, learning rate, seconds in all
        self.weights = root / "weights.safetensors"
        self.state = root / "state.pt"

    def begin(self, config: SegmentationConfig, *, fresh: bool) -> None:
        """Make room for a run, or for what is left of it; a ``fresh`` one removes a former one.

        Raises:
            OutputError: If the folder holds something else, or a run with another configuration.
        """
        if not self.manifest.exists():
            return
        try:
            begun = self.config()
        except BadInputError as error:
            raise OutputError(f"{error}; name another --output") from None
        if fresh:
            for path in (self.manifest, self.history, self.weights, self.state):
                path.unlink(missing_ok=True)
        elif begun.digest() != config.digest():
            raise OutputError(
                f"{self.root} holds a run with another configuration; name another --output or give --fresh"
            )

    def config(self) -> SegmentationConfig:
        """The configuration of the run; BadInputError if the folder holds none."""
        try:
            about: dict[str, Any] = json.loads(read_file(self.manifest, LARGEST))
            if about.get("kind") == KIND:
                return SegmentationConfig.parse(about["config"])
            reason = "its manifest is of something else"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            reason = str(error)
        raise BadInputError(f"{self.root} holds no training of a segmentation network: {reason}")


def train(
    config: SegmentationConfig,
    scenes: Scenes,
    folder: SegmentationFolder,
    *,
    on_step: Callable[[int], None],
    on_checkpoint: Callable[[Row], None],
) -> None:
    """Train for the iterations of the recipe, from the folder's checkpoint if it has one.

    Args:
        config: What to train.
        scenes: Those to train on.
        folder: Of the run.
        on_step: Called after every iteration with their number.
        on_checkpoint: Called after every checkpoint with its line of the history.

    Raises:
        CheckpointError: If that is of another configuration or other scenes, or the weights to begin with do not fit.
        DataError: If a scene cannot be read; what was trained up to the last checkpoint is kept.
        TrainingError: If the loss is no longer finite.
    """
    recipe, device = config.recipe, torch.device(config.device)
    state = load_state(folder.state, config=config.digest())
    if state is not None and state["scenes"] != scenes.digest():
        raise CheckpointError(f"{folder.state} is of a run on other scenes: restore them as they were, or give --fresh")
    network = build_network(config.model, config.seed).to(device)
    optimiser = torch.optim.AdamW(_groups(network, recipe.weight_decay), lr=recipe.learning_rate)
    rows: list[Row] = []
    done, before = 0, 0.0
    if state is not None:
        network.load_state_dict(state["network"])
        optimiser.load_state_dict(state["optimiser"])
        rows, done = state["rows"], state["done"]
        before = rows[-1]["seconds"] if rows else 0.0
    network.train()
    losses, started = list[float](), time.monotonic()
    for pictures, labels in _batches(config, scenes, done):
        rate = recipe.learning_rate * learning_rate_factor(recipe, done)
        # What is drawn is what drop path leaves out.
        with computing("float32", device), scoped_randomness(derive(config.seed, "step", done)):
            loss = _step(network, optimiser, rate, (pictures.to(device), labels.to(device)), recipe.auxiliary_weight)
        done += 1
        if not math.isfinite(loss):
            raise TrainingError(
                f"iteration {done} broke down (loss {loss:g}): lower recipe.learning_rate "
                f"(now {recipe.learning_rate:g}) and start over with --fresh"
            )
        losses.append(loss)
        on_step(done)
        if done % recipe.checkpoint_every == 0 or done == recipe.iterations:
            seconds = before + time.monotonic() - started
            mean = sum(losses) / len(losses)
            rows.append({"iteration": done, "loss": mean, "learning_rate": rate, "seconds": seconds})
            losses.clear()
            about = {"config": config.digest(), "scenes": scenes.digest(), "rows": rows, "done": done}
            _keep(folder, network, optimiser, about)
            on_checkpoint(rows[-1])


def learning_rate_factor(recipe: SegmentationRecipe, done: int) -> float:
    """Of the learning rate after so many iterations: a linear warm-up, then a linear fall to 0."""
    if done < recipe.warmup_iterations:
        return FIRST + (1 - FIRST) * done / recipe.warmup_iterations
    return 1 - (done - recipe.warmup_iterations) / (recipe.iterations - recipe.warmup_iterations)


def trained_network(folder: SegmentationFolder) -> UperNet:
    """The network with the last weights of a run.

    Raises:
        BadInputError: If the folder holds no such run.
        CheckpointError: If it has no weights yet, or they are damaged.
    """
    model = folder.config().model
    weights = read_weights(Checkpoint.of(folder.weights))
    network = UperNet(model, weights.get("network.backbone.swin.embeddings.position_embeddings"))
    try:
        network.load_state_dict(weights)
    except RuntimeError:
        raise CheckpointError(f"{folder.weights} does not fit the model of {folder.manifest.name} beside it") from None
    return network.eval()


def _groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that decay, and norms and positions, which do not."""
    norms = {
        id(parameter)
        for part in network.modules()
        if isinstance(part, nn.LayerNorm | nn.BatchNorm2d)
        for parameter in part.parameters()
    }
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in network.named_parameters():
        groups[id(parameter) not in norms and not name.endswith(TABLES)].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]


def _batches(config: SegmentationConfig, scenes: Scenes, done: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What is left of the training."""
    crops, steps = Crops(scenes, config.recipe, config.seed), range(done, config.recipe.iterations)
    # A generator of its own: the loader would draw from the global one.
    loader = DataLoader(
        crops, batch_size=None, sampler=steps, num_workers=config.recipe.workers, generator=torch.Generator()
    )
    for read in loader:
        if isinstance(read, str):
            raise DataError(read)
        yield read


def _step(
    network: UperNet, optimiser: torch.optim.Optimizer, rate: float, batch: tuple[Tensor, Tensor], auxiliary: float
) -> float:
    pictures, labels = batch
    if not bool((labels != IGNORED).any()):
        return 0.0  # nothing in it is of any class
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.zero_grad()
    loss = network.loss(pictures, labels, auxiliary)
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return loss.item()


def _keep(
    folder: SegmentationFolder, network: nn.Module, optimiser: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    save_weights(folder.weights, network.state_dict())
    save_state(folder.state, {**state, "network": network.state_dict(), "optimiser": optimiser.state_dict()})
    with replacing(folder.history) as partial:
        pd.DataFrame(state["rows"]).to_csv(partial, index=False)
