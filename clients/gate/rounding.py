"""Rounding of what leaves: the digits below an update's own size hold no more than an app wants them to."""

from typing import Any, Literal

import numpy as np

from fedmjp.clients.gate.arrays import Numbers, flush_tiny

Rounding = Literal["bfloat16", "grid"]
STEPS = 32  # of the grid in the root mean square of a change; rounding then adds a hundredth of it as noise


def round_change(numbers: Numbers, base: Numbers | None, rounding: Rounding) -> Numbers:
    """Round the change of an array.

    Args:
        numbers: Real numbers that would leave.
        base: That came in, of the same shape and type; None where the numbers are the change.
        rounding: To the eight significant bits of bfloat16, or to a grid whose step is the power of two at or below
            a 32nd of the change's root mean square.

    Returns:
        The rounded numbers, of the same type.
    """
    with np.errstate(all="ignore"):
        wide = np.float64 if numbers.dtype == np.float64 else np.float32
        change = numbers.astype(wide) if base is None else numbers.astype(wide) - base.astype(wide)
        rounded = _to_bfloat16(change) if rounding == "bfloat16" else _to_grid(change)
        total: Numbers = (rounded if base is None else base.astype(wide) + rounded).astype(numbers.dtype)
    return flush_tiny(total)


def _to_grid(change: Numbers) -> Numbers:
    size = float(np.sqrt(np.mean(np.square(change, dtype=np.float64)))) if change.size else 0.0
    if not size or not np.isfinite(size):
        return change
    step = 2.0 ** np.floor(np.log2(size / STEPS))
    steps: Numbers = np.rint(change / change.dtype.type(step)) * change.dtype.type(step)
    return steps


def _to_bfloat16(change: Numbers) -> Numbers:
    """Keep the upper 16 bits of float32, rounded to the nearest, ties to even."""
    bits: Any = change.astype(np.float32).reshape(-1).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    rounded: Numbers = upper.view(np.float32).reshape(change.shape)
    return np.where(np.isfinite(change), rounded, change).astype(change.dtype)
