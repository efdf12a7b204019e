"""Which labels a batch has, with multiplicity: what is certain, and what is likeliest."""

import torch
from torch import Tensor

from fedmjp.attacks.class_token.head import Head, HeadGradient

SLACK = 0.02  # of a picture: what is nearer to a whole number may be noise
BEYOND = 0.7  # what a picture shows of itself, on average

Labels = tuple[int, ...]


def shown_counts(head: Head, gradient: HeadGradient) -> Tensor:
    """Return (classes,) that no count of pictures of a class is below, up to noise.

    The slopes of a class c are p_bc, less 1 - s for its n_c pictures and less s / K for all. Their sum over the batch
    is the gradient g_c of the bias, and p_bc is positive. The sum of their sizes is at least |G_c| over the norm that
    all normalised features have in common, and at most g_c + 2 (1 - s) n_c / B: what a sum of such vectors is too long
    for is a label.
    """
    share = gradient.smoothing / len(gradient.bias)
    inner = (gradient.weight - gradient.bias[:, None] * head.shift) / head.scale
    sizes = inner.norm(dim=1) / inner.shape[1] ** 0.5
    by_size = (sizes - gradient.bias) / 2 - share
    counts: Tensor = torch.maximum(by_size, -gradient.bias - share) * gradient.pictures / (1 - gradient.smoothing)
    return counts


def least_counts(lower_bounds: Tensor) -> Tensor:
    """Return (classes,) how many pictures of each class there are at least.

    Args:
        lower_bounds: (classes,) of ``shown_counts``.
    """
    return torch.ceil(lower_bounds - SLACK).clamp_min(0).long()


def likeliest(lower_bounds: Tensor, pictures: int) -> Labels:
    """Return the likeliest labels, sorted: the least counts, then the classes that are shown most beyond.

    Args:
        lower_bounds: (classes,) of ``shown_counts``.
        pictures: How many.
    """
    counts = least_counts(lower_bounds)
    while int(counts.sum()) < pictures:
        counts[int((lower_bounds - BEYOND * counts).argmax())] += 1
    while int(counts.sum()) > pictures:  # under noise more seem to be shown than there are
        counts[int(torch.where(counts > 0, lower_bounds - counts, torch.inf).argmin())] -= 1
    return tuple(torch.repeat_interleave(torch.arange(len(counts)), counts.cpu()).tolist())


def labels_of(targets: Tensor, gradient: HeadGradient) -> tuple[Labels, float]:
    """Read the labels of targets that were solved for, and how far these are from what targets can be.

    A picture's target is its label, and of mixed pictures a share of its label and the rest of its partner's. The share
    is the same in the whole batch, and partners have each other's labels: whole numbers add up.

    Args:
        targets: (pictures, classes).
        gradient: Of the head.
    """
    shares = (targets - gradient.smoothing / targets.shape[1]) / (1 - gradient.smoothing)
    most, second = shares.topk(2, dim=1).values.unbind(1)
    share = most.min() if gradient.mixed else most.new_ones(())
    two_alike = (most - 1).abs().minimum((most - share).abs())  # partners may be of one class
    off = torch.cat([two_alike, most + second - 1 if gradient.mixed else second, -shares.amin(1)])
    sums = shares.sum(0)
    counts = sums.round().clamp_min(0).long()
    if int(counts.sum()) != len(targets):
        return likeliest(sums, len(targets)), float("inf")
    repeated = torch.repeat_interleave(torch.arange(len(counts)), counts.cpu())
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 (takes a quarter of a second to import)

    rows, columns = linear_sum_assignment(-shares[:, repeated].cpu().numpy())
    labels = repeated[columns[rows.argsort()]].tolist()
    return tuple(labels), float(torch.cat([off, sums - counts]).abs().max())
