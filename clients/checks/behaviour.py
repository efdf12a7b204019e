"""Whether the model treats the client's own pictures as it did in the last rounds: loss, gradients, silent layers."""

import math

from fedmjp.clients.checks.base import ENOUGH, Finding, Incoming, judged, limit_from, not_run, worst_of
from fedmjp.clients.checks.trace import Trace

LOSS = "loss"
GRADIENT = "gradient"
SILENT = "silent layers"
LOSS_FIRST, LOSS_FACTOR = 2.0, 2.0
GRADIENT_LIMIT = 4.0
GONE_LIMIT = 0.99  # share of layers; half of a residual network's have no gradient where branches start at zero


def check_behaviour(incoming: Incoming, trace: Trace) -> list[Finding]:
    """Compare what the model does with the client's own pictures with what it did before.

    - *loss*: the mean cross-entropy, against the largest so far, and against that of chance, ln K for K classes;
    - *gradient*: the norm g of the mean gradient of every layer before the head, as max |ln(g / median of g so far)|.
      Until there is a history, the share of layers where g is exactly zero: all of them are where a client is silenced;
    - *silent layers*: how many give the same for all pictures, though what enters them differs.
    """
    loss = float(trace.losses.double().mean())
    chance = math.log(trace.logits.shape[1])
    limit = limit_from(incoming.history.get(LOSS, ()), first=LOSS_FIRST * chance, factor=LOSS_FACTOR)
    silent = float(len(trace.silent))
    return [
        judged(LOSS, loss, limit, "the loss on the client's own pictures", {LOSS: loss}),
        _gradients(incoming, trace),
        judged(
            SILENT,
            silent,
            max(incoming.history.get(SILENT, ()), default=0.0),
            "layers that give the same for all pictures",
            {SILENT: silent},
        ),
    ]


def _gradients(incoming: Incoming, trace: Trace) -> Finding:
    if not trace.body:
        return not_run(GRADIENT, "there is no layer before the head")
    norms = {f"{GRADIENT}/{layer.name}": layer.measured[1] for layer in trace.body}
    about = "gradients of layers on the client's own pictures"
    changes = []
    for name, norm in norms.items():
        earlier = sorted(incoming.history.get(name, ()))
        if len(earlier) < ENOUGH:
            continue
        usual = earlier[len(earlier) // 2]
        changes.append(abs(math.log(norm / usual)) if norm > 0 and usual > 0 else (math.inf if norm != usual else 0.0))
    if changes:
        return judged(GRADIENT, worst_of(changes), GRADIENT_LIMIT, about, norms)
    gone = sum(not norm > 0 for norm in norms.values()) / len(norms)
    return judged(GRADIENT, gone, GONE_LIMIT, about, norms)
