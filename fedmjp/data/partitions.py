"""Which client of a federation holds which pictures, by flwr-datasets' partitioners.

A partition is drawn once, saved, and read by every client: drawing it takes seconds for ImageNet.
"""

import hashlib
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from fedmjp.errors import DataError
from fedmjp.extras import require
from fedmjp.learning import PartitionConfig
from fedmjp.seeds import derive

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

INDEX, LABEL = "index", "label"


@dataclass(frozen=True, eq=False)
class Partition:
    """The shares of the clients, as indices of pictures, int64; every picture is in one share at most."""

    shares: tuple[np.ndarray, ...]
    dropped: np.ndarray  # that no client has, sorted
    digest: str  # of what the partition was drawn from

    def save(self, path: Path) -> None:
        """Write the partition to a file.

        Args:
            path: An ``.npz`` file.
        """
        lengths = [len(share) for share in self.shares]
        with path.open("wb") as file:
            np.savez(
                file, indices=np.concatenate(self.shares), lengths=lengths, dropped=self.dropped, digest=self.digest
            )

    @classmethod
    def load(cls, path: Path, labels: np.ndarray, config: PartitionConfig, *, clients: int, seed: int) -> Self:
        """Read a partition that was saved.

        Args:
            path: The file.
            labels: (pictures,) int64 that the partition was drawn with, as all that follow.
            config: Scheme of the partition.
            clients: Number of clients.
            seed: Of the run.

        Raises:
            DataError: If there is no such file, it is damaged, or it was drawn from something else.
        """
        try:
            with np.load(path) as file:
                indices, lengths, dropped, digest = (file[key] for key in ("indices", "lengths", "dropped", "digest"))
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} cannot be read as a partition: {error}; draw it again") from error
        if str(digest) != digest_of(labels, config, clients=clients, seed=seed):
            raise DataError(f"{path} was drawn for other pictures, clients or another seed; draw it again")
        return cls(tuple(np.split(indices, np.cumsum(lengths)[:-1])), dropped, str(digest))


def digest_of(labels: np.ndarray, config: PartitionConfig, *, clients: int, seed: int) -> str:
    """Return the SHA-256, as hex, of all that a partition is drawn from.

    Args:
        labels: (pictures,) int64.
        config: Scheme of the partition.
        clients: Number of clients.
        seed: Of the run.
    """
    whole = hashlib.sha256(f"{config.digest()} {clients} {seed} {len(labels)} ".encode())
    whole.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())
    return whole.hexdigest()


def partition(labels: np.ndarray, config: PartitionConfig, *, clients: int, seed: int) -> Partition:
    """Deal pictures to clients.

    Args:
        labels: (pictures,) int64.
        config: Scheme of the partition.
        clients: Number of clients.
        seed: Of the run.

    Raises:
        DataError: If there are too few pictures or classes, so that a client would have none.
        MissingExtraError: If flwr-datasets is not installed.
    """
    require("training", "Dealing pictures to clients")
    from datasets import Dataset  # noqa: PLC0415 (of an extra)

    _check(labels, config, clients)
    partitioner = _partitioner(config, clients, derive(seed, "partition"))
    table = Dataset.from_dict({INDEX: np.arange(len(labels)), LABEL: labels}).with_format("arrow")
    # flwr-datasets' IidPartitioner cuts the pictures as they lie, and they often lie class by class.
    partitioner.dataset = table.shuffle(seed=derive(seed, "shuffle")) if config.scheme == "iid" else table
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is in ``dropped`` or raised
            shares = tuple(partitioner.load_partition(client)[INDEX].to_numpy() for client in range(clients))
    except ValueError as error:
        remedy = (
            f"with alpha {config.alpha} one of {clients} clients was left without pictures eleven times; "
            "set a larger alpha or fewer clients"
            if config.scheme == "dirichlet"
            else f"{clients} clients with {config.classes_per_client} classes each need more pictures of some class "
            "than there are; set fewer clients or fewer classes per client"
        )
        raise DataError(remedy) from error
    dropped = np.setdiff1d(np.arange(len(labels)), np.concatenate(shares))
    return Partition(shares, dropped, digest_of(labels, config, clients=clients, seed=seed))


def _check(labels: np.ndarray, config: PartitionConfig, clients: int) -> None:
    if clients > len(labels):
        raise DataError(f"{clients} clients cannot share {len(labels)} pictures; set fewer clients")
    classes = len(np.unique(labels))
    if config.scheme == "pathological" and config.classes_per_client > classes:
        raise DataError(
            f"{config.classes_per_client} classes per client were asked for, but the pictures have {classes}; set fewer"
        )


def _partitioner(config: PartitionConfig, clients: int, seed: int) -> "Partitioner":
    from flwr_datasets import partitioner  # noqa: PLC0415 (of an extra)

    if config.scheme == "iid":
        return partitioner.IidPartitioner(num_partitions=clients)
    if config.scheme == "dirichlet":
        return partitioner.DirichletPartitioner(
            num_partitions=clients, partition_by=LABEL, alpha=config.alpha, min_partition_size=1, seed=seed
        )
    return partitioner.PathologicalPartitioner(
        num_partitions=clients,
        partition_by=LABEL,
        num_classes_per_partition=config.classes_per_client,
        class_assignment_mode="first-deterministic",  # of the paper; uses every class if there are enough clients
        seed=seed,
    )
