"""Records that the attacker may hold, and the form of all records on disk.

Private data has a module of its own (``fedmjp.private``), which attacks and server may not import. Each record is one
safetensors file whose header holds the plain fields as JSON.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from fedmjp.errors import BadInputError, RecordError
from fedmjp.files import replacing, require_regular
from fedmjp.tensors import is_finite


def require(condition: bool, message: str) -> None:
    """Refuse a record unless a condition holds.

    Args:
        condition: That must hold.
        message: Of the error.

    Raises:
        RecordError: If it does not hold.
    """
    if not condition:
        raise RecordError(message)


def require_images(name: str, images: Tensor) -> None:
    """Refuse images unless they are finite float32 (batch, 3, height, width) in [0, 1].

    Args:
        name: Of the images, for the message.
        images: To be checked.

    Raises:
        RecordError: If they are not.
    """
    require(
        images.dtype == torch.float32 and images.ndim == 4 and images.shape[1] == 3,
        f"{name} must be float32 (batch, 3, height, width), got {images.dtype} {tuple(images.shape)}",
    )
    if images.numel():
        low, high = torch.stack(images.aminmax()).tolist()  # a NaN is both
        require(math.isfinite(low) and math.isfinite(high), f"{name} holds NaN or infinite values")
        require(low >= 0 and high <= 1, f"{name} must lie in [0, 1], got [{low:.4g}, {high:.4g}]")


def record_name(server_round: int, node: int) -> str:
    """Name the file of an upload, and of the private batch behind it, each in its own folder.

    Args:
        server_round: From 1.
        node: Of the client.
    """
    return f"round-{server_round:05d}-node-{node}.safetensors"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Write tensors and plain fields as one safetensors file, whole or not at all.

    Args:
        path: Of the file; its folder is made.
        tensors: By name.
        fields: Values that JSON can hold.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Gradients may share memory (the class token's is a part of the position embedding's), files may not.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    with replacing(path) as partial:
        save_file(copies, partial, metadata={"fields": json.dumps(dict(fields))})


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``save_tensors`` wrote.

    Args:
        path: Of the file.

    Raises:
        RecordError: If the file is missing, damaged or not one of ours.
    """
    fields = load_fields(path)
    try:
        return load(path.read_bytes()), fields
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{path} is not a readable record: {error}") from error


def load_fields(path: Path) -> dict[str, Any]:
    """Read the plain fields of what ``save_tensors`` wrote, without its tensors.

    Args:
        path: Of the file.

    Raises:
        RecordError: If the file is missing, damaged or not one of ours.
    """
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            return dict(json.loads(file.metadata()["fields"]))
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not a readable record: {error}") from error


QUOTED_DIGITS = 16  # of a digest, in messages
UploadKind = Literal["gradient", "delta", "weights", "unknown"]
ATTACKED = ("gradient", "delta")
# The statements of an upload's file beside its tensors: never labels and other uploads.
UPLOAD_FIELDS = ("kind", "num_examples", "server_round", "node", "weights")


