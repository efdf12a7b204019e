"""The only place where private pictures and what an attack discloses of them meet."""

import torch
from torch import Tensor

from fedmjp.benchmarks.running.gallery import Gallery
from fedmjp.errors import RecordError
from fedmjp.metrics import DISCLOSED, metric
from fedmjp.metrics.pictures import psnr
from fedmjp.metrics.protocol import Protocol, represent
from fedmjp.private import PrivateBatch
from fedmjp.records import Features, Reconstruction
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
    _require_version(private, setting)
    reference = private.version(setting.compared_with)
    # By the version that was attacked, in every setting: a reconstruction belongs to one picture.
    matched = reconstruction.images[match(reconstruction.images, private.version(private.gradient_of))]
    recovered, reference = represent(matched, protocol), represent(reference, protocol)
    values = dict[str, Tensor | None]()
    for name in metrics:
        values[name] = None if metric(name).missing() else metric(name).function(recovered, reference)
    return _finite(values)


def score_features(
    disclosed: Features, private: PrivateBatch, setting: Setting, gallery: Gallery | None
) -> dict[str, Tensor | None]:
    """Score labels, and features if there are any, in one setting, which says which gallery pictures are looked up in.

    Each private picture is given one of the features, so that the sum of squared distances from those of what went
    into the network is least. Labels are held against labels as multisets.

    Args:
        disclosed: By an attack.
        private: The pictures behind the upload.
        setting: What went into the network, and whether the gallery holds pictures or shuffled ones.
        gallery: All pictures of the experiment before the network that was sent; not needed for labels alone.

    Returns:
        Metric name to (batch,) values in the order of the private pictures; None for membership where every picture is
        behind the upload.

    Raises:
        RecordError: As of ``score``; if features are to be scored without a gallery, or a picture is not in it.
    """
    _require_version(private, setting)
    if len(disclosed.labels) != len(private.labels):
        raise RecordError(f"{len(disclosed.labels)} labels for {len(private.labels)} pictures")
    accuracy = metric("label_accuracy").function(disclosed.labels, private.labels)
    values: dict[str, Tensor | None] = {"label_accuracy": accuracy}
    if disclosed.features is None:
        return values
    if gallery is None:
        raise RecordError("features are scored against a gallery of pictures: none was given")
    truth, places = gallery.behind(private), gallery.places(private)
    pictures, crops = gallery.versions[setting.compared_with], gallery.crops
    matched = disclosed.features[match(disclosed.features, truth)]
    values["feature_error"] = metric("feature_error").function(matched, truth, pictures)
    for name in ("rank1", "rank5"):
        values[name] = metric(name).function(matched, pictures, places)
        values[f"{name}_crop"] = metric(f"{name}_crop").function(matched, crops, places)
    outside = len(pictures) > len(places)
    values["membership"] = metric("membership").function(disclosed.features, pictures, places) if outside else None
    return _finite({name: values[name] for name in DISCLOSED})


def _require_version(private: PrivateBatch, setting: Setting) -> None:
    if private.gradient_of is not setting.gradient_of:
        raise RecordError(f"setting {setting} attacks the gradient of the {setting.gradient_of} picture")


def _finite(values: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    for name, scored in values.items():
        if scored is not None and not torch.isfinite(scored).all():
            raise RecordError(f"metric {name} gave {scored.tolist()}")
    return values


def score_of_colour(private: PrivateBatch) -> Tensor:
    """What the best picture of one colour scores, the mean colour of each clean picture.

    Returns:
        (batch,) PSNR in dB, high for flat pictures.
    """
    return psnr(private.clean.mean(dim=(2, 3), keepdim=True).expand_as(private.clean), private.clean)


def match(images: Tensor, reference: Tensor) -> Tensor:
    """Which of the images, or features, is taken for each reference: one to one, least squared error in sum.

    Args:
        images: (batch, ...).
        reference: The same shape.

    Returns:
        (batch,) int64 indices into ``images``.

    Raises:
        RecordError: If the shapes differ.
    """
    if images.shape != reference.shape:
        raise RecordError(f"reconstruction of shape {tuple(images.shape)} for pictures of {tuple(reference.shape)}")
    if len(images) == 1:
        return torch.zeros(1, dtype=torch.int64)
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 (takes a quarter of a second to import)

    distances = torch.cdist(
        reference.flatten(1).double(),
        images.flatten(1).double(),
        compute_mode="donot_use_mm_for_euclid_dist",  # which cancels where pictures are nearly equal
    ).square()
    _, order = linear_sum_assignment(distances.numpy())
    return torch.from_numpy(order)
