"""The three kinds of data, kept apart by type, and their form on disk.

A ``PrivateBatch`` stays with the client and the evaluator. An ``Upload`` is what crosses the wire.
A ``Reconstruction`` is what an attacker makes of uploads. On disk each is one safetensors file
whose header holds the plain fields as JSON; it appears under its name only when it is complete.
"""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from fedmjp.errors import RecordError
from fedmjp.settings import Picture


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RecordError(message)


def _require_images(name: str, images: Tensor) -> None:
    _require(
        images.dtype == torch.float32 and images.ndim == 4 and images.shape[1] == 3,
        f"{name} must be float32 (batch, 3, height, width), got {images.dtype} {tuple(images.shape)}",
    )
    _require(bool(torch.isfinite(images).all()), f"{name} holds NaN or infinite values")
    if images.numel():
        low, high = float(images.min()), float(images.max())
        _require(low >= 0 and high <= 1, f"{name} must lie in [0, 1], got [{low:.4g}, {high:.4g}]")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Write tensors and plain fields as one safetensors file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    # Gradients may share memory (the class token's is a part of the position embedding's), files may not.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    save_file(copies, partial, metadata={"fields": json.dumps(dict(fields))})
    partial.replace(path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``save_tensors`` wrote.

    Raises:
        RecordError: If the file is missing, damaged or not one of ours.
    """
    try:
        content = path.read_bytes()
        header_size = int.from_bytes(content[:8], "little")
        fields = json.loads(json.loads(content[8 : 8 + header_size])["__metadata__"]["fields"])
        return load(content), fields
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RecordError(f"{path} is not a readable record: {error}") from error


@dataclass(frozen=True)
class PrivateBatch:
    """What a client holds and the evaluator scores against. Attack code has no parameter for it.

    Attributes:
        clean: (batch, 3, size, size) float32 in [0, 1], the private pictures x.
        shuffled: The same shape, their jigsaw-shuffled version x~.
        mask: (batch, patches) bool, True where the patch was shuffled.
        source: (batch, patches) int64, place i of x~ shows patch ``source[i]`` of x.
        labels: (batch,) int64.
        pictures: Name of each picture in its source.
        gradient_of: The version whose gradient the client uploaded.
    """

    clean: Tensor
    shuffled: Tensor
    mask: Tensor
    source: Tensor
    labels: Tensor
    pictures: tuple[str, ...]
    gradient_of: Picture

    def __post_init__(self) -> None:
        _require_images("clean", self.clean)
        _require_images("shuffled", self.shuffled)
        _require(self.clean.shape == self.shuffled.shape, "clean and shuffled differ in shape")
        batch = len(self.pictures)
        _require(self.clean.shape[0] == batch, f"{batch} names for {self.clean.shape[0]} pictures")
        _require(self.labels.shape == (batch,) and self.labels.dtype == torch.int64, "labels must be (batch,) int64")
        _require(self.mask.dtype == torch.bool and self.mask.ndim == 2, "mask must be (batch, patches) bool")
        _require(self.source.shape == self.mask.shape, "source and mask differ in shape")
        _require(self.mask.shape[0] == batch, f"{self.mask.shape[0]} masks for {batch} pictures")

    def version(self, which: Picture) -> Tensor:
        """The clean or the shuffled pictures."""
        return self.clean if which is Picture.CLEAN else self.shuffled

    def save(self, path: Path) -> None:
        """Write to ``path``."""
        names = ("clean", "shuffled", "mask", "source", "labels")
        fields = {"record": "PrivateBatch", "pictures": self.pictures, "gradient_of": self.gradient_of}
        save_tensors(path, {name: getattr(self, name) for name in names}, fields)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read from ``path``; RecordError if it is not a private batch."""
        tensors, fields = _load(cls, path)
        pictures, gradient_of = tuple(fields["pictures"]), Picture(fields["gradient_of"])
        return cls(pictures=pictures, gradient_of=gradient_of, **tensors)


@dataclass(frozen=True)
class Upload:
    """What one client sent in one round, as it crossed the wire.

    Attributes:
        tensors: Parameter name to gradient ("gradient") or weight change ("delta").
        kind: Which of the two.
        num_examples: Pictures behind it, as the client reports them.
        server_round: Round number, from 1.
        node: The client's node identifier in that run.
        weights: Digest of the weights that the server had sent for the round.
    """

    tensors: Mapping[str, Tensor]
    kind: Literal["gradient", "delta"]
    num_examples: int
    server_round: int
    node: int
    weights: str

    def __post_init__(self) -> None:
        _require(len(self.tensors) > 0, "an upload without tensors")
        for name, tensor in self.tensors.items():
            _require(bool(torch.isfinite(tensor).all()), f"upload tensor {name!r} holds NaN or infinite values")
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def save(self, path: Path) -> None:
        """Write to ``path``."""
        names = ("kind", "num_examples", "server_round", "node", "weights")
        save_tensors(path, self.tensors, {"record": "Upload", **{name: getattr(self, name) for name in names}})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read from ``path``; RecordError if it is not an upload."""
        tensors, fields = _load(cls, path)
        return cls(tensors=tensors, **fields)


@dataclass(frozen=True)
class Reconstruction:
    """What an attack made of one upload.

    Attributes:
        images: (batch, 3, size, size) float32 in [0, 1].
        diagnostics: What the attacker itself can tell about it (rank, condition number, patches
            that it found masked); never anything computed with private data.
    """

    images: Tensor
    diagnostics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_images("reconstruction", self.images)

    def save(self, path: Path) -> None:
        """Write to ``path``."""
        fields = {"record": "Reconstruction", "diagnostics": dict(self.diagnostics)}
        save_tensors(path, {"images": self.images}, fields)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read from ``path``; RecordError if it is not a reconstruction."""
        tensors, fields = _load(cls, path)
        return cls(images=tensors["images"], diagnostics=fields["diagnostics"])


def _load(kind: type, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, fields = load_tensors(path)
    found = fields.pop("record", "nothing")
    _require(found == kind.__name__, f"{path} holds {found}, not {kind.__name__}")
    return tensors, fields
