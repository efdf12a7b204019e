"""Rounding of what leaves: digits far below an update's own size are the app's to choose, and of no use to a server."""

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
        size = float(np.sqrt(np.mean(np.square(change, dtype=np.float64)))) if change.size else 0.0
        if not size or not np.isfinite(size):
            return numbers
        step = wide.type(2.0 ** np.floor(np.log2(size / STEPS)))
        rounded: Numbers = np.rint(change / step) * step
        total: Numbers = (rounded if base is None else base.astype(wide) + rounded).astype(numbers.dtype)
    return flush_tiny(total)
