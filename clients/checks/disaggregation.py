"""Whether a batch would leave the gradient of one picture alone: the mark of fishing, whatever its form."""

import math

from fedmjp.clients.checks.base import Finding, Incoming, judged, limit_from, not_run, worst_of
from fedmjp.clients.checks.trace import Trace

SNR = "disaggregation"
FEWER = "effective pictures"
# Beyond the most, one picture is as good as alone in the gradient, whoever made it so.
SNR_FIRST, SNR_FACTOR, SNR_MOST = 10.0, 3.0, 100.0
FEWER_FIRST, FEWER_FACTOR = 10.0, 2.0


def check_disaggregation(incoming: Incoming, trace: Trace) -> list[Finding]:
    """Compare the pictures' gradients in every layer before the head.

    With n_i = |G_i^T A_i|, the norm of picture i's gradient of a layer's weight:

    - *disaggregation signal-to-noise*, max_i n_i / (sum_i n_i - max_i n_i), the largest of all layers;
    - how many times fewer pictures the gradient is effectively of, B sum_i n_i^2 / (sum_i n_i)^2 for B pictures.

    They say nothing of a single picture. A trained model that is wrong about one picture alone has large values too,
    which is why the client's own history sets the limits.

    References:
        Garov et al., "Hiding in plain sight: disguising data stealing attacks in federated learning", ICLR 2024.
    """
    if len(trace.losses) < 2:
        return [not_run(name, "one picture has no others to stand out from") for name in (SNR, FEWER)]
    ratios, fewer = [], [1.0]
    for layer in trace.body:
        norms = layer.by_picture
        largest, total = float(norms.max()), float(norms.sum())
        if total == 0:
            continue
        others = total - largest
        ratios.append(largest / others if others else math.inf)
        fewer.append(len(norms) * float(norms.square().sum()) / total**2)
    worst, fewest = worst_of(ratios), worst_of(fewer)
    earlier = incoming.history
    return [
        judged(
            SNR,
            worst,
            limit_from(earlier.get(SNR, ()), first=SNR_FIRST, factor=SNR_FACTOR, most=SNR_MOST),
            "how far the gradient of one picture stands out of a layer's",
            {SNR: worst},
        ),
        judged(
            FEWER,
            fewest,
            limit_from(earlier.get(FEWER, ()), first=FEWER_FIRST, factor=FEWER_FACTOR),
            "how many times fewer pictures a layer's gradient is effectively of",
            {FEWER: fewest},
        ),
    ]
