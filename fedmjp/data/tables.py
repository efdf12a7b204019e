"""Parquet files and data sets of the hub, by Hugging Face's ``datasets``.

Parquet files are written out once as Arrow files, which are mapped into memory from then on: they take as much disk
again, under ``HF_DATASETS_CACHE`` (by default ``~/.cache/huggingface/datasets``), where the hub's downloads are kept
as well; changed parquet files are written out anew.
"""

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, disable_progress_bars, enable_progress_bars, load_dataset
from datasets import Image as ImageFeature
from datasets import logging as datasets_logging
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.utils.tqdm import are_progress_bars_disabled
from huggingface_hub import logging as hub_logging
from PIL import Image

from fedmjp.data.layout import HUB, Split
from fedmjp.data.pictures import LabelledDataset, open_picture
from fedmjp.errors import DataError
from fedmjp.files import require_regular

COLUMNS = ["image", "label"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and log lines of the libraries, which say nothing that an error does not."""
    visible = not are_progress_bars_disabled()
    verbosity = datasets_logging.get_verbosity(), hub_logging.get_verbosity()
    disable_progress_bars()
    datasets_logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets_logging.set_verbosity(verbosity[0])
        hub_logging.set_verbosity(verbosity[1])
        if visible:
            enable_progress_bars()


class RowKeys(Sequence[str]):
    """The names of the rows of a table: ``validation/00017``."""

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


@_quiet()
def open_parquet(name: str, files: list[str], split: Split) -> LabelledDataset:
    """Open the parquet files of a split.

    Args:
        name: Of the data set, for messages.
        files: Their paths.
        split: train or validation.

    Raises:
        DataError: If they are damaged, or hold no labelled pictures.
    """
    try:
        for file in files:
            require_regular(Path(file))
        filled = [file for file in files if pq.read_metadata(file).num_rows]  # the library fails on empty ones
        if not filled:
            raise DataError(f"{name} holds no picture")
        rows = Dataset.from_parquet(filled)
    except (pa.ArrowException, DatasetGenerationError, OSError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise DataError(f"{name} cannot be read as parquet files: {reason}") from error
    return _table(name, rows, split)


@_quiet()
def open_hub(data: str, split: Split) -> LabelledDataset:
    """Open the split of ``hub:OWNER/NAME``, downloading it where it is not on this machine.

    Args:
        data: hub:OWNER/NAME.
        split: train or validation.

    Raises:
        DataError: If that cannot be done, or it holds no labelled pictures.
    """
    if not data.removeprefix(HUB).strip("/"):
        raise DataError(f"{data!r} names no data set: write hub:OWNER/NAME")
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
        rows = rows.select_columns(COLUMNS).cast_column("image", ImageFeature(decode=False))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"column 'image' of {name} holds no pictures: {str(error).splitlines()[0]}") from error
    labels = rows.data.column("label")
    if not pa.types.is_integer(labels.type) or labels.null_count:
        content = f"{labels.null_count} empty values" if labels.null_count else f"values of type {labels.type}"
        raise DataError(f"column 'label' of {name} holds {content}, expected class numbers from 0")
    feature = rows.features["label"]
    numbers = labels.to_numpy().astype(np.int64)
    count = int(numbers.max(initial=-1)) + 1
    return LabelledDataset(
        name=name,
        labels=numbers,
        class_names=tuple(feature.names if isinstance(feature, ClassLabel) else map(str, range(count))),
        keys=RowKeys(split, len(numbers)),
        read=partial(_row, rows),
    )


def _row(rows: Dataset, index: int) -> Image.Image | None:
    encoded = rows.data.column("image")[index].as_py() or {}  # without the costs of rows[index]
    if (content := encoded.get("bytes")) is not None:
        return open_picture(io.BytesIO(content))
    return open_picture(Path(encoded["path"])) if encoded.get("path") else None
