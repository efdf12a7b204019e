"""Where defences take their randomness from: drawn anew from a seed in a benchmark, from the system at a client.

A benchmark must be repeatable, a deployment must not be: who can guess a seed can subtract the noise. torch seeds
its CPU generator with 32 bits, which can be tried one by one, so a client that means to protect anything takes
``SystemRandomness``.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from torch import Tensor

from fedmjp.seeds import torch_generator

UNIFORM_BITS = 53  # of a double's significand


class Randomness(ABC):
    """Gives random tensors by name: a tensor's values do not depend on which others were drawn before."""

    @abstractmethod
    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Standard normal float32 values on the CPU."""

    @abstractmethod
    def uniform(self, name: str, shape: Sequence[int]) -> Tensor:
        """Float32 values on the CPU, uniform in [0, 1)."""

    @abstractmethod
    def generator(self) -> torch.Generator:
        """For what takes a generator, on the CPU: the order of a shuffle, not noise that protects."""

    @abstractmethod
    def of(self, *purpose: str | float) -> "Randomness":
        """A source of its own for a purpose."""


@dataclass(frozen=True)
class SeededRandomness(Randomness):
    """The same values for the same seed and name, on every machine.

    Attributes:
        seed: 63 bits.
        purpose: Names that tell this source from others of the same seed.
    """

    seed: int
    purpose: tuple[str | float, ...] = ()

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """As of ``Randomness``."""
        return torch.randn(tuple(shape), generator=self._generator(name))

    def uniform(self, name: str, shape: Sequence[int]) -> Tensor:
        """As of ``Randomness``."""
        return torch.rand(tuple(shape), generator=self._generator(name))

    def generator(self) -> torch.Generator:
        """As of ``Randomness``."""
        return torch_generator(self.seed, *self.purpose)

    def of(self, *purpose: str | float) -> "SeededRandomness":
        """As of ``Randomness``."""
        return SeededRandomness(self.seed, (*self.purpose, *purpose))

    def _generator(self, name: str) -> torch.Generator:
        return torch_generator(self.seed, *self.purpose, name)


class SystemRandomness(Randomness):
    """The operating system's cryptographic source: nothing that an app seeds changes it, nobody can repeat it."""

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """As of ``Randomness``: the normal quantile of uniform values."""
        del name
        # The middle of each interval: neither end, where quantiles are infinite.
        values = special.ndtri(self._integers(shape) * 2.0**-UNIFORM_BITS + 2.0 ** -(UNIFORM_BITS + 1))
        return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape))

    def uniform(self, name: str, shape: Sequence[int]) -> Tensor:
        """As of ``Randomness``, with 24 bits, so that no value rounds to 1."""
        del name
        values = (self._integers(shape) >> np.uint64(UNIFORM_BITS - 24)) * 2.0**-24
        return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape))

    def generator(self) -> torch.Generator:
        """As of ``Randomness``."""
        return torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "big"))

    def of(self, *purpose: str | float) -> "SystemRandomness":
        """Itself: no two of its values belong together."""
        del purpose
        return self

    @staticmethod
    def _integers(shape: Sequence[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(64 - UNIFORM_BITS)
