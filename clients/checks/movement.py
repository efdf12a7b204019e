"""Whether the weights moved since the last round as an aggregate of updates like the client's own can move them."""

import math

from fedmjp.clients.checks.base import ENOUGH, Finding, Incoming, derive_limit, largest_of, make_finding, skip_finding

STEP = "step"
DIRECTION = "direction"
STEP_FIRST, STEP_LIMIT = 30.0, 10.0
DIRECTION_FIRST, DIRECTION_FACTOR = 1.9, 1.2


def check_movement(incoming: Incoming) -> list[Finding]:
    """Compare the step W - W' of every tensor with U, the client's own last update.

    Args:
        incoming: The model, the last weights W' and the update U.
    """
    if incoming.previous is None or incoming.update is None:
        return [skip_finding(name, "there is no earlier round of this client") for name in (STEP, DIRECTION)]
    ratios, dot, moved_square, own_square = {}, 0.0, 0.0, 0.0
    for name, change in incoming.update.items():
        if name not in incoming.weights or name not in incoming.previous or not change.is_floating_point():
            continue
        step = incoming.weights[name].double().cpu() - incoming.previous[name].double().cpu()
        update = change.double().cpu()
        dot += float((step * update).sum())
        moved, length = float(step.norm()), float(update.norm())
        moved_square, own_square = moved_square + moved**2, own_square + length**2
        ratios[f"{STEP}/{name}"] = moved / length if length else (math.inf if moved else 0.0)
    if not ratios:
        return [skip_finding(name, "the update has no tensor of the model") for name in (STEP, DIRECTION)]
    larger = max(math.sqrt(moved_square * own_square), own_square)
    direction = 1 - dot / larger if larger else 1.0
    limit = derive_limit(incoming.history.get(DIRECTION, ()), first=DIRECTION_FIRST, factor=DIRECTION_FACTOR)
    about = "whether the model moved against the client's update"
    return [_step(incoming, ratios), make_finding(DIRECTION, direction, limit, about, {DIRECTION: direction})]


def _step(incoming: Incoming, ratios: dict[str, float]) -> Finding:
    about = "how far tensors moved, against the client's own updates"
    relative = []
    for name, ratio in ratios.items():
        earlier = incoming.history.get(name, ())
        if len(earlier) >= ENOUGH:
            largest = max(earlier)
            relative.append(ratio / largest if largest else (math.inf if ratio else 0.0))
    if relative:
        return make_finding(STEP, largest_of(relative), STEP_LIMIT, about, ratios)
    return make_finding(STEP, largest_of(ratios.values()), STEP_FIRST, about, ratios)
