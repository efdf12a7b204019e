"""Whether the last layer is one that fishes: odd biases, zero or equal rows, probabilities of exactly zero or one."""

import math

import torch
from torch import Tensor

from fedmjp.clients.checks.base import Finding, Incoming, derive_limit, make_finding, skip_finding
from fedmjp.clients.checks.trace import Trace

BIAS = "head bias"
ROWS = "head rows"
CERTAIN = "certain pictures"
ALIKE = 1e-4  # distance of features along a row
EQUAL = 1e-3  # distance of rows, relative to their length, that are equal
FIRST, FACTOR, MOST = 10.0, 2.0, 1000.0


def check_head(incoming: Incoming, trace: Trace) -> list[Finding]:
    """Examine the linear layer that gives the logits, with weight w and bias b.

    Args:
        incoming: The model and its history.
        trace: Of the pictures through the model.
    """
    certain = trace.exact / len(trace.losses)
    findings = [make_finding(CERTAIN, certain, 0.0, "pictures with a class of probability zero, or a wrong one of one")]
    if trace.head is None:
        return [*findings, *(skip_finding(name, "no linear layer gives the logits") for name in (BIAS, ROWS))]
    bias: Tensor | None = trace.head.bias
    weight, logits = trace.head.weight.detach().double(), trace.logits.double()
    rows = 1.0 if _are_alike(logits, weight) else _odd_rows(weight)
    findings.append(
        make_finding(ROWS, rows, 0.0, "rows of the last layer that are zero, equal to others or of one feature")
    )
    if bias is None:
        return [*findings, skip_finding(BIAS, "the last layer has no bias")]
    outlier = _outlier(bias.detach().double(), trace.logits.double())
    limit = derive_limit(incoming.history.get(BIAS, ()), first=FIRST, factor=FACTOR, most=MOST)
    return [*findings, make_finding(BIAS, outlier, limit, "how far out a bias of the last layer is", {BIAS: outlier})]


def _outlier(bias: Tensor, logits: Tensor) -> float:
    largest = float((bias - bias.median()).abs().max())
    usual = max(_spread(bias), _spread(logits - bias))
    if not largest:
        return 0.0
    return largest / usual if usual else math.inf


def _spread(values: Tensor) -> float:
    return float((values - values.median()).abs().median())


def _are_alike(logits: Tensor, weight: Tensor) -> bool:
    """Tell whether several pictures all have the same features, along most rows."""
    distances = (logits.amax(dim=0) - logits.amin(dim=0)) / weight.norm(dim=1)
    return len(logits) > 1 and float(distances.nan_to_num(nan=math.inf).median()) < ALIKE


def _odd_rows(weight: Tensor) -> float:
    lengths = weight.norm(dim=1)
    distances = torch.cdist(weight, weight).fill_diagonal_(math.inf)
    equal = (distances <= EQUAL * lengths[:, None]).any(dim=1)
    return float((equal | (lengths == 0)).double().mean())
