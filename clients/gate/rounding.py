"""Rounding of what leaves: digits far below an update's own size are the app's to choose, and of no use to a server."""

import math

import numpy as np

from fedmjp.clients.gate.arrays import Numbers, flush_tiny

STEPS = 32  # of the grid in a change's root mean square, at least; rounding then adds a hundredth of it as noise


def round_change(numbers: Numbers, base: Numbers | None) -> Numbers:
    """Round the change of an array to a grid, whose step is a power of two and a 64th to a 32nd of its size.

    Significant bits, as of bfloat16, close nothing: the lowest bits of a weight are a small change, all of it kept.

    Args:
        numbers: Real numbers that would leave.
        base: That came in, of the same shape and type; None where the numbers are the change.

    Returns:
        The rounded numbers, of the same type.
    """
    with np.errstate(all="ignore"):
        wide = np.promote_types(numbers.dtype, np.float32)
        change: Numbers = numbers.astype(wide) if base is None else numbers.astype(wide) - base.astype(wide)
        largest = float(np.abs(change).max()) if change.size else 0.0
        if not largest or not np.isfinite(largest):
            return numbers
        change /= largest  # whose squares do not overflow
        flat = change.reshape(-1)
        size = largest * math.sqrt(float(np.dot(flat, flat)) / flat.size)
        step = 2.0 ** math.floor(math.log2(size / STEPS))
        change *= largest / step
        np.rint(change, out=change)
        change *= step
        if base is not None:
            change += base
        total: Numbers = change.astype(numbers.dtype, copy=False)
    return flush_tiny(total)
