"""Whether what arrived is the model that was agreed on: names, shapes, types, finite, and the same for all sites."""

import torch
from torch import Tensor

from fedmjp.clients.checks.base import Finding, Incoming, make_finding, skip_finding
from fedmjp.records import weights_digest
from fedmjp.tensors import is_finite

LAYOUT = "layout"
SAME = "same model"
SHOWN = 3  # names that a finding lists


def check_layout(incoming: Incoming) -> list[Finding]:
    """Count the tensors that are missing, unknown, of another shape or type, or not finite.

    Args:
        incoming: The model and its history.
    """
    wrong = _wrong(incoming)
    listed = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
    about = f"tensors that are not as agreed: {listed}" if wrong else "all tensors are as agreed"
    layout = make_finding(LAYOUT, float(len(wrong)), 0.0, about)
    if wrong:
        return [layout, skip_finding(SAME, "tensors are not as agreed")]
    if not incoming.digests:
        return [layout, skip_finding(SAME, "no other site states what it got")]
    digest = weights_digest(incoming.weights)
    digests = sum(digest != stated for stated in incoming.digests)
    return [layout, make_finding(SAME, float(digests), 0.0, "sites that got another model")]


def _wrong(incoming: Incoming) -> list[str]:
    """Name all tensors that are not as agreed, with the reason."""
    agreed = dict(incoming.model.state_dict())
    previous = incoming.previous or {}
    expected = incoming.names if incoming.names is not None else frozenset(previous or agreed)
    problems = dict.fromkeys(sorted(expected - incoming.weights.keys()), "missing")
    for name, tensor in incoming.weights.items():
        own_tensor = previous.get(name, agreed.get(name))
        if own_tensor is None or name not in expected:
            problems[name] = "unknown"
        elif reason := _difference(tensor, own_tensor):
            problems[name] = reason
    return [f"{name} ({reason})" for name, reason in problems.items()]


def _difference(tensor: object, expected: Tensor) -> str | None:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    if tensor.shape != expected.shape:
        return f"shape {tuple(tensor.shape)} in place of {tuple(expected.shape)}"
    counter = not expected.is_floating_point() and not expected.is_complex()
    wider = expected.dtype == torch.float32 and tensor.dtype == torch.float64
    if tensor.dtype != expected.dtype and not wider and not (counter and tensor.is_floating_point()):
        return f"{tensor.dtype} in place of {expected.dtype}"
    if tensor.is_complex():
        return "complex numbers"
    if tensor.is_floating_point() and not is_finite(tensor.to(expected.dtype) if wider else tensor):
        return "NaN or infinite"
    return None
