"""Whether hidden units sort tokens or pictures into bins, so that each is alone in one: the mark of imprinting."""

import math

import torch
from torch import Tensor, nn

from fedmjp.clients.checks.base import Finding, Incoming, derive_limit, make_finding, skip_finding
from fedmjp.clients.checks.disaggregation import LEARNED
from fedmjp.clients.checks.parallel import COSINE, may_have_parallel_rows, unit_rows
from fedmjp.clients.checks.trace import Layer, Trace

ALONE = "alone in a unit"
OUTWEIGHS = 100.0  # how much more than all others together, to be alone
FEWEST = 8  # units of a layer
FIRST, FACTOR, MOST = 0.15, 1.5, 0.5
DEVIATIONS = 4.0  # of the binomial distribution, that chance is allowed


def check_bins(incoming: Incoming, trace: Trace) -> list[Finding]:
    """Count the units whose gradient is of a single token, or of a single picture where a layer sees one row of each.

    Args:
        incoming: The model and its history.
        trace: Of the pictures through the model.
    """
    linear = [layer for layer in trace.body if isinstance(layer.module, nn.Linear)]
    layers = [layer for layer in linear if layer.gradients.shape[2] >= FEWEST]
    if not layers or len(trace.losses) < 2:
        return [skip_finding(ALONE, "there is no linear layer before the head, or one picture alone")]
    # Pictures that are learned already have small gradients in every unit, which no server's bins make.
    scale = torch.where(trace.slopes > LEARNED, 1 / trace.slopes, 0.0).to(trace.logits.dtype)
    limits = [max(FIRST, _share_by_chance(layer)) for layer in layers]
    shares = [_share_alone(layer, scale) for layer in layers]
    value, first = max(zip(shares, limits, strict=True), key=lambda pair: pair[0] / pair[1])
    limit = derive_limit(incoming.history.get(ALONE, ()), first=first, factor=FACTOR, most=max(MOST, first))
    return [
        make_finding(ALONE, value, limit, "the share of a layer's units whose gradient is of one token", {ALONE: value})
    ]


def _share_by_chance(layer: Layer) -> float:
    """Bound the share of units that one of n rows alone activates by chance.

    The shares q of rows that activate a unit are taken for sparse, with a density of q^(-1/2) / 2. Then
    n / 2 B(3/2, n) of the units are alone on average.
    """
    rows, units = len(layer.gradients.flatten(0, 1)), layer.gradients.shape[2]
    share = rows / 2 * math.exp(math.lgamma(1.5) + math.lgamma(rows) - math.lgamma(rows + 1.5))
    return share + DEVIATIONS * math.sqrt(share * (1 - share) / units)


def _share_alone(layer: Layer, scale: Tensor) -> float:
    """Compute the share of units that are alone.

    Args:
        layer: The layer.
        scale: Factors of the pictures' gradients (pictures,).
    """
    visible, gradients = layer.inputs.flatten(0, 1), (layer.gradients * scale[:, None, None]).flatten(0, 1)
    lengths = visible.norm(dim=1, keepdim=True)
    shares = [_alone(gradients.abs() * lengths)]
    neighbours = _neighbours(layer.module.weight.detach(), layer.module.bias)
    if neighbours is not None:
        lower, upper = neighbours
        between = (gradients[:, lower] - gradients[:, upper]).abs() * lengths
        shares.append(_alone(between) * len(lower) / gradients.shape[1])
    return max(shares)


def _alone(weights: Tensor) -> float:
    """Compute the share of columns in which one row outweighs all others."""
    largest = weights.amax(dim=0)
    near = weights[:, largest > OUTWEIGHS / 2 * (weights.sum(dim=0) - largest)]
    if not near.shape[1]:
        return 0.0
    two = near.double().topk(2, dim=0).values
    # Rounding of the sum leaves something of nothing: the second largest says it exactly.
    remainder = torch.where(two[1] == 0, two[1], near.double().sum(dim=0) - two[0])
    return float((two[0] > OUTWEIGHS * remainder).sum()) / weights.shape[1]


def _neighbours(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Pair units with parallel rows whose thresholds follow each other.

    Returns:
        Two lists of one length; None if no rows are parallel.
    """
    lengths, directions = weight.norm(dim=1), unit_rows(weight)
    if not may_have_parallel_rows(directions):
        return None
    parallel = (directions @ directions.mT).abs() > COSINE
    leader = parallel.double().argmax(dim=1)  # the first unit that a unit is parallel to
    if bool((leader == torch.arange(len(leader), device=leader.device)).all()):
        return None
    sign = (directions * directions[leader]).sum(dim=1).sign()
    offset = torch.zeros_like(lengths) if bias is None else bias.detach()
    threshold = -sign * offset / lengths.clamp(min=torch.finfo(weight.dtype).tiny)
    order = threshold.argsort(stable=True)
    order = order[leader[order].argsort(stable=True)]
    pairs = leader[order[:-1]] == leader[order[1:]]
    return order[:-1][pairs], order[1:][pairs]
