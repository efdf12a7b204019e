"""Normal noise, rounded to whole numbers, without an error of floating point.

Each value is ``round(s Z)`` of an ideal standard normal Z, by inversion of the tail Q: a fair bit is the sign, and |Z|
is where Q(|Z|) = p, for a p that is uniform in [0, 1/2). The first 63 bits of 2p place s |Z| in an interval that double
precision computes, with room for its errors. Where a boundary between two whole numbers lies in the interval, further
bits of p are drawn, and p is compared with the tail at the boundary in as many digits as it takes. So every whole
number has its exact probability, whatever the floats in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedmjp.errors import DefenceError
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor

FIRST_BITS = 63
MORE_BITS = 192  # drawn at once where the first do not tell
EXTENSIONS = 4
ERROR = 2.0**-46  # of |Z| and of 1, in double precision
CERTAIN = 2.0**-16  # a tail above it is known to 2**-48 of itself by its first bits
LARGEST = 2.0**36  # deviation up to which most values are told by their first bits
CHUNK = 2**18  # values at a time, to stay within a processor's cache


def rounded_normal(randomness: Randomness, name: str, shape: tuple[int, ...], deviation: float) -> Tensor:
    """Draw whole numbers as an ideal normal variable gives them when it is rounded.

    Args:
        randomness: Source of the bits.
        name: Of the tensor.
        shape: Of the tensor.
        deviation: Standard deviation of the variable before it is rounded, above 0, at most 2**36.

    Returns:
        Of type int64 (*shape), on the CPU.

    Raises:
        DefenceError: If the source gives nothing but equal bits.

    Example:
        >>> from fedmjp.randomness import SeededRandomness
        >>> rounded_normal(SeededRandomness(seed=0), "w", (5,), deviation=10.0)
        tensor([  1,  14, -12,  -5,  10])
    """
    import torch

    drawn = randomness.bits(name, shape)
    for number, part in enumerate(pieces(drawn)):
        signs = 1 - 2 * (part & 1)
        heads = (part >> 1).bitwise_and_(2**FIRST_BITS - 1)  # of 2p
        tails = heads.double().add_(0.5).mul_(2.0 ** -(FIRST_BITS + 1))
        normal = torch.special.ndtri(tails).neg_()
        scaled = normal * deviation
        rounded = scaled.round()
        room = normal.add_(1).mul_(deviation * ERROR)
        rare = (tails < CERTAIN).nonzero()
        room[rare] += deviation * _width(tails[rare])
        for place in (scaled.sub_(rounded).abs_().add_(room) >= 0.5).nonzero()[:, 0].tolist():
            further = randomness.of(name, "further", number * CHUNK + place)
            rounded[place] = _resolve(int(heads[place]), further, deviation)
        part.copy_(signs.mul_(rounded.to(torch.int64)))
    return drawn


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """View a tensor in pieces that stay within a processor's cache.

    Args:
        tensor: Of any shape; pieces are written to only where it is contiguous.
    """
    import torch

    return torch.split(tensor.reshape(-1), CHUNK)


def _width(tails: Tensor) -> Tensor:
    """Bound how far |Z| can be from that of its interval's middle, by the density at the outer end."""
    import torch

    outer = -torch.special.ndtri(tails / 2)
    return torch.exp(outer.square() / 2).mul_(2.0 ** -(FIRST_BITS + 1) * math.sqrt(2 * math.pi))


def _resolve(head: int, randomness: Randomness, deviation: float) -> int:
    """Find the whole number that s |Z| rounds to, with as many further bits as that takes."""
    import mpmath

    for extension in range(1, EXTENSIONS + 1):
        width = FIRST_BITS + 1 + extension * MORE_BITS  # p lies in [head, head + 1) / 2**width
        for word in randomness.bits(str(extension), (MORE_BITS // 64,)).tolist():
            head = (head << 64) | (word % 2**64)
        with mpmath.workprec(width + 64):
            scale = mpmath.sqrt(2) * deviation
            low, high = mpmath.ldexp(head, -width), mpmath.ldexp(head + 1, -width)
            nearest = int(mpmath.nint(scale * mpmath.erfinv(1 - low - high)))
            outer, inner = (mpmath.erfc((nearest + side) / scale) / 2 for side in (0.5, -0.5))
            if low >= outer and (nearest == 0 or high <= inner):
                return nearest
    raise DefenceError(f"the source of randomness gave {EXTENSIONS * MORE_BITS} bits that decide nothing: it is broken")
