"""Whether what the server asks for besides weights lies within the policy's bounds."""

import math

from fedmjp.clients.checks.base import Finding, Incoming, make_finding, skip_finding

SETTINGS = "settings"


def check_settings(incoming: Incoming) -> list[Finding]:
    """Count the server's settings c that are not numbers within the policy's bounds, low <= c <= high.

    Args:
        incoming: The settings and their bounds.
    """
    if not incoming.bounds:
        return [skip_finding(SETTINGS, "the policy bounds no setting")]
    bounds = {_plain(name): limits for name, limits in incoming.bounds.items()}
    bounded = {name: value for name, value in incoming.config.items() if _plain(name) in bounds}
    beyond = sorted(name for name, value in bounded.items() if not _within(value, bounds[_plain(name)]))
    about = f"settings beyond the policy's bounds: {', '.join(beyond)}" if beyond else "settings are within bounds"
    return [make_finding(SETTINGS, float(len(beyond)), 0.0, about)]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _within(value: object, limits: tuple[float, float]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    low, high = limits
    return math.isfinite(value) and low <= value <= high
