"""Checkpoints: everything that a run needs to go on as if it had never been stopped."""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedmjp.errors import CheckpointError, OutputError
from fedmjp.files import replacing
from fedmjp.training.run_folder import TrainingFolder


def save_checkpoint(folder: TrainingFolder, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint of a run.

    Args:
        folder: Folder of the run.
        weights: State dict of the model.
        state: All that the run needs to go on.
    """
    save_weights(folder.weights, weights)
    save_state(folder.state, state)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state so that a kill leaves either the old or the new file, whole.

    Args:
        path: File to replace.
        state: Tensors, numbers and text.

    Raises:
        OutputError: If it cannot be written.
    """
    with _written(path), replacing(path) as partial, partial.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def load_state(path: Path, *, config: str) -> dict[str, Any] | None:
    """Read what ``save_state`` wrote, on the CPU; None if there is no file.

    Args:
        path: The file.
        config: Digest of the configuration that the state must be of.

    Raises:
        CheckpointError: If it is damaged, or its "config" is not the digest of this configuration.
    """
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        stored = state["config"]
    except (RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError):
        raise CheckpointError(f"{path} is damaged; --fresh starts over") from None
    if stored != config:
        raise CheckpointError(f"{path} is of a run with another configuration; name another --output or give --fresh")
    return state


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors, whole or not at all.

    Args:
        path: File to replace.
        weights: State dict.

    Raises:
        OutputError: If it cannot be written.
    """
    with _written(path), replacing(path) as partial:
        safetensors.torch.save_file({name: value.cpu().contiguous() for name, value in weights.items()}, partial)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """Tell in one line that a file cannot be written; on a full disk torch and safetensors raise their own errors."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise OutputError(
            f"{path} cannot be written ({reason}): the disk may be full; the last whole checkpoint is kept, make room "
            "and run the same command again"
        ) from None
