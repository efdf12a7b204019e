"""A data set dealt to the sites of a deployment, as folders of pictures: for trials without pictures of their own."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmjp.data.datasets import open_dataset
from fedmjp.data.layout import Split
from fedmjp.data.partitions import partition
from fedmjp.data.pictures import LabelledDataset
from fedmjp.errors import DataError, OutputError
from fedmjp.learning import PartitionConfig

ANY = 2**31  # classes: whatever there are


class SiteShare(NamedTuple):
    """Counts of the pictures that a site was dealt."""

    site: str
    training: int  # pictures
    validation: int
    classes: int  # of its training pictures


def deal_to_sites(data: str, output: Path, sites: Sequence[str], config: PartitionConfig, seed: int) -> list[SiteShare]:
    """Write SITE/train/CLASS/picture and SITE/validation/CLASS/picture below a folder.

    Validation pictures of a class go to sites as its training pictures do.

    Args:
        data: With a validation split of its own.
        output: A new folder, or an empty one.
        sites: Their names.
        config: How pictures are dealt.
        seed: Of the draw.

    Raises:
        DataError: If there are no such pictures, or they cannot be dealt as asked.
        OutputError: If there is something in the folder.
    """
    train, validation = (open_dataset(data, split, classes=ANY) for split in ("train", "validation"))
    if train.digest() == validation.digest():
        raise DataError(f"{data} has one set of pictures alone; sites need some that they do not train on")
    if unfit := [name for name in train.class_names if name in ("", ".", "..") or "/" in name]:
        raise DataError(f"{data} has a class {unfit[0]!r}, which no folder can be named")
    shares = partition(train.labels, config, clients=len(sites), seed=seed).shares
    held_out = _split_alike(validation.labels, train.labels, shares)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise OutputError(f"{output} is not empty: name a new folder")
        with tempfile.TemporaryDirectory(dir=output) as partial:
            for site, indices, held_out_indices in zip(sites, shares, held_out, strict=True):
                _write(train, indices, Path(partial) / site, "train")
                _write(validation, held_out_indices, Path(partial) / site, "validation")
            for site in sites:
                shutil.move(Path(partial) / site, output / site)
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error}") from None
    classes = [len(np.unique(train.labels[indices])) for indices in shares]
    return [SiteShare(*counts) for counts in zip(sites, map(len, shares), map(len, held_out), classes, strict=True)]


def _split_alike(labels: np.ndarray, trained: np.ndarray, shares: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Split validation pictures so that each class goes to sites in the proportions of its training pictures."""
    dealt: list[list[np.ndarray]] = [[] for _ in shares]
    for label in np.unique(labels):
        counts = np.array([np.count_nonzero(trained[trained_indices] == label) for trained_indices in shares])
        indices = np.flatnonzero(labels == label)
        ends = np.round(np.cumsum(counts) / max(1, counts.sum()) * len(indices)).astype(int)
        for parts, part in zip(dealt, np.split(indices, ends[:-1]), strict=True):
            parts.append(part)
    return [np.concatenate(parts) for parts in dealt]


def _write(pictures: LabelledDataset, indices: np.ndarray, folder: Path, split: Split) -> None:
    """Write pictures below a split's folder of each class."""
    for name in pictures.class_names:
        (folder / split / name).mkdir(parents=True, exist_ok=True)
    for index in indices.tolist():
        place = folder / split / pictures.class_names[pictures.labels[index]]
        pictures.decode(index).save(place / f"{index:08d}.png")
