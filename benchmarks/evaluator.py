"""The only place where a private picture and its reconstruction meet."""

import torch
from torch import Tensor

from fedmjp.errors import RecordError
from fedmjp.metrics import metric
from fedmjp.metrics.protocol import Protocol, represent
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction
from fedmjp.settings import Setting


def score(
    reconstruction: Reconstruction,
    private: PrivateBatch,
    setting: Setting,
    *,
    metrics: tuple[str, ...],
    protocol: Protocol,
) -> dict[str, Tensor | None]:
    """Score a reconstruction in one setting.

    Args:
        reconstruction: What the attack made of the upload.
        private: What the client had.
        setting: Says which version of the picture is the reference.
        metrics: Names.
        protocol: Float or 8-bit.

    Returns:
        Metric name to (batch,) values; None where the machine lacks what the metric needs.

    Raises:
        RecordError: If the upload was not computed from the version that the setting asks for, or
            a metric gives NaN or infinity.
    """
    if private.gradient_of is not setting.gradient_of:
        raise RecordError(f"setting {setting} attacks the gradient of the {setting.gradient_of} picture")
    recovered = represent(reconstruction.images, protocol)
    reference = represent(private.version(setting.compared_with), protocol)
    return {name: _values(name, recovered, reference) for name in metrics}


def _values(name: str, recovered: Tensor, reference: Tensor) -> Tensor | None:
    if metric(name).missing():
        return None
    values = metric(name).function(recovered, reference)
    if not torch.isfinite(values).all():
        raise RecordError(f"metric {name} gave {values.tolist()}")
    return values
