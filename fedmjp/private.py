"""Private data: with the client, and with the evaluator that scores against it. Nowhere else."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from fedmjp.errors import RecordError
from fedmjp.records import load_record, require, require_images, save_tensors
from fedmjp.settings import Picture

TENSORS = ("clean", "shuffled", "mask", "source", "labels")
OF_SOME = ("mixed", "shares", "whole")


@dataclass(frozen=True)
class PrivateBatch:
    """The private pictures of a client, which the evaluator scores against. Attack code has no parameter for it."""

    clean: Tensor  # (batch, 3, size, size) float32 in [0, 1], the private pictures x
    shuffled: Tensor  # the same shape, their jigsaw-shuffled version x~
    mask: Tensor  # (batch, patches) bool, True where the patch was shuffled
    source: Tensor  # (batch, patches) int64, place i of x~ shows patch ``source[i]`` of x
    labels: Tensor  # (batch,) int64
    pictures: tuple[str, ...]  # name of each picture in its source
    gradient_of: Picture  # the version whose gradient the client uploaded
    # Where pictures were mixed: what became of x, and (batch, classes) what is the share of each label in it.
    mixed: Tensor | None = None
    shares: Tensor | None = None
    # Where x are random crops: the pictures that they are of.
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        require_images("clean", self.clean)
        require_images("shuffled", self.shuffled)
        require(self.clean.shape == self.shuffled.shape, "clean and shuffled differ in shape")
        batch = len(self.pictures)
        require(self.clean.shape[0] == batch, f"{batch} names for {self.clean.shape[0]} pictures")
        require(self.labels.shape == (batch,) and self.labels.dtype == torch.int64, "labels must be (batch,) int64")
        require(self.mask.dtype == torch.bool and self.mask.ndim == 2, "mask must be (batch, patches) bool")
        require(self.source.shape == self.mask.shape, "source and mask differ in shape")
        require(self.mask.shape[0] == batch, f"{self.mask.shape[0]} masks for {batch} pictures")

    def version(self, which: Picture) -> Tensor:
        """Return the clean or the shuffled pictures as they went into the network: mixed, where they were mixed.

        Args:
            which: Of the two versions.
        """
        clean = self.clean if self.mixed is None else self.mixed
        return clean if which is Picture.CLEAN else self.shuffled

    @property
    def targets(self) -> Tensor:
        """Return the targets of the loss: labels, or where pictures were mixed their shares."""
        return self.labels if self.shares is None else self.shares

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Collect the tensors that have a row per picture, by name."""
        values = {name: getattr(self, name) for name in (*TENSORS, *OF_SOME)}
        return {name: value for name, value in values.items() if value is not None}

    def part(self, first: int, last: int) -> Self:
        """Take consecutive pictures.

        Args:
            first: Place of the first.
            last: Place behind the last.
        """
        return replace(
            self,
            pictures=self.pictures[first:last],
            **cast("dict[str, Any]", {name: value[first:last] for name, value in self.tensors.items()}),
        )

    def of_places(self, places: Sequence[int]) -> Self:
        """Take some of the pictures.

        Args:
            places: Of the pictures, in order.
        """
        if list(places) == list(range(len(self.pictures))):
            return self
        index = torch.tensor(places, dtype=torch.long)
        return replace(
            self,
            pictures=tuple(self.pictures[place] for place in places),
            **cast("dict[str, Any]", {name: value[index] for name, value in self.tensors.items()}),
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join the pictures of several clients to one batch, in their order.

        Args:
            parts: A batch for each client.
        """
        return cls(
            pictures=tuple(name for part in parts for name in part.pictures),
            gradient_of=parts[0].gradient_of,
            **{name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors},
        )

    def sha256(self, place: int) -> str:
        """Compute the SHA-256 of the pixels of a picture as its source has it, as hex.

        Args:
            place: Of the picture.
        """
        pictures = self.clean if self.whole is None else self.whole
        return hashlib.sha256(pictures[place].contiguous().numpy().tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the batch to a file.

        Args:
            path: Of the file.
        """
        fields = {"record": "PrivateBatch", "pictures": self.pictures, "gradient_of": self.gradient_of}
        save_tensors(path, self.tensors, fields)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a batch.

        Args:
            path: Of the file.

        Raises:
            RecordError: If it is not a private batch.
        """
        tensors, fields = load_record(cls, path)
        try:
            return cls(pictures=tuple(fields["pictures"]), gradient_of=Picture(fields["gradient_of"]), **tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{path} is not a whole private batch: {error}") from error
