"""Sources of randomness for defences: drawn anew from a seed in a benchmark, from the system at a client.

A benchmark must be repeatable, a deployment must not be: who can guess a seed can subtract the noise. torch seeds
its CPU generator with 32 bits, which can be tried one by one, so a client that means to protect anything takes
``SystemRandomness``.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from fedmjp.seeds import torch_generator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNIFORM_BITS = 52  # with them the middle of every interval is a double


class Randomness(ABC):
    """A source of random tensors by name: a tensor's values do not depend on which others were drawn before."""

    @abstractmethod
    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Draw standard normal float32 values on the CPU.

        Args:
            name: Of the tensor.
            shape: Of the tensor.
        """

    @abstractmethod
    def uniform(self, name: str, shape: Sequence[int]) -> Tensor:
        """Draw float32 values on the CPU, uniform in [0, 1).

        Args:
            name: Of the tensor.
            shape: Of the tensor.
        """

    @abstractmethod
    def bits(self, name: str, shape: Sequence[int]) -> Tensor:
        """Draw int64 values on the CPU of 64 independent fair bits each.

        Args:
            name: Of the tensor.
            shape: Of the tensor.
        """

    @abstractmethod
    def generator(self) -> torch.Generator:
        """Make a generator on the CPU, for the order of a shuffle; noise that protects is drawn by name."""

    @abstractmethod
    def of(self, *purpose: str | float) -> Randomness:
        """Derive a source of its own for a purpose.

        Args:
            purpose: Names that tell it from others.
        """


@dataclass(frozen=True)
class SeededRandomness(Randomness):
    """A source that gives the same values for the same seed and name, on every machine."""

    seed: int  # 63 bits
    purpose: tuple[str | float, ...] = ()  # names that tell this source from others of the same seed

    @override
    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        import torch

        return torch.randn(tuple(shape), generator=self.of(name).generator())

    @override
    def uniform(self, name: str, shape: Sequence[int]) -> Tensor:
        import torch

        return torch.rand(tuple(shape), generator=self.of(name).generator())

    @override
    def bits(self, name: str, shape: Sequence[int]) -> Tensor:
        import torch

        values = torch.empty(tuple(shape), dtype=torch.int64)
        return values.random_(torch.iinfo(torch.int64).min, None, generator=self.of(name).generator())

    @override
    def generator(self) -> torch.Generator:
        return torch_generator(self.seed, *self.purpose)

    @override
    def of(self, *purpose: str | float) -> SeededRandomness:
        return SeededRandomness(self.seed, (*self.purpose, *purpose))


class SystemRandomness(Randomness):
    """The operating system's cryptographic source: nothing that an app seeds changes it, nobody can repeat it."""

    @override
    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        import torch
        from scipy import special

        # The quantile of the middle of each interval: neither end, where it is infinite.
        values = special.ndtri(_integers(shape) * 2.0**-UNIFORM_BITS + 2.0 ** -(UNIFORM_BITS + 1))
        return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape))

    @override
    def uniform(self, name: str, shape: Sequence[int]) -> Tensor:
        import torch

        # With 24 bits, so that no value rounds to 1.
        values = (_integers(shape) >> np.uint64(UNIFORM_BITS - 24)) * 2.0**-24
        return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape))

    @override
    def bits(self, name: str, shape: Sequence[int]) -> Tensor:
        import torch
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        # AES in counter mode under a key of the system's: three times as fast as the system itself.
        stream = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor()
        values = np.frombuffer(bytearray(stream.update(bytes(8 * math.prod(shape)))), dtype=np.int64)
        return torch.from_numpy(values).reshape(tuple(shape))

    @override
    def generator(self) -> torch.Generator:
        import torch

        return torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "big"))

    @override
    def of(self, *purpose: str | float) -> SystemRandomness:
        return self  # no two of its values belong together


def _integers(shape: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64) >> np.uint64(64 - UNIFORM_BITS)
