"""The loss that an app computes: its options, and how its input follows from what the network returned."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

LOSSES = (
    "cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss",
)  # fmt: skip
DIGEST_BYTES = 16
KEPT_OPTIONS = 10_000  # entries of an option that is a tensor, as weights of classes are
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda output: output,
    "log_softmax": lambda output: output.log_softmax(min(1, output.ndim - 1)),
    "softmax": lambda output: output.softmax(min(1, output.ndim - 1)),
    "sigmoid": torch.sigmoid,
}


def digest(example: Tensor) -> bytes:
    """Compute a digest of an example as it enters a network, by which one that enters twice is known.

    Args:
        example: Of any shape and type.
    """
    values = example.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(values, digest_size=DIGEST_BYTES).digest()


def main_input(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the first tensor with several dimensions, else the first: what one example is told from another by.

    Args:
        tensors: Of a call, by name.
    """
    inputs = [tensor for tensor in tensors.values() if tensor.ndim > 1] or list(tensors.values())
    return inputs[0] if inputs and inputs[0].ndim else None


def named_tensors(values: Any, name: str = "input") -> list[tuple[str, Tensor]]:
    """List the tensors within arguments or outputs, each with a name that says where it stands.

    Args:
        values: Tensors, sequences and mappings of them, and anything else.
        name: Prefix of all names.
    """
    if isinstance(values, Tensor):
        return [(name, values)]
    if isinstance(values, list | tuple):
        return [pair for place, value in enumerate(values) for pair in named_tensors(value, f"{name}-{place}")]
    if hasattr(values, "items"):
        return [pair for key, value in values.items() for pair in named_tensors(value, f"{name}-{key}")]
    return []


def describe_loss(
    name: str, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a call of a loss, so that it can be computed again.

    Args:
        name: Of the function in ``torch.nn.functional``.
        function: Itself, for the names of its arguments.
        arguments: Of the call.
        keywords: Of the call, by name.
    """
    stated = dict(inspect.signature(function).bind_partial(*arguments, **keywords).arguments)
    options: dict[str, Any] = {}
    for option, value in stated.items():
        if isinstance(value, Tensor) and option not in ("input", "target") and value.numel() <= KEPT_OPTIONS:
            options[option] = value.detach().cpu().tolist()
        elif isinstance(value, int | float) and option not in ("size_average", "reduce"):
            options[option] = value
    return {
        "name": name,
        "label_smoothing": float(stated.get("label_smoothing", 0.0)),
        "reduction": stated.get("reduction", "mean"),
        "options": options,
    }


def find_link(outputs: Sequence[tuple[str, Tensor]], loss_input: Tensor) -> dict[str, str] | None:
    """Find the output of a network that a loss was computed of, and the function between them; None if there is none.

    Args:
        outputs: Tensors that the network returned, by name.
        loss_input: First argument of the loss, any shape.
    """
    values = loss_input.detach().float().flatten()
    for name, output in outputs:
        if output.numel() != values.numel() or not output.is_floating_point() or not output.ndim:
            continue
        for link, function in LINKS.items():
            if torch.allclose(function(output.detach().float()).flatten(), values, rtol=1e-3, atol=1e-6):
                return {"output": name, "link": link}
    return None
