"""Scores of a disclosure: the only module where private pictures and what an attack discloses of them meet."""

from dataclasses import replace

import torch
from torch import Tensor

from fedmjp.errors import RecordError
from fedmjp.metrics import COLOUR, DISCLOSED, metric
from fedmjp.metrics.gallery import Gallery
from fedmjp.metrics.pictures import psnr
from fedmjp.private import PrivateBatch
from fedmjp.records import Disclosure, Features, Reconstruction
from fedmjp.settings import Protocol, Setting


def score_disclosure(
    disclosed: Disclosure,
    private: PrivateBatch,
    setting: Setting,
    *,
    metrics: tuple[str, ...],
    protocol: Protocol,
    gallery: Gallery | None = None,
) -> dict[str, Tensor | None]:
    """Score what an attack disclosed by the metrics of its kind, as one row of results holds them.

    Args:
        disclosed: A reconstruction, or labels and features; one of a single picture counts for each private picture.
        private: The pictures behind the upload.
        setting: Which version of the pictures the upload is of, and which one is the reference.
        metrics: Names of the metrics of a reconstruction; labels and features are scored by all of theirs.
        protocol: How pictures are represented.
        gallery: All pictures of the experiment as the network sees them; needed for features alone.

    Returns:
        Metric name to (batch,) values in the order of the private pictures, None where the machine lacks what a metric
        needs. A reconstruction also has ``COLOUR``.

    Raises:
        RecordError: If the disclosure does not fit the pictures, or a metric gives NaN or infinity.
    """
    disclosed = expand_disclosure(disclosed, len(private.pictures))
    if isinstance(disclosed, Features):
        return score_features(disclosed, private, setting, gallery)
    scores = score_pictures(disclosed, private, setting, metrics=metrics, protocol=protocol)
    return scores | {COLOUR: score_of_colour(private)}


def expand_disclosure(disclosed: Disclosure, pictures: int) -> Disclosure:
    """Repeat the disclosure of one picture for each private picture, since a server does not know who is behind it.

    Args:
        disclosed: Of one picture, or of as many as there are.
        pictures: Number of private pictures.
    """
    if isinstance(disclosed, Reconstruction):
        if len(disclosed.images) > 1:
            return disclosed
        visible = None if disclosed.visible is None else disclosed.visible.expand(pictures, -1, -1)
        return replace(disclosed, images=disclosed.images.expand(pictures, -1, -1, -1), visible=visible)
    if len(disclosed.labels) > 1:
        return disclosed
    features = None if disclosed.features is None else disclosed.features.expand(pictures, -1)
    return replace(disclosed, labels=disclosed.labels.expand(pictures), features=features)


def score_pictures(
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

    Args:
        reconstruction: As many pictures as there are private ones.
        private: The pictures behind the upload.
        setting: Which version of the pictures the upload is of, and which one is the reference.
        metrics: Names of the metrics.
        protocol: How pictures are represented.

    Returns:
        Metric name to (batch,) values in the order of the private pictures; None where the machine lacks what the
        metric needs.

    Raises:
        RecordError: If the upload was not computed from the version that the setting asks for, the number of pictures
            is another, or a metric gives NaN or infinity.
    """
    _require_version(private, setting)
    reference = private.version(setting.compared_with)
    # By the version that was attacked, in every setting: a reconstruction belongs to one picture.
    matched = reconstruction.images[match(reconstruction.images, private.version(private.gradient_of))]
    if protocol == "8bit":
        matched, reference = to_levels(matched), to_levels(reference)
    values = dict[str, Tensor | None]()
    for name in metrics:
        values[name] = None if metric(name).missing() else metric(name).function(matched, reference)
    return _finite(values)


def to_levels(images: Tensor) -> Tensor:
    """Round images to the 256 levels of a PNG, as the paper's scripts saw them: the protocol "8bit".

    Args:
        images: (batch, 3, height, width) in [0, 1].

    Example:
        >>> import torch
        >>> to_levels(torch.tensor([0.5]))
        tensor([0.5020])
    """
    return (images * 255).round() / 255


def score_visible(reconstruction: Reconstruction, private: PrivateBatch, setting: Setting) -> dict[str, Tensor | None]:
    """Compute the PSNR over the pixels that the upload holds something of; empty where it does of all.

    Args:
        reconstruction: As many pictures as there are private ones.
        private: The pictures behind the upload.
        setting: Which version of the pictures is the reference.
    """
    if reconstruction.visible is None:
        return {}
    order = match(reconstruction.images, private.version(private.gradient_of))
    visible = reconstruction.visible[order][:, None].expand(-1, 3, -1, -1)
    reference = private.version(setting.compared_with)
    matched = torch.where(visible, reconstruction.images[order], reference)
    share = visible.flatten(1).double().mean(1)
    return {"psnr_visible": psnr(matched, reference) + 10 * share.log10()}


def score_features(
    disclosed: Features, private: PrivateBatch, setting: Setting, gallery: Gallery | None
) -> dict[str, Tensor | None]:
    """Score labels, and features if there are any, in one setting, which says which gallery pictures are looked up in.

    Each private picture is given one of the features, so that the sum of squared distances from those of what went
    into the network is least. Labels are compared with labels as multisets.

    Args:
        disclosed: By an attack.
        private: The pictures behind the upload.
        setting: What went into the network, and whether the gallery holds pictures or shuffled ones.
        gallery: All pictures of the experiment as the network that was sent sees them; not needed for labels alone.

    Returns:
        Metric name to (batch,) values in the order of the private pictures; None for membership where every picture is
        behind the upload.

    Raises:
        RecordError: As of ``score_pictures``; if features are to be scored without a gallery, or a picture is not in
            it.
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


def score_of_colour(private: PrivateBatch) -> Tensor:
    """Score the best picture of one colour, the mean colour of each clean picture.

    Args:
        private: With clean pictures (batch, 3, size, size).

    Returns:
        (batch,) PSNR in dB, high for flat pictures.
    """
    return psnr(private.clean.mean(dim=(2, 3), keepdim=True).expand_as(private.clean), private.clean)


def match(images: Tensor, reference: Tensor) -> Tensor:
    """Assign an image, or feature, to each reference: one to one, with the least sum of squared errors.

    Args:
        images: (batch, ...).
        reference: The same shape.

    Returns:
        (batch,) int64 indices into ``images``.

    Raises:
        RecordError: If the shapes differ.

    Example:
        >>> import torch
        >>> match(torch.tensor([[0.9], [0.1]]), torch.tensor([[0.0], [1.0]]))
        tensor([1, 0])
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


def _require_version(private: PrivateBatch, setting: Setting) -> None:
    if private.gradient_of is not setting.gradient_of:
        raise RecordError(f"setting {setting} attacks the gradient of the {setting.gradient_of} picture")


def _finite(values: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    for name, scores in values.items():
        if scores is not None and not torch.isfinite(scores).all():
            raise RecordError(f"metric {name} gave {scores.tolist()}")
    return values
