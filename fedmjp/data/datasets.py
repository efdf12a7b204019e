"""Data sets by what a user calls them: opened in seconds, read one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image
from timm.data.imagenet_info import ImageNetInfo

from fedmjp.data.layout import (
    HUB,
    SPLIT_FOLDERS,
    SUFFIXES,
    Split,
    class_folders,
    parquet_files,
    pictures_in,
    split_folders,
)
from fedmjp.data.pictures import LabelledDataset, LabelledPicture, open_picture, to_image
from fedmjp.errors import DataError
from fedmjp.extras import require

BUNDLED = "bundled"
# They ship inside scikit-image: real pictures on every machine, nothing to fetch.
PHOTOGRAPHS = Path(skimage.data.__file__).parent


@dataclass(frozen=True)
class Crop:
    """A square of a bundled photograph: left, top and side in pixels, and the nearest ImageNet class."""

    photograph: str
    left: int
    top: int
    side: int
    label: int

    def cut(self) -> Image.Image:
        """Read the photograph and crop it."""
        (file,) = PHOTOGRAPHS.glob(f"{self.photograph}.*")
        with Image.open(file) as photograph:
            return photograph.crop((self.left, self.top, self.left + self.side, self.top + self.side))


CROPS = {
    "astronaut": Crop("astronaut", 0, 0, 512, 834),  # suit
    "astronaut-face": Crop("astronaut", 112, 0, 240, 834),
    "cat": Crop("chelsea", 80, 0, 300, 281),  # tabby
    "cat-eyes": Crop("chelsea", 130, 40, 200, 281),
    "coffee": Crop("coffee", 130, 0, 400, 967),  # espresso
    "coffee-spoon": Crop("coffee", 360, 120, 240, 910),  # wooden spoon
    "rocket": Crop("rocket", 110, 0, 427, 657),  # missile
    "rocket-flame": Crop("rocket", 200, 180, 240, 657),
}


class DatasetPictures:
    """A data set as a source of pictures for campaigns: ``size`` pixels per side, of a share of the shorter side."""

    def __init__(self, dataset: LabelledDataset, size: int, crop_share: float) -> None:
        self._dataset, self._size, self._crop_share = dataset, size, crop_share
        self._indices = {name: index for index, name in enumerate(dataset.keys)}

    def names(self) -> Sequence[str]:
        """List the keys of the pictures, sorted."""
        return sorted(self._indices)

    def load(self, name: str) -> LabelledPicture:
        """Read a picture; DataError if it is unknown or damaged.

        Args:
            name: Its key.
        """
        if name not in self._indices:
            raise DataError(f"there is no picture {name!r} in {self._dataset.name}")
        index = self._indices[name]
        image = to_image(self._dataset.decode(index), self._size, crop_share=self._crop_share)
        return LabelledPicture(name, image, int(self._dataset.labels[index]))


def open_dataset(data: str, split: Split, *, classes: int) -> LabelledDataset:
    """Open the split of a data set.

    Args:
        data: "bundled" or a folder of ``CLASS/picture`` files (both splits are the same), a folder with
            ``train`` and ``val`` (or ``validation``) of that kind, a folder of ``train.parquet`` and
            ``validation.parquet`` (or their shards as the hub has them), or "hub:OWNER/NAME".
        split: Which half.
        classes: Classes that the model knows.

    Raises:
        DataError: If there is nothing of the kind, it holds no picture, is damaged, or has labels that
            the model does not know.
    """
    dataset = _open(data, split)
    if not dataset.labels.size:
        raise DataError(f"{dataset.name} holds no picture")
    lowest, highest = int(dataset.labels.min()), int(dataset.labels.max())
    if lowest < 0:
        raise DataError(f"{dataset.name} has label {lowest}; expected class numbers from 0")
    if highest >= classes:
        raise DataError(
            f"{dataset.name} has label {highest} ({dataset.class_names[highest]}), but the model knows {classes} "
            f"classes; give it at least {highest + 1}, or name pictures of its classes"
        )
    return dataset


def _open(data: str, split: Split) -> LabelledDataset:
    if data == BUNDLED:
        return LabelledDataset(
            name=BUNDLED,
            labels=np.array([crop.label for crop in CROPS.values()], dtype=np.int64),
            class_names=names_of_imagenet(),
            keys=list(CROPS),
            read=_cut,
        )
    if data.startswith(HUB):
        require("datasets", f"{data}, of the Hugging Face hub,")
        from fedmjp.data.tables import open_hub  # noqa: PLC0415 (a second of imports)

        return open_hub(data, split)
    folder = Path(data)
    try:
        files = {part: parquet_files(folder, part) for part in SPLIT_FOLDERS}
        if not any(files.values()):
            return _image_folder(folder, split)
    except (OSError, ValueError) as error:  # no right to look into it, or no name that a file could have
        place, reason = getattr(error, "filename", None) or folder, getattr(error, "strerror", None) or error
        raise DataError(f"{place} cannot be read: {reason}") from None
    if not files[split]:
        raise DataError(f"{folder} has no {split}.parquet and no shards {split}-00000-of-00001.parquet")
    require("datasets", f"{folder}, of parquet files,")
    from fedmjp.data.tables import open_parquet  # noqa: PLC0415

    return open_parquet(f"{data} ({split})", files[split], split)


@cache
def names_of_imagenet() -> tuple[str, ...]:
    """List the classes of ImageNet-1K by their WordNet numbers, in the order of the labels."""
    return tuple(ImageNetInfo().label_names())  # type: ignore[no-untyped-call]


def _cut(index: int) -> Image.Image:
    return list(CROPS.values())[index].cut()


def _image_folder(folder: Path, split: Split) -> LabelledDataset:
    """Classes are those of both splits together, so that a label means the same in both."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    splits = split_folders(folder)
    if splits and split not in splits:
        raise DataError(f"{folder} has no folder {' or '.join(SPLIT_FOLDERS[split])}, only {splits.popitem()[1].name}")
    classes = {part: class_folders(place) for part, place in (splits or {split: folder}).items()}
    unknown = sorted(set(classes.get("validation", [])) - set(classes.get("train", []))) if len(classes) > 1 else []
    if unknown:
        raise DataError(
            f"{splits['validation']} has the class folder {unknown[0]}, {splits['train']} has none of that name: "
            "both need a folder for each class"
        )
    class_names = sorted({name for names in classes.values() for name in names})
    place = splits.get(split, folder)
    files = [sorted(pictures_in(place / name)) if (place / name).is_dir() else [] for name in class_names]
    if not any(files):
        expected = f"expected FOLDER/CLASS/picture with {', '.join(sorted(SUFFIXES))}"
        raise DataError(f"{place} holds no picture; {expected}")
    beginning = f"{place.name}/" if splits else ""
    keys = [f"{beginning}{name}/{picture}" for name, names in zip(class_names, files, strict=True) for picture in names]
    return LabelledDataset(
        name=f"{folder} ({split})" if splits else str(folder),
        labels=np.repeat(np.arange(len(class_names)), [len(names) for names in files]),
        class_names=tuple(class_names),
        keys=keys,
        read=partial(_read_file, folder.absolute(), keys),
    )


def _read_file(folder: Path, keys: Sequence[str], index: int) -> Image.Image:
    try:
        keys[index].encode()  # names on disk are bytes, not always of any text
    except UnicodeEncodeError as error:
        raise DataError(f"the file name {keys[index]!a} is not valid text; rename or remove the file") from error
    return open_picture(folder / keys[index])
