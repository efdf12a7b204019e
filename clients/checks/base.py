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


def judged(
    check: str, value: float, limit: float, about: str, measured: Mapping[str, float] = MappingProxyType({})
) -> Finding:
    """The finding of a check that ran: what is beyond the limit is suspicious, and so is what is no number."""
    return Finding(check, value, limit, not value <= limit, about, measured=measured)


def worst_of(values: Iterable[float]) -> float:
    """The largest value; infinite if one is no number."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


def not_run(check: str, reason: str, *, failed: bool = False) -> Finding:
    """The finding of a check that could not be run: suspicious where it ``failed``, not where nothing is to be run."""
    return Finding(check, math.nan, math.nan, failed, f"not run: {reason}", ran=False)


def remember(history: History, findings: Sequence[Finding]) -> dict[str, list[float]]:
    """The history after a round: with what was measured, unless anything was suspicious; plain numbers, as for JSON."""
    kept = {name: list(values) for name, values in history.items()}
    if any(finding.suspicious for finding in findings):
        return kept
    for finding in findings:
        for name, value in finding.measured.items():
            if math.isfinite(value):
                kept[name] = [*kept.get(name, ()), value][-REMEMBERED:]
    return kept


def limit_from(earlier: Sequence[float], *, first: float, factor: float, most: float = math.inf) -> float:
    """A limit that a client's own history sets: ``factor`` times the largest value before.

    Args:
        earlier: What the same number was in earlier rounds.
        first: The limit until there are enough of them, and the lowest.
        factor: How far above all of them a value may be.
        most: The highest limit, whatever the history says.
    """
    if len(earlier) < ENOUGH:
        return first
    return min(most, max(first, factor * max(earlier)))
