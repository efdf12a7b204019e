"""The only place where a private picture and its reconstruction meet."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedmjp.errors import RecordError
from fedmjp.metrics import metric
from fedmjp.metrics.pictures import psnr
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
    """Score a reconstruction in one setting, which says which version of the picture is the reference.

    The pictures of a batch are reconstructed in no particular order; each private picture is given one of them, so
    that the sum of squared errors is least.

    Returns:
        Metric name to (batch,) values in the order of the private pictures; None where the machine
        lacks what the metric needs.

    Raises:
        RecordError: If the upload was not computed from the version that the setting asks for, the
            number of pictures is another, or a metric gives NaN or infinity.
    """
    if private.gradient_of is not setting.gradient_of:
        raise RecordError(f"setting {setting} attacks the gradient of the {setting.gradient_of} picture")
    reference = private.version(setting.compared_with)
    # By the version that was attacked, in every setting: a reconstruction belongs to one picture.
    matched = reconstruction.images[match(reconstruction.images, private.version(private.gradient_of))]
    recovered, reference = represent(matched, protocol), represent(reference, protocol)
    values = dict[str, Tensor | None]()
    for name in metrics:
        scored = None if metric(name).missing() else metric(name).function(recovered, reference)
        if scored is not None and not torch.isfinite(scored).all():
            raise RecordError(f"metric {name} gave {scored.tolist()}")
        values[name] = scored
    return values


def score_of_colour(private: PrivateBatch) -> Tensor:
    """What the best picture of one colour scores, the mean colour of each clean picture.

    Returns:
        (batch,) PSNR in dB, high for flat pictures.
    """
    return psnr(private.clean.mean(dim=(2, 3), keepdim=True).expand_as(private.clean), private.clean)


def match(images: Tensor, reference: Tensor) -> Tensor:
    """Which of the images is taken for each reference picture: one to one, least squared error in sum.

    Args:
        images: (batch, 3, height, width).
        reference: The same shape.

    Returns:
        (batch,) int64 indices into ``images``.

    Raises:
        RecordError: If the shapes differ.
    """
    if images.shape != reference.shape:
        raise RecordError(f"reconstruction of shape {tuple(images.shape)} for pictures of {tuple(reference.shape)}")
    distances = torch.cdist(
        reference.flatten(1).double(),
        images.flatten(1).double(),
        compute_mode="donot_use_mm_for_euclid_dist",  # which cancels where pictures are nearly equal
    ).square()
    _, order = linear_sum_assignment(distances.numpy())
    return torch.from_numpy(order)
