"""Random generators that depend on names, never on the order in which things happen.

The mask of a picture is derived from (seed, purpose, picture) alone, so that cells compare picture by picture.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, *purpose: str | float) -> int:
    """Derive a 63-bit seed for a purpose (SHA-256).

    Args:
        seed: That everything is derived from.
        purpose: Names that tell it from others.
    """
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_generator(seed: int, *purpose: str | float) -> torch.Generator:
    """Make torch's generator for a purpose, on the CPU.

    Args:
        seed: That everything is derived from.
        purpose: Names that tell it from others.
    """
    import torch

    return torch.Generator().manual_seed(derive(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | float) -> np.random.Generator:
    """Make NumPy's generator for a purpose.

    Args:
        seed: That everything is derived from.
        purpose: Names that tell it from others.
    """
    return np.random.default_rng(derive(seed, *purpose))


@contextmanager
def scoped_randomness(seed: int) -> Iterator[None]:
    """Seed the global generators for a while, for libraries that take none, such as timm.

    Args:
        seed: Of all generators.
    """
    import torch

    states = random.getstate(), np.random.get_state()  # noqa: NPY002 (what these libraries draw from)
    # CUDA's generators where this process uses them: one that was forked cannot, such as a reader of pictures.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(range(torch.cuda.device_count()) if used else ()):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002, TID251
        torch.manual_seed(seed)  # noqa: TID251
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
