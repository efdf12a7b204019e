"""Private data that leaves as it is: everything that was sent, compared with every private example that hooks saw.

Whatever is numbers, or can be read as numbers (bytes of a picture file, of an array, of raw values; text that encodes
bytes), becomes a vector. It leaks if it runs parallel to a part of an example, to an example that was made smaller, or
to several examples one after another: normalisation and units do not hide anything from a correlation.
"""

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from PIL import Image
from scipy.signal import fftconvolve
from torch import Tensor

from fedmjp.benchmarks.audit.evaluating import Private

Vector = np.ndarray[Any, np.dtype[np.float64]]
FEWEST = 16  # numbers that can be told from chance
PARALLEL = 0.98  # correlation from which on a vector is an example's
# Of a part of one, that may begin anywhere: the longer, and the nearer, for smooth windows are like many a curve.
FEWEST_OF_PART, PARALLEL_PART = 64, 0.999
EXAMPLES = 16  # of each upload that are compared
LARGE = 64  # numbers in one metric or configuration value that nobody needs for a metric
HUGE = 1e12  # of bytes that are no numbers of this kind
MOST = 4_000_000  # numbers of a vector that is searched


def unusual(described: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Name values of one record that are larger than a metric needs, with how many numbers or bytes they hold.

    Args:
        described: The record as it was written down.
    """
    for name, value in described.get("values", {}).items():
        size = max((len(vector) for vector in vectors(value)), default=0)
        if size > LARGE:
            yield name, size


def find_one_per_record(
    answer: Mapping[str, Any], question: Mapping[str, Any], entered: int = 0
) -> Iterator[tuple[str, str, str]]:
    """Name arrays of an answer that have as many rows as there are records, such as every patient's survival time.

    Args:
        answer: A client's message as it was written down, without its arrays' values.
        question: The message that it answers; arrays that have their shape from there are weights.
        entered: Records that enter the client's network at once, whose outputs an answer may hold in one array.

    Yields:
        Record and name of the array, and the count with its name.
    """
    described, trains = answer.get("records", {}), answer["type"].startswith("train")
    counts = {
        value: f"the same answer counts, {name} = {value}"
        for record in described.values()
        for name, value in record.get("values", {}).items()
        if isinstance(value, int) and value >= FEWEST
    }
    shapes = [
        shape for record in question.get("records", {}).values() for _, shape, _ in record.get("entries", {}).values()
    ]
    for record, contents in described.items():
        entries = contents.get("entries", {})
        is_output = not trains and len(entries) == 1 and entered >= FEWEST
        rows = counts | ({entered: f"records enter the client's network at once, {entered}"} if is_output else {})
        for name, (_, shape, _) in entries.items():
            if not shape or shape in shapes or (trains and len(shape) > 1):
                continue  # an update, some layer of which may be as wide as there are records
            if shape[0] in rows:
                yield record, name, rows[shape[0]]


def find_private(values: Mapping[str, Any], private: Sequence[Private]) -> Iterator[tuple[str, float]]:
    """Name values that hold a private example, or a part of one, with the correlation.

    Args:
        values: Metrics, configuration and arrays of one record by name.
        private: What is behind every upload of which hooks kept something.
    """
    numbers = [float(value) for value in values.values() if isinstance(value, int | float)]
    whole_record = {} if len(numbers) < FEWEST else {"all numbers of the record together": numbers}
    views = [view for batch in private for view in _views(batch)]
    for name, value in {**values, **whole_record}.items():
        strongest = max((_strongest(vector, views) for vector in vectors(value)), default=0.0)
        if strongest:
            yield name, strongest


def vectors(value: Any) -> Iterator[Vector]:
    """Read a value as numbers in every possible way.

    Args:
        value: Tensor, bytes, text or list.
    """
    if isinstance(value, Tensor):
        yield value.detach().double().flatten().numpy()
    elif isinstance(value, Mapping):
        yield from _of_bytes(base64.b64decode(value["bytes"]))
    elif isinstance(value, str):
        if len(value) >= FEWEST:
            try:
                yield from _of_bytes(base64.b64decode(value, validate=True))
            except (binascii.Error, ValueError):
                return
    elif isinstance(value, list) and value:
        if all(isinstance(entry, int | float) for entry in value):
            yield np.asarray(value, dtype=np.float64)
        else:
            for entry in value:
                yield from vectors(entry)


def _of_bytes(content: bytes) -> Iterator[Vector]:
    try:
        with Image.open(io.BytesIO(content)) as picture:
            yield np.asarray(picture.convert("RGB"), dtype=np.float64).transpose(2, 0, 1).ravel()
            return
    except Exception:  # noqa: BLE001, S110 (whatever is no picture)
        pass
    try:
        yield np.load(io.BytesIO(content), allow_pickle=False).astype(np.float64).ravel()
        return
    except Exception:  # noqa: BLE001, S110 (whatever is no array)
        pass
    for kind in (np.uint8, np.float32, np.float64, np.float16):
        if len(content) % np.dtype(kind).itemsize == 0 and len(content) >= FEWEST:
            values = np.frombuffer(content, dtype=kind)
            if np.isfinite(values).all() and float(np.abs(values).max()) < HUGE:
                yield values.astype(np.float64)


def _views(private: Private) -> Iterator[tuple[Vector, bool]]:
    """Yield every example as a vector, in several layouts and sizes, and whether parts of it are looked for."""
    for example in [example for entered in private.entered for example in entered][:EXAMPLES]:
        if example.ndim != 3:
            yield example.double().flatten().numpy(), True
            continue
        for side in (None, 4, 8, 14, 16, 28, 32, 56, 64):
            picture = example.double()
            if side is not None:
                if side >= picture.shape[-1]:
                    continue
                picture = F.adaptive_avg_pool2d(picture[None], side)[0]
            for layout in (picture, picture.permute(1, 2, 0), picture.mean(dim=0)):
                yield layout.flatten().numpy(), side is None


def _strongest(vector: Vector, views: Sequence[tuple[Vector, bool]]) -> float:
    """Find the strongest correlation of a vector with a view, or with a part of either; 0 if none is strong."""
    if not FEWEST <= len(vector) <= MOST or not np.isfinite(vector).all() or np.ptp(vector) == 0:
        return 0.0
    for view, parts in views:
        longer, shorter = (vector, view) if len(vector) >= len(view) else (view, vector)
        if len(shorter) < FEWEST or np.ptp(shorter) == 0:
            continue
        if len(longer) == len(shorter):
            highest, threshold = _correlation(longer, shorter), PARALLEL
        elif parts and len(shorter) >= FEWEST_OF_PART:
            highest, threshold = strongest_window(longer, shorter), PARALLEL_PART
        else:
            continue
        if highest > threshold:
            return highest
    return 0.0


def _correlation(first: Vector, second: Vector) -> float:
    first, second = first - first.mean(), second - second.mean()
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    return float(abs(first @ second) / lengths) if lengths else 0.0


def strongest_window(longer: Vector, shorter: Vector) -> float:
    """Compute the largest correlation of the shorter vector with a window of the longer one.

    Args:
        longer: (n,).
        shorter: (m,), m at most n.
    """
    count = len(shorter)
    centred = shorter - shorter.mean()
    spread = np.linalg.norm(centred)
    longer = longer - longer.mean()
    products = fftconvolve(longer, centred[::-1], mode="valid")
    sums = np.cumsum(np.concatenate([[0.0], longer]))
    squares = np.cumsum(np.concatenate([[0.0], longer**2]))
    total = sums[count:] - sums[:-count]
    energy = squares[count:] - squares[:-count] - total**2 / count
    some = energy > 1e-9 * max(float(squares[-1]), 1e-30)
    return float((np.abs(products[some]) / (np.sqrt(energy[some]) * spread)).max(initial=0.0))


def as_values(arrays: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep arrays without a counterpart of their name and shape in what was sent: they are not simply weights.

    Args:
        arrays: Of the answer.
        sent: To the client.
    """
    return {
        name: tensor
        for name, tensor in arrays.items()
        if tensor.numel() >= FEWEST and (name not in sent or sent[name].shape != tensor.shape)
    }
