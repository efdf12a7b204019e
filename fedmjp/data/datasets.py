"""Labelled photographs in any number: opened in seconds, read one at a time, memory does not grow with them.

Hugging Face's ``datasets`` holds the tables. Of an image folder it holds the paths alone. Parquet files
are written out once as Arrow files, which are mapped into memory from then on: they take as much disk
again, under ``HF_DATASETS_CACHE`` (by default ``~/.cache/huggingface/datasets``), where the hub's
downloads are kept as well; changed parquet files are written out anew.
"""

import hashlib
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import skimage.data
from datasets import ClassLabel, Dataset, Features, Value, disable_progress_bars, enable_progress_bars, load_dataset
from datasets import Image as ImageFeature
from datasets import logging as datasets_logging
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.utils.tqdm import are_progress_bars_disabled
from huggingface_hub import logging as hub_logging
from PIL import Image
from timm.data.imagenet_info import ImageNetInfo

from fedmjp.data.bundled import CROPS
from fedmjp.data.layout import SPLIT_FOLDERS, Split, class_folders, parquet_files, pictures_in, split_folders
from fedmjp.data.pictures import LabelledPicture, to_image, to_rgb
from fedmjp.errors import DataError

HUB = "hub:"
COLUMNS = ["image", "label"]
NOT_ENCODED = ImageFeature(decode=False)
# Decoded pictures are kept where all of the data set would fit; 100,000 of 64 x 64 do.
KEPT_BYTES = 2 * 2**30
BYTES_PER_PIXEL = 4  # of Pillow's RGB
DAMAGED = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


@dataclass(frozen=True, eq=False)
class LabelledDataset:
    """Photographs with labels.

    Attributes:
        name: What the user called it, and the split.
        labels: (pictures,) int64.
        class_names: One for each label that there is, at least.
        keys: The pictures' names in their source; they never change.
        rows: A table whose column ``image`` has each picture's file, or its bytes.
        kept: Small pictures that were decoded before.
    """

    name: str
    labels: np.ndarray
    class_names: tuple[str, ...]
    keys: Sequence[str] = field(repr=False)
    rows: Dataset = field(repr=False)
    kept: dict[int, Image.Image] = field(repr=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, index: int) -> str:
        """The name of a picture in its source."""
        return self.keys[index]

    def digest(self) -> str:
        """SHA-256 of which pictures there are and of which classes, as hex; of their names, not their pixels."""
        digest = hashlib.sha256("\n".join([*self.class_names, "", *self.keys]).encode())
        digest.update(np.ascontiguousarray(self.labels).tobytes())
        return digest.hexdigest()

    def photograph(self, index: int) -> Image.Image:
        """Read and decode a picture.

        Returns:
            It in RGB, 8 bits per channel; not to be changed in place.

        Raises:
            DataError: If it is damaged, gone, or of a mode without a fixed range of values.
        """
        photograph = self.kept.get(index)
        if photograph is None:
            photograph = self._decode(index)
            if photograph.width * photograph.height * BYTES_PER_PIXEL <= KEPT_BYTES // len(self):
                self.kept[index] = photograph
        return photograph

    def _decode(self, index: int) -> Image.Image:
        encoded = self.rows.data.column("image")[index].as_py() or {}  # without the costs of rows[index]
        try:
            content = encoded.get("bytes")
            with Image.open(io.BytesIO(content) if content is not None else encoded["path"]) as photograph:
                return to_rgb(photograph)
        except (KeyError, TypeError) as error:
            raise DataError(f"{self.name} has no picture in row {self.key(index)}") from error
        except DAMAGED as error:
            raise DataError(f"{self.key(index)} in {self.name} cannot be read as a picture: {error}") from error


class DatasetPictures:
    """A data set as a source of pictures for campaigns.

    Args:
        dataset: The photographs.
        size: Pixels per side of the pictures it gives.
    """

    def __init__(self, dataset: LabelledDataset, size: int) -> None:
        self._dataset, self._size = dataset, size
        self._indices = {name: index for index, name in enumerate(dataset.keys)}

    def names(self) -> Sequence[str]:
        """The keys of the pictures."""
        return list(self._indices)

    def load(self, name: str) -> LabelledPicture:
        """Read one picture; DataError if it is unknown or damaged."""
        if name not in self._indices:
            raise DataError(f"there is no picture {name!r} in {self._dataset.name}")
        index = self._indices[name]
        image = to_image(self._dataset.photograph(index), self._size)
        return LabelledPicture(name, image, int(self._dataset.labels[index]))


class RowKeys(Sequence[str]):
    """Names of the rows of a table that has none: ``validation/00017``.

    Args:
        split: What the names begin with.
        count: Number of rows.
    """

    def __init__(self, split: Split, count: int) -> None:
        self._split, self._rows = split, range(count)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[row] for row in self._rows[index]]
        return f"{self._split}/{self._rows[index]:05d}"


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
    with _quiet():
        dataset = _open(data, split)
    if not len(dataset):
        raise DataError(f"{dataset.name} holds no picture")
    _check_labels(dataset, classes)
    return dataset


def _open(data: str, split: Split) -> LabelledDataset:
    if data == "bundled":
        return _bundled()
    if data.startswith(HUB):
        return _hub(data, split)
    folder = Path(data)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    files = {each: parquet_files(folder, each) for each in SPLIT_FOLDERS}
    if any(files.values()):
        if not files[split]:
            raise DataError(f"{folder} has no {split}.parquet and no shards {split}-00000-of-00001.parquet")
        return _parquet(f"{data} ({split})", files[split], split)
    return _image_folder(folder, split)


