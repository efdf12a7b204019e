"""Whether the last layer is one that fishes: odd biases, zero or equal rows, probabilities of exactly zero or one."""

import math

import torch
from torch import Tensor

from fedmjp.clients.checks.base import Finding, Incoming, judged, limit_from, not_run
from fedmjp.clients.checks.trace import Trace

BIAS = "head bias"
ROWS = "head rows"
CERTAIN = "certain pictures"
ALIKE = 1e-4  # distance of features along a row
EQUAL = 1e-3  # distance of rows, relative to their length, that are equal
FIRST, FACTOR, MOST = 10.0, 2.0, 1000.0


def check_head(incoming: Incoming, trace: Trace) -> list[Finding]:
    """Look at the linear layer that gives the logits, with weight w and bias b.

    - *head bias*: max |b - median b| / max(MAD b, MAD w f), with MAD x = median |x - median x| and w f of all pictures
      and classes: how far a class is preferred whatever is shown. By biases alone, those of the classes that clients
      have would be odd wherever they have few;
    - *head rows*: the share of rows that are zero, or equal to another one; all, where features of different pictures
      are alike to ``ALIKE``: what clients upload then tells rows of the layer (``class_fishing`` by AdamW);
    - *certain pictures*: the share of the client's pictures with a class of probability exactly 0 or 1, in float64.
    """
    certain = trace.exact / len(trace.losses)
    findings = [judged(CERTAIN, certain, 0.0, "pictures with a class of probability exactly zero or one")]
    if trace.head is None:
        return [*findings, *(not_run(name, "no linear layer gives the logits") for name in (BIAS, ROWS))]
    bias: Tensor | None = trace.head.bias
    weight, logits = trace.head.weight.detach().double(), trace.logits.double()
    rows = 1.0 if _are_alike(logits, weight) else _odd_rows(weight)
    findings.append(judged(ROWS, rows, 0.0, "rows of the last layer that are zero, equal to others or of one feature"))
    if bias is None:
        return [*findings, not_run(BIAS, "the last layer has no bias")]
    outlier = _outlier(bias.detach().double(), trace.logits.double())
    limit = limit_from(incoming.history.get(BIAS, ()), first=FIRST, factor=FACTOR, most=MOST)
    return [*findings, judged(BIAS, outlier, limit, "how far out a bias of the last layer is", {BIAS: outlier})]


def _outlier(bias: Tensor, logits: Tensor) -> float:
    largest = float((bias - bias.median()).abs().max())
    usual = max(_spread(bias), _spread(logits - bias))
    if not largest:
        return 0.0
    return largest / usual if usual else math.inf


def _spread(values: Tensor) -> float:
    return float((values - values.median()).abs().median())


def _are_alike(logits: Tensor, weight: Tensor) -> bool:
    """Whether all pictures, if there are several, have the same features, along most rows."""
    apart = (logits.amax(dim=0) - logits.amin(dim=0)) / weight.norm(dim=1)
    return len(logits) > 1 and float(apart.nan_to_num(nan=math.inf).median()) < ALIKE


def _odd_rows(weight: Tensor) -> float:
    lengths = weight.norm(dim=1)
    distances = torch.cdist(weight, weight).fill_diagonal_(math.inf)
    equal = (distances <= EQUAL * lengths[:, None]).any(dim=1)
    return float((equal | (lengths == 0)).double().mean())
