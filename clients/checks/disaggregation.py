"""Whether a batch would leave the gradient of one picture alone: the mark of fishing, whatever its form."""

import math

from fedmjp.clients.checks.base import Finding, Incoming, derive_limit, largest_of, make_finding, skip_finding
from fedmjp.clients.checks.trace import Trace

SNR = "disaggregation"
FEWER = "effective pictures"
# Beyond the most, one picture is as good as alone in the gradient, whoever made it so.
SNR_FIRST, SNR_FACTOR, SNR_MOST = 10.0, 3.0, 100.0
FEWER_FIRST, FEWER_FACTOR = 10.0, 2.0
LEARNED = 1e-6  # norm of the loss' gradient at the logits, below which rounding is what remains


def check_disaggregation(incoming: Incoming, trace: Trace) -> list[Finding]:
    """Compare the pictures' gradients in every layer before the head.

    Args:
        incoming: The model and its history.
        trace: Of the pictures through the model.
    """
    if len(trace.losses) < 2:
        return [skip_finding(name, "one picture has no others to stand out from") for name in (SNR, FEWER)]
    ratios, fewer = [], [1.0]
    for layer in trace.body:
        # Of a learned picture the loss has a small gradient, which no weights of a server make.
        norms = (layer.by_picture / trace.slopes)[trace.slopes > LEARNED]
        if len(norms) < 2:
            continue
        largest, total = float(norms.max()), float(norms.sum())
        if total == 0:
            continue
        remaining = total - largest
        ratios.append(largest / remaining if remaining else math.inf)
        fewer.append(len(norms) * float(norms.square().sum()) / total**2)
    worst, fewest = largest_of(ratios), largest_of(fewer)
    earlier = incoming.history
    return [
        make_finding(
            SNR,
            worst,
            derive_limit(earlier.get(SNR, ()), first=SNR_FIRST, factor=SNR_FACTOR, most=SNR_MOST),
            "how far one picture stands out of a layer's gradient, for its loss",
            {SNR: worst},
        ),
        make_finding(
            FEWER,
            fewest,
            derive_limit(earlier.get(FEWER, ()), first=FEWER_FIRST, factor=FEWER_FACTOR),
            "how many times fewer pictures a layer's gradient is effectively of",
            {FEWER: fewest},
        ),
    ]
