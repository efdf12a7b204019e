"""Arrays of Flower messages, decoded strictly and written in one canonical form."""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
from flwr.app import Array
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedmjp.clients.gate.reasons import Reason, RefusedError

Numbers = NDArray[Any]
STYPE = "numpy.ndarray"
KINDS = "biuf"  # truth values, whole and real numbers
MOST_DIMENSIONS = 32
MOST_BYTES = 8  # of a number
HALF = 16  # bits
HEADERS: dict[tuple[int, int], Callable[[BytesIO], tuple[tuple[int, ...], bool, np.dtype[Any]]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


@dataclass(frozen=True)
class ArrayLayout:
    """Shape and type of an array, and where its numbers begin in its bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    offset: int
    declared: bool  # whether Flower's record repeats shape and type; that of a NumPyClient does not

    @property
    def is_bytes(self) -> bool:
        """Tell whether the array may be a model that an app has serialised itself."""
        return self.dtype == np.uint8 and len(self.shape) == 1


def read_layout(array: Array) -> ArrayLayout:
    """Read the layout of an array, whose bytes must be as many as it says.

    Args:
        array: Of a message.

    Raises:
        RefusedError: If it does not decode, holds anything else than numbers, or says untrue things of itself.
    """
    buffer = BytesIO(array.data)
    try:
        shape, fortran, dtype = HEADERS[npy.read_magic(buffer)](buffer)
    except Exception:  # noqa: BLE001 (NumPy parses the header as a Python literal, which fails in many ways)
        raise RefusedError(Reason.UNREADABLE) from None
    layout = ArrayLayout(shape, dtype, fortran, buffer.tell(), declared=bool(array.dtype))
    sound = (
        array.stype == STYPE
        and dtype.kind in KINDS
        and dtype.itemsize <= MOST_BYTES
        and len(shape) <= MOST_DIMENSIONS
        and all(length >= 0 for length in shape)
        and prod(shape) * dtype.itemsize == len(array.data) - layout.offset
        and (array.dtype, tuple(array.shape)) in (("", ()), (str(dtype), shape))
    )
    if not sound:
        raise RefusedError(Reason.UNREADABLE)
    return layout


def decode_numbers(array: Array, layout: ArrayLayout) -> Numbers:
    """Return the numbers of an array, read-only.

    Args:
        array: Of a message.
        layout: As ``read_layout`` returned it.
    """
    flat: Numbers = np.frombuffer(array.data, layout.dtype, offset=layout.offset)
    return flat.reshape(layout.shape, order="F" if layout.fortran else "C")


def cast_numbers(numbers: Numbers, dtype: np.dtype[Any]) -> Numbers:
    """Return numbers in the type that came in, each of them in one form: one zero, one NaN, no subnormal numbers.

    Args:
        numbers: As decoded.
        dtype: That came in.

    Raises:
        RefusedError: If whole numbers came in, and these are none.
    """
    native = dtype.newbyteorder("=")
    with np.errstate(all="ignore"):
        cast: Numbers = numbers.astype(native, order="C", copy=True)
        if native.kind != "f":
            if numbers.dtype.newbyteorder("=") != native and not np.array_equal(cast.astype(numbers.dtype), numbers):
                raise RefusedError(Reason.LAYOUT)
            # A byte of a truth value may be any; the number of it is one of two.
            return cast.view(np.uint8).astype(bool).astype(native) if native.kind == "b" else cast
        cast[np.isnan(cast)] = np.nan
    return flush_tiny(cast)


def flush_tiny(numbers: Numbers) -> Numbers:
    """Set numbers to zero that are too small for their type's full precision, and the negative zero, in place.

    Args:
        numbers: Real; in float16 only the zeros change, whose small numbers are of use.
    """
    limits = np.finfo(numbers.dtype)
    with np.errstate(all="ignore"):
        numbers[np.abs(numbers) < (limits.smallest_subnormal if limits.bits <= HALF else limits.tiny)] = 0.0
    return numbers


def encode_numbers(numbers: Numbers, *, declared: bool) -> Array:
    """Write numbers as an array of a message, always by the same bytes.

    Args:
        numbers: In C order.
        declared: Whether the record repeats shape and type.
    """
    little = numbers.astype(numbers.dtype.newbyteorder("<"), order="C", copy=False)
    header = BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(little))
    return Array(
        dtype=str(numbers.dtype) if declared else "",
        shape=tuple(numbers.shape) if declared else (),
        stype=STYPE,
        data=header.getvalue() + little.tobytes(),
    )
