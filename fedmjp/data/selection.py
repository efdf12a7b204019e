"""Which pictures a run uses and which client holds which, from the seed alone.

The launcher, the clients and the evaluator each work it out for themselves and agree.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from fedmjp.config import FederationConfig
from fedmjp.data.bundled import BundledPictures
from fedmjp.data.folder import FolderPictures
from fedmjp.data.pictures import LabelledPicture, PictureSource
from fedmjp.errors import DataError
from fedmjp.seeds import torch_generator


@dataclass(frozen=True)
class Selection:
    """Pictures that were chosen, and files that had to be passed over because they are damaged."""

    pictures: tuple[LabelledPicture, ...]
    skipped: tuple[str, ...]

    def partition(self, client: int, clients: int) -> tuple[LabelledPicture, ...]:
        """The pictures that one client holds: every ``clients``-th, a random share of equal size."""
        return self.pictures[client::clients]


def open_source(data: str, *, size: int, classes: int) -> PictureSource:
    """The source that ``--data`` names: "bundled", or a folder of ``CLASS/picture`` files.

    Raises:
        DataError: If the folder is missing or empty.
    """
    return BundledPictures(size, classes) if data == "bundled" else FolderPictures(Path(data), size, classes)


def select(source: PictureSource, count: int, *, seed: int) -> Selection:
    """Choose ``count`` readable pictures in an order drawn from ``seed``.

    Damaged files are skipped and named. Only as many files as needed are read.

    Raises:
        DataError: If there are fewer readable pictures than asked for.
    """
    names = source.names()
    order = torch.randperm(len(names), generator=torch_generator(seed, "selection"))
    chosen: list[LabelledPicture] = []
    skipped: list[str] = []
    for index in order.tolist():
        if len(chosen) == count:
            break
        try:
            chosen.append(source.load(names[index]))
        except DataError as error:
            skipped.append(str(error))
    if len(chosen) < count:
        broken = f" ({len(skipped)} damaged, first: {skipped[0]})" if skipped else ""
        raise DataError(f"{count} pictures were asked for, but only {len(chosen)} can be read{broken}")
    return Selection(tuple(chosen), tuple(skipped))


def select_for(config: FederationConfig) -> Selection:
    """The pictures of a federated run, one share per client.

    Raises:
        DataError: If the source is missing, or has fewer readable pictures than the run needs.
    """
    source = open_source(config.data, size=config.image_size, classes=config.classes)
    return select(source, config.clients * config.pictures_per_client, seed=config.seed)
