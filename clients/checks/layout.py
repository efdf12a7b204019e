"""Whether what arrived is the model that was agreed on: names, shapes, types, finite, and the same for all sites."""

import torch
from torch import Tensor

from fedmjp.clients.checks.base import Finding, Incoming, judged, not_run
from fedmjp.records import weights_digest
from fedmjp.tensors import is_finite

LAYOUT = "layout"
SAME = "same model"
SHOWN = 3  # names that a finding lists


def check_layout(incoming: Incoming) -> list[Finding]:
    """Count the tensors that are missing, unknown, of another shape or type, or not finite.

    They are held against the client's model and what came in the last round. Two types are let pass besides the
    model's own: float64 for float32, which Flower's adaptive strategies send, and floats for whole numbers, which
    averages of counters are.

    *same model*: how many sites got another model, by the SHA-256 of names, types, shapes and values. A server that
    silences all clients but one shows itself to that one here alone.
    """
    wrong = _wrong(incoming)
    listed = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
    about = f"tensors that are not as agreed: {listed}" if wrong else "all tensors are as agreed"
    layout = judged(LAYOUT, float(len(wrong)), 0.0, about)
    if wrong:
        return [layout, not_run(SAME, "tensors are not as agreed")]
    if not incoming.digests:
        return [layout, not_run(SAME, "no other site states what it got")]
    digest = weights_digest(incoming.weights)
    others = sum(digest != stated for stated in incoming.digests)
    return [layout, judged(SAME, float(others), 0.0, "sites that got another model")]


def _wrong(incoming: Incoming) -> list[str]:
    """Names of all tensors that are not as agreed, with the reason."""
    agreed = dict(incoming.model.state_dict())
    before = incoming.previous or {}
    expected = incoming.names if incoming.names is not None else frozenset(before or agreed)
    problems = dict.fromkeys(sorted(expected - incoming.weights.keys()), "missing")
    for name, tensor in incoming.weights.items():
        own = before.get(name, agreed.get(name))
        if own is None or name not in expected:
            problems[name] = "unknown"
        elif reason := _difference(tensor, own):
            problems[name] = reason
    return [f"{name} ({reason})" for name, reason in problems.items()]


def _difference(tensor: object, own: Tensor) -> str | None:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    if tensor.shape != own.shape:
        return f"shape {tuple(tensor.shape)} in place of {tuple(own.shape)}"
    counter = not own.is_floating_point() and not own.is_complex()
    wider = own.dtype == torch.float32 and tensor.dtype == torch.float64
    if tensor.dtype != own.dtype and not wider and not (counter and tensor.is_floating_point()):
        return f"{tensor.dtype} in place of {own.dtype}"
    if tensor.is_complex():
        return "complex numbers"
    if tensor.is_floating_point() and not is_finite(tensor.to(own.dtype) if wider else tensor):
        return "NaN or infinite"
    return None
