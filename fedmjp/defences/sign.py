"""Replace entries by their signs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class Sign(TensorDefence):
    """Signs alone: every entry becomes its sign times the tensor's mean magnitude; zeros stay zeros.

    Example:
        >>> import torch
        >>> from fedmjp.defences.base import Client
        >>> from fedmjp.randomness import SeededRandomness
        >>> update = {"weight": torch.tensor([1.0, -3.0])}
        >>> Sign().protect(update, Client("gradient"), randomness=SeededRandomness(seed=0))
        {'weight': tensor([ 2., -2.])}

    References:
        Karimireddy et al., "Error feedback fixes signSGD", ICML 2019, for the scale.
    """

    name = "sign"
    paper = "Bernstein et al., signSGD, ICML 2018; scale as in Karimireddy et al., ICML 2019"
    summary = "signs alone, times each tensor's mean magnitude"
    told = "that only signs leave, with one scale per tensor"
    marks: ClassVar = frozenset({"signs"})
    draws = False

    @override
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        return tensor.sign() * tensor.abs().mean()

    def bits(self, incoming: float) -> float:
        """Compute the bits of an entry that is not zero; zeros come in runs, which cost next to nothing.

        Args:
            incoming: Bits per value before it.
        """
        return min(incoming, 1.0)