def _bundled() -> LabelledDataset:
    photographs = [
        Image.fromarray(getattr(skimage.data, crop.photograph)()).crop(
            (crop.left, crop.top, crop.left + crop.side, crop.top + crop.side)
        )
        for crop in CROPS.values()
    ]
    return LabelledDataset(
        name="bundled",
        labels=np.array([crop.label for crop in CROPS.values()], dtype=np.int64),
        class_names=tuple(ImageNetInfo().label_names()),  # type: ignore[no-untyped-call]
        keys=list(CROPS),
        rows=Dataset.from_dict({"image": photographs}, features=Features({"image": NOT_ENCODED})),
    )


def _image_folder(folder: Path, split: Split) -> LabelledDataset:
    """Classes are those of both splits together, so that a label means the same in both."""
    splits = split_folders(folder)
    if splits and split not in splits:
        raise DataError(f"{folder} has no folder {' or '.join(SPLIT_FOLDERS[split])}, only {splits.popitem()[1].name}")
    classes = {each: class_folders(place) for each, place in (splits or {split: folder}).items()}
    unknown = sorted(set(classes.get("validation", [])) - set(classes.get("train", []))) if len(classes) > 1 else []
    if unknown:
        raise DataError(
            f"{splits['validation']} has the class folder {unknown[0]}, {splits['train']} has none of that name: "
            "both need a folder for each class"
        )
    class_names = sorted({name for names in classes.values() for name in names})
    place = splits.get(split, folder)
    found = [_sorted_pictures(place / name) for name in class_names]
    if not any(found):
        raise DataError(f"{place} holds no picture; expected FOLDER/CLASS/picture")
    beginning = f"{place.name}/" if splits else ""
    keys = pa.array(
        f"{beginning}{name}/{picture}" for name, names in zip(class_names, found, strict=True) for picture in names
    )
    rows = Dataset.from_dict({"key": keys, "image": _paths(folder, keys)}).cast(
        Features({"key": Value("string"), "image": NOT_ENCODED})
    )
    return LabelledDataset(
        name=f"{folder} ({split})" if splits else str(folder),
        labels=np.repeat(np.arange(len(class_names)), [len(names) for names in found]),
        class_names=tuple(class_names),
        keys=rows["key"],
        rows=rows.select_columns("image"),
    )


def _sorted_pictures(folder: Path) -> list[str]:
    return sorted(pictures_in(folder)) if folder.is_dir() else []


def _paths(folder: Path, keys: pa.StringArray) -> pa.StringArray:
    return pa.compute.binary_join_element_wise(str(folder.absolute()), keys, "/")


def _parquet(name: str, files: list[str], split: Split) -> LabelledDataset:
    try:
        filled = [file for file in files if pq.read_metadata(file).num_rows]  # the library fails on empty ones
        if not filled:
            raise DataError(f"{name} holds no picture")
        rows = Dataset.from_parquet(filled)
    except (pa.ArrowException, DatasetGenerationError, OSError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise DataError(f"{name} cannot be read as parquet files: {reason}") from error
    return _table(name, rows, split)


def _hub(data: str, split: Split) -> LabelledDataset:
    try:
        rows = load_dataset(data.removeprefix(HUB), split=split)
    except (DatasetNotFoundError, DatasetGenerationError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{data} cannot be opened: {reason.rstrip('.')}; check its name and the network; if it asks for a licence, "
            "accept it on its page and set HF_TOKEN; or name a folder of its parquet files"
        ) from error
    return _table(f"{data} ({split})", rows, split)


def _table(name: str, rows: Dataset, split: Split) -> LabelledDataset:
    missing = [column for column in COLUMNS if column not in rows.column_names]
    if missing:
        raise DataError(f"{name} has no column {missing[0]!r}, only {', '.join(rows.column_names)}")
    try:
        rows = rows.select_columns(COLUMNS).cast_column("image", NOT_ENCODED)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"column 'image' of {name} holds no pictures: {str(error).splitlines()[0]}") from error
    labels = rows.data.column("label")
    if not pa.types.is_integer(labels.type) or labels.null_count:
        what = f"{labels.null_count} empty values" if labels.null_count else f"values of type {labels.type}"
        raise DataError(f"column 'label' of {name} holds {what}, expected class numbers from 0")
    known = rows.features["label"]
    numbers = labels.to_numpy().astype(np.int64)
    count = int(numbers.max(initial=-1)) + 1
    return LabelledDataset(
        name=name,
        labels=numbers,
        class_names=tuple(known.names if isinstance(known, ClassLabel) else map(str, range(count))),
        keys=RowKeys(split, len(numbers)),
        rows=rows,
    )


def _check_labels(dataset: LabelledDataset, classes: int) -> None:
    lowest, highest = int(dataset.labels.min()), int(dataset.labels.max())
    if lowest < 0:
        raise DataError(f"{dataset.name} has label {lowest}; expected class numbers from 0")
    if highest >= classes:
        raise DataError(
            f"{dataset.name} has label {highest} ({dataset.class_names[highest]}), but the model knows {classes} "
            f"classes; give it at least {highest + 1}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no log lines of the libraries, which say nothing that an error does not."""
    shown = not are_progress_bars_disabled()
    verbosity = datasets_logging.get_verbosity(), hub_logging.get_verbosity()
    disable_progress_bars()
    datasets_logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets_logging.set_verbosity(verbosity[0])
        hub_logging.set_verbosity(verbosity[1])
        if shown:
            enable_progress_bars()
