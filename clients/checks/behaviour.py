"""Whether the model treats the client's own pictures as it did in the last rounds: loss, gradients, silent layers."""

import math

from fedmjp.clients.checks.base import ENOUGH, Finding, Incoming, derive_limit, largest_of, make_finding, skip_finding
from fedmjp.clients.checks.trace import Trace

LOSS = "loss"
GRADIENT = "gradient"
SILENT = "silent layers"
LOSS_FIRST, LOSS_FACTOR = 2.0, 2.0
GRADIENT_LIMIT = 4.0
GONE_LIMIT = 0.99  # share of layers; half of a residual network's have no gradient where branches start at zero


def check_behaviour(incoming: Incoming, trace: Trace) -> list[Finding]:
    """Compare what the model does with the client's own pictures with what it did before.

    Args:
        incoming: The model and its history.
        trace: Of the pictures through the model.
    """
    loss = float(trace.losses.double().mean())
    chance = math.log(trace.logits.shape[1])
    limit = derive_limit(incoming.history.get(LOSS, ()), first=LOSS_FIRST * chance, factor=LOSS_FACTOR)
    silent = float(len(trace.silent))
    return [
        make_finding(LOSS, loss, limit, "the loss on the client's own pictures", {LOSS: loss}),
        _gradients(incoming, trace),
        make_finding(
            SILENT,
            silent,
            max(incoming.history.get(SILENT, ()), default=0.0),
            "layers that give the same for all pictures",
            {SILENT: silent},
        ),
    ]


def _gradients(incoming: Incoming, trace: Trace) -> Finding:
    if not trace.body:
        return skip_finding(GRADIENT, "there is no layer before the head")
    # Losses that training made small make all gradients small.
    slope = float(trace.slopes.mean())
    if not slope:
        return skip_finding(GRADIENT, "the loss has no gradient at the logits")
    norms = {f"{GRADIENT}/{layer.name}": layer.measured[1] / slope for layer in trace.body}
    about = "gradients of layers on the client's own pictures"
    changes = []
    for name, norm in norms.items():
        earlier = sorted(incoming.history.get(name, ()))
        if len(earlier) < ENOUGH:
            continue
        usual = earlier[len(earlier) // 2]
        changes.append(abs(math.log(norm / usual)) if norm > 0 and usual > 0 else (math.inf if norm != usual else 0.0))
    if changes:
        return make_finding(GRADIENT, largest_of(changes), GRADIENT_LIMIT, about, norms)
    gone = sum(not norm > 0 for norm in norms.values()) / len(norms)
    return make_finding(GRADIENT, gone, GONE_LIMIT, about, norms)
