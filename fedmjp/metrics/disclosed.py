"""Scores of labels and features that an attack tells, against those of the private pictures and of others.

A *feature* is what the last layer reads of a picture, a vector. Features are compared by Euclidean distance, computed
without the square's cancellation. A *gallery* holds the features of N pictures; ``places`` says which of them are the
private ones. All functions compute in float64 and return one value per private picture.
"""

from collections import Counter
from functools import partial

import torch
from torch import Tensor

from fedmjp.errors import RecordError

FALSE_POSITIVES = 1e-3  # share of pictures outside of the upload that may be taken for members
SMALLEST = 1e-12  # distance that a relative error is of at least: of equal pictures there is none


def label_accuracy(disclosed: Tensor, labels: Tensor) -> Tensor:
    r"""Score 1 for each private picture whose label was told; each label told counts once.

    The mean over a batch of B is the size of the intersection of multisets, over B:

    .. math:: \frac{1}{B} \sum_c \min(\hat{n}_c, n_c)

    with n_c pictures of class c, of which \hat{n}_c were told. Of pictures of one class the first are the right ones.

    Args:
        disclosed: (batch,) int64, in any order.
        labels: (batch,) int64, of the private pictures.

    Returns:
        (batch,) float64, 1 or 0.

    Example:
        >>> import torch
        >>> label_accuracy(torch.tensor([7, 3, 3]), torch.tensor([3, 5, 3]))
        tensor([1., 0., 1.], dtype=torch.float64)
    """
    remaining = Counter(disclosed.tolist())
    hits = []
    for label in labels.tolist():
        hits.append(float(remaining[label] > 0))
        remaining[label] -= 1
    return torch.tensor(hits, dtype=torch.float64)


def feature_error(disclosed: Tensor, features: Tensor, gallery: Tensor) -> Tensor:
    r"""Measure the error of each feature told, relative to the private feature's distance from its batch's mean.

    .. math:: \frac{\lVert \hat{f}_b - f_b \rVert}{\lVert f_b - \bar{f} \rVert}

    where \bar{f} is the mean over the batch, or, where all of the batch have one feature, over the gallery. The mean
    itself scores 1: what all pictures share counts for nothing, and where all of the gallery share a feature, all do.

    Args:
        disclosed: (batch, dim), each in the place of the private picture that it is taken for.
        features: (batch, dim), of the private pictures.
        gallery: (pictures, dim).

    Returns:
        (batch,) float64 from 0, which is exact.

    Example:
        >>> import torch
        >>> features = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> feature_error(torch.tensor([[1.0, 0.1], [0.0, 0.0]]), features, features)
        tensor([0.1000, 1.0000], dtype=torch.float64)
    """
    disclosed, features = disclosed.double(), features.double()
    in_batch, in_gallery = (
        torch.linalg.vector_norm(features - centre, dim=1)
        for centre in (features.mean(dim=0), gallery.double().mean(dim=0))
    )
    scale = torch.where(in_batch > SMALLEST, in_batch, in_gallery)
    error = torch.linalg.vector_norm(disclosed - features, dim=1) / scale.clamp_min(SMALLEST)
    return torch.where(scale > SMALLEST, error, 1.0)


def found_among(disclosed: Tensor, gallery: Tensor, places: Tensor, most: int) -> Tensor:
    r"""Score 1 where the private picture is among the ``most`` pictures of a gallery nearest to its feature.

    Its rank is the number of pictures that are as near or nearer, itself among them:

    .. math:: r_b = \#\{j : \lVert \hat{f}_b - g_j \rVert \le \lVert \hat{f}_b - g_{p(b)} \rVert\}

    A tie names nobody: where a network gives all pictures one feature, none is found. By chance ``most`` of N are.

    Args:
        disclosed: (batch, dim), each in the place of the private picture that it is taken for.
        gallery: (pictures, dim).
        places: (batch,) int64, of the private pictures in the gallery.
        most: The largest rank that counts.

    Returns:
        (batch,) float64, 1 or 0.

    Example:
        >>> import torch
        >>> gallery = torch.tensor([[0.0], [1.0], [2.0]])
        >>> found_among(torch.tensor([[0.9], [1.2]]), gallery, torch.tensor([1, 0]), 1)
        tensor([1., 0.], dtype=torch.float64)
    """
    distances = _distances(disclosed, gallery)
    of_right = distances.gather(1, places[:, None])
    rank = (distances <= of_right).sum(dim=1)
    return (rank <= most).double()


rank1, rank5 = partial(found_among, most=1), partial(found_among, most=5)


def membership(disclosed: Tensor, gallery: Tensor, places: Tensor) -> Tensor:
    r"""Score 1 for each picture that is recognised as a member, at a false positive rate of at most 0.001.

    A picture of the gallery is taken for a member if its feature is nearer than a threshold to any feature that was
    told: \min_b \lVert \hat{f}_b - g_j \rVert < t. With M pictures outside of the upload, t is the one of their
    distances that 0.001 M of them, rounded down, are smaller than. With fewer than 1,000 that is the smallest: a member
    has to be nearer than every picture outside, and the rate that was allowed is 0.

    Args:
        disclosed: (batch, dim), in any order.
        gallery: (pictures, dim).
        places: (batch,) int64, of the private pictures in the gallery.

    Returns:
        (batch,) float64, 1 or 0, whose mean is the true positive rate.

    Raises:
        RecordError: If no picture of the gallery is outside of the upload.

    Example:
        >>> import torch
        >>> gallery = torch.tensor([[0.0], [1.0], [2.0]])
        >>> membership(torch.tensor([[0.1], [2.3]]), gallery, torch.tensor([0, 2]))
        tensor([1., 1.], dtype=torch.float64)
    """
    nearest = _distances(disclosed, gallery).amin(dim=0)
    outside = torch.ones(len(gallery), dtype=torch.bool)
    outside[places] = False
    if not outside.any():
        raise RecordError("membership: every picture of the gallery is in the upload, nothing tells members apart")
    outside_distances = nearest[outside].sort().values
    threshold = outside_distances[int(FALSE_POSITIVES * len(outside_distances))]
    return (nearest[places] < threshold).double()


def _distances(disclosed: Tensor, gallery: Tensor) -> Tensor:
    """Compute Euclidean distances, (batch, pictures) float64."""
    return torch.cdist(disclosed.double(), gallery.double(), compute_mode="donot_use_mm_for_euclid_dist")
