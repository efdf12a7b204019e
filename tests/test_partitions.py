"""Partitions: every picture with one client at most, as the scheme says, from the seed alone, strict on disk."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmjp.data.partition_figure import counts_by_client, draw_partition
from fedmjp.data.partitions import Partition, partition
from fedmjp.errors import DataError
from fedmjp.learning import PartitionConfig

CLASSES, CLIENTS = 10, 7
LABELS = np.repeat(np.arange(CLASSES), 60)  # as folders have them: class by class
SCHEMES = [
    PartitionConfig(scheme="iid"),
    PartitionConfig(scheme="dirichlet", alpha=0.3),
    PartitionConfig(scheme="pathological", classes_per_client=2),
]
NAMES = [config.scheme for config in SCHEMES]


@pytest.mark.parametrize("config", SCHEMES, ids=NAMES)
def test_every_picture_is_with_one_client_or_dropped(config: PartitionConfig) -> None:
    drawn = partition(LABELS, config, clients=CLIENTS, seed=0)
    assert len(drawn.shares) == CLIENTS
    assert all(len(share) and share.dtype == np.int64 for share in drawn.shares)
    everything = sorted(index for share in (*drawn.shares, drawn.dropped) for index in share)
    assert everything == list(range(len(LABELS)))
    assert config.scheme == "pathological" or not len(drawn.dropped)


@pytest.mark.parametrize("config", SCHEMES, ids=NAMES)
def test_a_partition_depends_on_the_seed_alone(config: PartitionConfig) -> None:
    first, again, other = (partition(LABELS, config, clients=CLIENTS, seed=seed) for seed in (0, 0, 1))
    assert [share.tolist() for share in first.shares] == [share.tolist() for share in again.shares]
    assert [share.tolist() for share in first.shares] != [share.tolist() for share in other.shares]


def test_iid_shares_are_equal_and_of_all_classes() -> None:
    drawn = partition(LABELS, PartitionConfig(scheme="iid"), clients=4, seed=0)
    assert [len(share) for share in drawn.shares] == [150] * 4
    counts = counts_by_client(drawn, LABELS)
    # Hypergeometric: 15 of each class, standard deviation 3.3.
    assert counts.min() >= 2
    assert counts.max() <= 28


@pytest.mark.parametrize(("alpha", "even"), [(1000.0, True), (0.1, False)])
def test_dirichlet_shares_are_the_more_even_the_larger_alpha(alpha: float, even: bool) -> None:
    drawn = partition(LABELS, PartitionConfig(scheme="dirichlet", alpha=alpha), clients=5, seed=0)
    counts = counts_by_client(drawn, LABELS)
    assert counts.sum(axis=0).tolist() == [60] * CLASSES
    assert (counts.min() >= 8 and counts.max() <= 18) == even
    assert (np.median(counts.max(axis=0)) > 40) == (not even)


def test_pathological_clients_have_their_number_of_classes_and_the_rest_is_dropped() -> None:
    drawn = partition(LABELS, SCHEMES[2], clients=CLIENTS, seed=0)
    assert [len(set(LABELS[share])) for share in drawn.shares] == [2] * 7
    used = {label for share in drawn.shares for label in LABELS[share]}
    assert set(LABELS[drawn.dropped]) == set(range(CLASSES)) - used
    enough = partition(LABELS, SCHEMES[2], clients=CLASSES, seed=0)
    assert not len(enough.dropped), "with as many clients as classes every class is used"


@pytest.mark.parametrize(
    ("labels", "config", "clients", "message"),
    [
        (LABELS[:3], PartitionConfig(), 4, "4 clients cannot share 3 pictures"),
        (LABELS[:0], PartitionConfig(), 1, "1 clients cannot share 0 pictures"),
        (
            LABELS,
            PartitionConfig(scheme="pathological", classes_per_client=11),
            2,
            "11 classes per client were asked for, but the pictures have 10",
        ),
        (
            np.arange(6) % 2,
            PartitionConfig(scheme="pathological", classes_per_client=2),
            6,
            "6 clients with 2 classes each need more pictures of some class",
        ),
        (
            LABELS,
            PartitionConfig(scheme="dirichlet", alpha=1e-3),
            100,
            "with alpha 0.001 one of 100 clients was left without pictures",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    labels: np.ndarray, config: PartitionConfig, clients: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        partition(labels, config, clients=clients, seed=0)


@pytest.mark.parametrize("config", SCHEMES, ids=NAMES)
def test_a_saved_partition_reads_back_the_same(tmp_path: Path, config: PartitionConfig) -> None:
    drawn = partition(LABELS, config, clients=CLIENTS, seed=3)
    drawn.save(tmp_path / "shares.npz")
    read = Partition.load(tmp_path / "shares.npz", LABELS, config, clients=CLIENTS, seed=3)
    assert [share.tolist() for share in read.shares] == [share.tolist() for share in drawn.shares]
    assert read.dropped.tolist() == drawn.dropped.tolist()
    assert read.digest == drawn.digest


def test_a_partition_of_something_else_is_refused(tmp_path: Path) -> None:
    path, config = tmp_path / "shares.npz", SCHEMES[0]
    partition(LABELS, config, clients=CLIENTS, seed=0).save(path)
    others = [(LABELS[::-1], CLIENTS, 0), (LABELS, 6, 0), (LABELS, CLIENTS, 1)]
    for labels, clients, seed in others:
        with pytest.raises(DataError, match="was drawn for other pictures"):
            Partition.load(path, labels, config, clients=clients, seed=seed)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "shares.npz"
    if damage != "missing":
        partition(LABELS, SCHEMES[0], clients=CLIENTS, seed=0).save(path)
        path.write_bytes({"empty": b"", "cut": path.read_bytes()[:900], "text": b"shares"}[damage])
    with pytest.raises(DataError, match=r"shares\.npz cannot be read as a partition"):
        Partition.load(path, LABELS, SCHEMES[0], clients=CLIENTS, seed=0)


def test_counts_are_those_of_a_slow_count() -> None:
    drawn = partition(LABELS, SCHEMES[1], clients=CLIENTS, seed=0)
    counts = counts_by_client(drawn, LABELS)
    for client, share in enumerate(drawn.shares):
        assert counts[client].tolist() == [sum(LABELS[index] == label for index in share) for label in range(CLASSES)]


@pytest.mark.parametrize("config", SCHEMES, ids=NAMES)
def test_the_figure_has_a_row_of_colour_for_each_client(tmp_path: Path, config: PartitionConfig) -> None:
    draw_partition(partition(LABELS, config, clients=CLIENTS, seed=0), LABELS, tmp_path / "shares.png")
    with Image.open(tmp_path / "shares.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    assert (np.ptp(pixels, axis=2) > 30).mean() > 0.05
