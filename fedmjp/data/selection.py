"""Which pictures a run uses and which client holds which, from the seed alone.

The launcher, the clients and the evaluator each work it out for themselves and agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fedmjp.data.datasets import BUNDLED, DatasetPictures, open_dataset
from fedmjp.data.pictures import CROP_SHARE, LabelledPicture, PictureEntry, PictureSource
from fedmjp.errors import DataError, suggestion
from fedmjp.seeds import torch_generator
from fedmjp.setups import BatchSetup


@dataclass(frozen=True)
class Selection:
    """Selected pictures, and the reasons for damaged files that were passed over.

    The pictures themselves stay in their source until ``load``: memory does not grow with their number.
    """

    source: PictureSource = field(repr=False)
    entries: tuple[PictureEntry, ...]
    skipped: tuple[str, ...]

    def partition(self, client: int, clients: int) -> tuple[PictureEntry, ...]:
        """List the pictures of a client: every ``clients``-th, a random share of equal size.

        Args:
            client: From 0.
            clients: Number of clients.
        """
        return self.entries[client::clients]

    def batches(self, scenario: BatchSetup) -> list[tuple[PictureEntry, ...]]:
        """List the pictures behind each upload, client by client, turn by turn.

        Groups of clients whose updates are summed stand together. Runs that want fewer pictures than were chosen
        share the first ones.

        Args:
            scenario: Gives batch size, clients and pictures of each.
        """
        size, count, summed = scenario.batch_size, scenario.pictures_per_client, scenario.pipeline.clients
        shares = [self.entries[client :: scenario.clients][:count] for client in range(scenario.clients)]
        groups = [shares[first : first + summed] for first in range(0, len(shares), summed)]
        return [
            tuple(entry for share in group for entry in share[start : start + size])
            for group in groups
            for start in range(0, count, size)
        ]

    def load(self, entry: PictureEntry) -> LabelledPicture:
        """Read the pixels of a selected picture.

        Args:
            entry: The picture.

        Raises:
            DataError: If it cannot be read any more, or has changed since it was selected.
        """
        picture = self.source.load(entry.name)
        if picture.digest() != entry.sha256:
            raise DataError(f"picture {entry.name!r} has changed since the run began")
        return picture


def open_source(data: str, *, size: int, classes: int) -> DatasetPictures:
    """Open the validation split of any data that ``open_dataset`` opens, as a source of pictures.

    Args:
        data: As the option ``--data`` names it.
        size: Pixels per side.
        classes: Number of classes of the model.

    Raises:
        DataError: If the source is missing or empty, or has labels that the model does not know.
    """
    crop_share = 1.0 if data == BUNDLED else CROP_SHARE  # those are square crops already
    return DatasetPictures(open_dataset(data, "validation", classes=classes), size, crop_share)


def _leave_none_out(_name: str) -> bool:
    """Leave no picture out."""
    return False


def select(
    source: PictureSource, count: int, *, seed: int, leave_out: Callable[[str], bool] = _leave_none_out
) -> Selection:
    """Select readable pictures in a drawn order.

    Damaged files are skipped and named. Only as many files as needed are read.

    Args:
        source: Pictures to select from.
        count: Number of pictures.
        seed: Of the order.
        leave_out: Tells, by name, which pictures are never selected.

    Raises:
        DataError: If there are fewer readable pictures than asked for.
    """
    names = [name for name in source.names() if not leave_out(name)]
    order = torch.randperm(len(names), generator=torch_generator(seed, "selection"))
    entries: list[PictureEntry] = []
    skipped: list[str] = []
    for index in order.tolist():
        if len(entries) == count:
            break
        try:
            picture = source.load(names[index])
        except DataError as error:
            skipped.append(str(error))
        else:
            entries.append(PictureEntry(picture.name, picture.label, picture.digest()))
    if len(entries) < count:
        broken = f" ({len(skipped)} damaged, first: {skipped[0]})" if skipped else ""
        raise DataError(f"{count} pictures were asked for, but only {len(entries)} can be read{broken}")
    return Selection(source, tuple(entries), tuple(skipped))


def pick(source: PictureSource, names: Sequence[str]) -> Selection:
    """Select pictures by name, in the given order.

    Args:
        source: Pictures to select from.
        names: Each once.

    Raises:
        DataError: If a name is given twice, is not in the source, or its picture cannot be read.
    """
    available = set(source.names())
    for index, name in enumerate(names):
        if name in names[:index]:
            raise DataError(f"picture {name!r} is named twice")
        if name not in available:
            raise DataError(f"there is no picture {name!r}, {suggestion(name, available)}")
    pictures = (source.load(name) for name in names)
    entries = tuple(PictureEntry(picture.name, picture.label, picture.digest()) for picture in pictures)
    return Selection(source, entries, ())


def select_for(scenario: BatchSetup) -> Selection:
    """Select the pictures of a federated run, one share per client.

    Args:
        scenario: Gives data, model, clients and seed.

    Raises:
        DataError: If the source is missing, or has fewer readable pictures than the run needs.
    """
    source = open_source(scenario.data, size=scenario.model.image_size, classes=scenario.model.classes)
    return select(source, scenario.clients * scenario.pictures_per_client, seed=scenario.seed)
