"""Checks on an incoming model, before a client trains with it.

    findings = examine_model(incoming)
    if any(finding.suspicious for finding in findings): ...
    history = remember(history, findings)

To attack one's own upload before it leaves is no check of a model: the upload gate does it.
"""

from collections.abc import Callable

from clients.checks.base import Finding, History, Incoming, not_run, remember
from clients.checks.behaviour import check_behaviour
from clients.checks.bins import check_bins
from clients.checks.disaggregation import check_disaggregation
from clients.checks.head import check_head
from clients.checks.layout import check_layout
from clients.checks.movement import check_movement
from clients.checks.settings import check_settings
from clients.checks.structure import check_structure
from clients.checks.trace import Trace, trace_of
from fedmjp.errors import BadInputError

__all__ = ["Finding", "History", "Incoming", "examine_model", "remember"]

OF_WEIGHTS: tuple[Callable[[Incoming], list[Finding]], ...] = (check_structure, check_movement)
OF_BEHAVIOUR: tuple[Callable[[Incoming, Trace], list[Finding]], ...] = (
    check_disaggregation,
    check_bins,
    check_head,
    check_behaviour,
)


def examine_model(incoming: Incoming) -> list[Finding]:
    """Run all checks before training begins, and give at least one finding of each.

    It never raises: a check that breaks down is suspicious. Where tensors are not as agreed, nothing is computed with
    them. The model is left as it was, with its mode, its gradients and its buffers.
    """
    findings = [*_guarded(check_layout, incoming), *_guarded(check_settings, incoming)]
    if any(finding.suspicious for finding in findings if finding.check not in ("settings", "same model")):
        return findings + [
            not_run(_title(check), "tensors are not as agreed") for check in (*OF_WEIGHTS, *OF_BEHAVIOUR)
        ]
    for check in OF_WEIGHTS:
        findings += _guarded(check, incoming)
    try:
        trace = trace_of(incoming)
    except BadInputError as error:
        return findings + [not_run(_title(check), str(error)) for check in OF_BEHAVIOUR]
    except Exception as error:  # noqa: BLE001  (somebody else's model, on weights of somebody else)
        return findings + [_broken(_title(check), error) for check in OF_BEHAVIOUR]
    for behaviour in OF_BEHAVIOUR:
        findings += _guarded(lambda given, check=behaviour: check(given, trace), incoming, _title(behaviour))
    return findings


def _guarded(check: Callable[[Incoming], list[Finding]], incoming: Incoming, title: str = "") -> list[Finding]:
    try:
        return check(incoming)
    except Exception as error:  # noqa: BLE001  (fails closed, whatever it was)
        return [_broken(title or _title(check), error)]


def _title(check: Callable[..., list[Finding]]) -> str:
    return check.__name__.removeprefix("check_")


def _broken(title: str, error: Exception) -> Finding:
    # The error's own words may hold numbers of private pictures.
    return not_run(title, f"it broke down with {type(error).__name__}", failed=True)
