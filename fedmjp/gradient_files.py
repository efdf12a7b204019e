"""Read gradients that a client uploaded from a file: by the names of its own module, and with what the file states."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fedmjp.errors import BadInputError
from fedmjp.models.checkpoints import parse_tensors
from fedmjp.records import load_fields


@dataclass(frozen=True)
class GradientFile:
    """Gradients of a file; None for what it does not state."""

    tensors: Mapping[str, Tensor]
    sha256: str
    weights: str | None  # digest of the weights that they were computed from
    kind: str | None  # "gradient" or "delta"
    examples: int | None  # pictures behind them


def read_gradients(path: Path) -> GradientFile:
    """Read a safetensors file, or one of torch's that holds a dictionary of tensors alone.

    A safetensors file may state the digest of the weights in its metadata, as ``weights``. A record of
    ``fedmjp simulate --uploads`` states it, and more.

    Args:
        path: Of the file.

    Raises:
        BadInputError: If it is missing, damaged, needs pickled code, or holds anything but tensors by name.
    """
    if not path.is_file():
        raise BadInputError(f"there is no file {path}")
    content = path.read_bytes()
    tensors = parse_tensors(content, path)
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise BadInputError(f"{path} must hold tensors alone, by the names of named_parameters(): {_describe(tensors)}")
    fields = _read_fields(path)
    return GradientFile(
        tensors=tensors,
        sha256=hashlib.sha256(content).hexdigest(),
        weights=fields.get("weights"),
        kind=fields.get("kind"),
        examples=fields.get("num_examples"),
    )


def _describe(loaded: object) -> str:
    if not isinstance(loaded, dict) or not loaded:
        return "it is empty" if loaded == {} else f"it holds a {type(loaded).__name__}"
    name, value = next((name, value) for name, value in loaded.items() if not isinstance(value, Tensor))
    return f"{name!r} is a {type(value).__name__}"


def _read_fields(path: Path) -> dict[str, Any]:
    if path.suffix != ".safetensors":
        return {}
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
    return load_fields(path) if "fields" in metadata else metadata
