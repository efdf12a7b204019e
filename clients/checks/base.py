"""What a check of an incoming model is given, and what it says. Larger values are worse, in every check.

A check's module holds its limits. ``FIRST`` is that of a client's first rounds, ``FACTOR`` how far above all earlier
rounds a value may be, ``MOST`` the highest limit. They were set on federations of seeds 0 and 100, not those published.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor, nn

History = Mapping[str, Sequence[float]]  # by the name of what was measured, a number per round, the last one last
REMEMBERED = 50  # rounds
ENOUGH = 3  # rounds from which on limits are set by what was measured before


@dataclass(frozen=True)
class Incoming:
    """What a client holds when a model arrives. Nothing of it leaves the site.

    Tensors go by the model's own names: whoever gets them as "0", "1", ... names them first.
    """

    model: nn.Module  # with the incoming weights; it is left as it was
    weights: Mapping[str, Tensor]  # W, of this round
    previous: Mapping[str, Tensor] | None  # W', of the last round that this client took part in
    update: Mapping[str, Tensor] | None  # U, the client's own in that round: weights after - before, or - gradient
    images: Tensor  # (pictures, 3, height, width), a few of its own, the same in every round, as training takes them
    labels: Tensor  # (pictures,) classes, or (pictures, classes) targets
    history: History = field(default_factory=dict)  # what ``remember`` made of earlier rounds
    names: frozenset[str] | None = None  # of the tensors that the server is to send; None for all of the model's
    config: Mapping[str, object] = field(default_factory=dict)  # what the server said besides: learning rate, epochs
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # the policy's, for what ``config`` says
    digests: Sequence[str] = ()  # ``weights_digest`` of the model as other sites got it, where they compare


@dataclass(frozen=True)
class Finding:
    """What one check says of an incoming model. ``value`` stays at the site: some are measured on private pictures.

    ``about`` is one sentence that holds no private data. ``ran`` is False where a check could not be run. That is
    suspicious where it failed, and not where the model or the round offers nothing to compare.
    """

    check: str
    value: float
    limit: float
    suspicious: bool
    about: str
    ran: bool = True
    measured: Mapping[str, float] = field(default_factory=dict)  # numbers that later rounds are held against


def make_finding(
    check: str, value: float, limit: float, about: str, measured: Mapping[str, float] = MappingProxyType({})
) -> Finding:
    """Judge a measured value: suspicious beyond its limit, or where it is no number.

    Args:
        check: Name of the check.
        value: What was measured.
        limit: Largest value that is not suspicious.
        about: The finding in words, without private data.
        measured: Further values for the history, by name.
    """
    return Finding(check, value, limit, not value <= limit, about, measured=measured)


def largest_of(values: Iterable[float]) -> float:
    """Return the largest value; infinity if one is no number.

    Args:
        values: Measured values.
    """
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


def skip_finding(check: str, reason: str, *, failed: bool = False) -> Finding:
    """Report a check that was not run.

    Args:
        check: Name of the check.
        reason: Why it was not run.
        failed: Whether it broke down, which is suspicious; otherwise there is nothing to check.
    """
    return Finding(check, math.nan, math.nan, failed, f"not run: {reason}", ran=False)


def remember(history: History, findings: Sequence[Finding]) -> dict[str, list[float]]:
    """Add a round's measured values to the history, unless anything was suspicious.

    Args:
        history: Of earlier rounds.
        findings: Of this round.

    Returns:
        The new history: plain numbers, as JSON takes them.
    """
    extended = {name: list(values) for name, values in history.items()}
    if any(finding.suspicious for finding in findings):
        return extended
    for finding in findings:
        for name, value in finding.measured.items():
            if math.isfinite(value):
                extended[name] = [*extended.get(name, ()), value][-REMEMBERED:]
    return extended


def derive_limit(earlier: Sequence[float], *, first: float, factor: float, most: float = math.inf) -> float:
    """Derive a limit from the client's own history: a multiple of the largest earlier value.

    Args:
        earlier: Values of earlier rounds.
        first: Limit without a history, and the least one.
        factor: The multiple.
        most: The greatest limit.
    """
    if len(earlier) < ENOUGH:
        return first
    return min(most, max(first, factor * max(earlier)))
