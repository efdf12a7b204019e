"""Checks on an incoming model, before a client trains with it.

    findings = examine_model(incoming)
    if any(finding.suspicious for finding in findings): ...
    history = remember(history, findings)

To attack one's own upload before it leaves is no check of a model: the upload gate does it.
"""

from collections.abc import Callable
from functools import partial

from fedmjp.clients.checks.base import Finding, History, Incoming, remember, skip_finding
from fedmjp.clients.checks.behaviour import check_behaviour
from fedmjp.clients.checks.bins import check_bins
from fedmjp.clients.checks.disaggregation import check_disaggregation
from fedmjp.clients.checks.head import check_head
from fedmjp.clients.checks.layout import LAYOUT, check_layout
from fedmjp.clients.checks.movement import check_movement
from fedmjp.clients.checks.settings import check_settings
from fedmjp.clients.checks.structure import check_structure
from fedmjp.clients.checks.trace import Trace, trace_model
from fedmjp.errors import BadInputError

__all__ = ["Finding", "History", "Incoming", "examine_model", "remember"]

OfWeights = Callable[[Incoming], list[Finding]]
OfBehaviour = Callable[[Incoming, Trace], list[Finding]]

# By what findings are called where a check gives none of its own.
OF_WEIGHTS: dict[str, OfWeights] = {"structure": check_structure, "movement": check_movement}
OF_BEHAVIOUR: dict[str, OfBehaviour] = {
    "disaggregation": check_disaggregation,
    "bins": check_bins,
    "head": check_head,
    "behaviour": check_behaviour,
}


def examine_model(incoming: Incoming) -> list[Finding]:
    """Run all checks before training begins.

    Args:
        incoming: The model as it came in, and what the client compares it with.

    Returns:
        At least one finding of each check.
    """
    layout = _guarded(LAYOUT, lambda: check_layout(incoming))
    findings = [*layout, *_guarded("settings", lambda: check_settings(incoming))]
    if any(finding.suspicious for finding in layout if finding.check == LAYOUT):
        return [
            *findings,
            *(skip_finding(title, "tensors are not as agreed") for title in (*OF_WEIGHTS, *OF_BEHAVIOUR)),
        ]
    for title, check in OF_WEIGHTS.items():
        findings += _guarded(title, partial(check, incoming))
    try:
        trace = trace_model(incoming)
    except BadInputError as error:
        return [*findings, *(skip_finding(title, str(error)) for title in OF_BEHAVIOUR)]
    except Exception as error:  # noqa: BLE001  (somebody else's model, with weights of somebody else)
        return [*findings, *(_broken(title, error) for title in OF_BEHAVIOUR)]
    for title, behaviour in OF_BEHAVIOUR.items():
        findings += _guarded(title, partial(behaviour, incoming, trace))
    return findings


def _guarded(title: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  (fails closed, whatever it was)
        return [_broken(title, error)]


def _broken(title: str, error: Exception) -> Finding:
    # The error's own words may hold numbers of private pictures.
    return skip_finding(title, f"it broke down with {type(error).__name__}", failed=True)
