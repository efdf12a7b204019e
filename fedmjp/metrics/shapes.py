"""The check that every metric starts with."""

from torch import Tensor

from fedmjp.errors import RecordError


def as_pair(reconstruction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both batches in float64; RecordError if they differ in shape or are not (batch, 3, height, width)."""
    if reconstruction.shape != target.shape or reconstruction.ndim != 4 or reconstruction.shape[1] != 3:
        raise RecordError(
            "reconstruction and target must both be (batch, 3, height, width), "
            f"got {tuple(reconstruction.shape)} and {tuple(target.shape)}"
        )
    return reconstruction.double(), target.double()