@dataclass(frozen=True)
class Upload:
    """The upload of one client in one round, as it crossed the wire."""

    tensors: Mapping[str, Tensor]  # parameter name to value
    # The values: a gradient, a weight change ("delta"), whole weights, or something that nobody here can tell.
    kind: UploadKind
    num_examples: int  # pictures behind it, as the client reports them
    server_round: int  # round number, from 1
    node: int  # the client's node identifier in that run
    weights: str  # digest of the weights that the server had sent for the round
    # The labels of the pictures in no particular order, where the threat model grants them to the attacker; None
    # otherwise. They never cross the wire and are never on disk.
    labels: tuple[int, ...] | None = None
    # Further uploads of the same client that the server kept, each with the weights that it had sent then. They have
    # files of their own, and no others.
    others: tuple["Upload", ...] = ()

    def __post_init__(self) -> None:
        require(len(self.tensors) > 0, "an upload without tensors")
        kinds = get_args(UploadKind)
        require(self.kind in kinds, f"an upload of kind {self.kind!r}, not {' or '.join(kinds)}")
        for name in ("num_examples", "server_round", "node"):
            value = getattr(self, name)
            require(isinstance(value, int), f"{name} of an upload is {value!r}, not a whole number")
        require(isinstance(self.weights, str), f"weights of an upload are {self.weights!r}, not a digest")
        require(not any(upload.others for upload in self.others), "an upload's others have others themselves")
        for name, tensor in self.tensors.items():
            require(tensor.is_floating_point(), f"upload tensor {name!r} holds {tensor.dtype}, no real numbers")
            require(is_finite(tensor), f"upload tensor {name!r} holds NaN or infinite values")
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))

    def save(self, path: Path) -> None:
        """Write the upload to a file.

        Args:
            path: Of the file.
        """
        fields = {name: getattr(self, name) for name in UPLOAD_FIELDS}
        save_tensors(path, self.tensors, {"record": "Upload", **fields})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an upload.

        Args:
            path: Of the file.

        Raises:
            RecordError: If it is not an upload.
        """
        tensors, fields = load_record(cls, path)
        require(fields.keys() == set(UPLOAD_FIELDS), f"{path} states {sorted(fields)}, not {sorted(UPLOAD_FIELDS)}")
        return cls(tensors=tensors, **fields)


@dataclass(frozen=True)
class Reconstruction:
    """Pictures that an attack made of one upload."""

    images: Tensor  # (batch, 3, size, size) float32 in [0, 1]
    # The attacker's own knowledge of it (rank, condition number, patches that it found masked); never anything
    # computed with private data.
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    # (batch, height, width) bool, False where the upload holds nothing of a pixel, as of dropped tokens; None: nowhere.
    visible: Tensor | None = None

    def __post_init__(self) -> None:
        require_images("reconstruction", self.images)

    def save(self, path: Path) -> None:
        """Write the reconstruction to a file.

        Args:
            path: Of the file.
        """
        fields = {"record": "Reconstruction", "diagnostics": dict(self.diagnostics)}
        visible = {} if self.visible is None else {"visible": self.visible}
        save_tensors(path, {"images": self.images, **visible}, fields)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a reconstruction.

        Args:
            path: Of the file.

        Raises:
            RecordError: If it is not a reconstruction.
        """
        tensors, fields = load_record(cls, path)
        return cls(images=tensors["images"], diagnostics=fields["diagnostics"], visible=tensors.get("visible"))


@dataclass(frozen=True)
class Features:
    """Facts of the pictures behind one upload, without the pictures: a row for each, in any order."""

    labels: Tensor  # (batch,) int64
    features: Tensor | None = None  # (batch, dim) float64, what the last layer reads; None where labels alone come out
    # As for a reconstruction. ``certified`` is 1 where residuals alone show that every row is right.
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    # Further knowledge of each picture, a row each in the order of the labels: "probabilities", "loss" and the like.
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    layer: str | None = None  # name of the submodule that reads the features; None: the last layer

    def __post_init__(self) -> None:
        shape = tuple(self.labels.shape)
        require(self.labels.dtype == torch.int64 and len(shape) == 1, f"labels must be int64 (batch,), got {shape}")
        if self.features is None:
            return
        layout = f"{self.features.dtype} {tuple(self.features.shape)}"
        fits = (
            self.features.dtype == torch.float64 and self.features.ndim == 2 and len(self.features) == len(self.labels)
        )
        require(fits, f"features must be float64 (batch, dim) of {len(self.labels)} pictures, got {layout}")
        require(is_finite(self.features), "features hold NaN or infinite values")


Disclosure = Reconstruction | Features


def load_record(kind: type, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and fields of a record.

    Args:
        kind: Class of the record.
        path: Of the file.

    Raises:
        RecordError: If the file holds another kind, or no record.
    """
    tensors, fields = load_tensors(path)
    content = fields.pop("record", "nothing")
    require(content == kind.__name__, f"{path} holds {content}, not {kind.__name__}")
    return tensors, fields


def require_weights(upload: Upload, digest: str) -> None:
    """Refuse an upload that states that it was computed from other weights.

    Args:
        upload: States the digest of its weights.
        digest: Of the model's weights.

    Raises:
        BadInputError: If the two differ.
    """
    if upload.weights != digest:
        raise BadInputError(
            f"the upload states that it was computed from weights {upload.weights[:QUOTED_DIGITS]}, the model's are "
            f"{digest[:QUOTED_DIGITS]}: give the model with the weights that the client had"
        )


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Compute the SHA-256 over names and values of a state dictionary, as hex.

    Args:
        state: Tensors by name.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
