"""Which tensors of a model play which role, by structure: layouts of all libraries, and uploads without names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedmjp.models import names

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedmjp.models.entrance import Entrance

OWN_PREFIX = "backbone."  # of ``fedmjp.models.classifier.Classifier``, beside what MJP adds


def roles_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, frozenset[str]]:
    """Sort the tensors of a vision transformer into roles, by their names and shapes.

    - ``patch_embedding``: the first convolution on three channels, with its bias;
    - ``position_embedding``: tensors (1, n, d) with n > 1 and d the width of the patch embedding, and MJP's
      unknown embedding;
    - ``head``: the last matrix, with its bias;
    - ``body``: everything but the head.

    Tensors are in the model's order. Names without meaning ("0", "1", ...) are enough: a bias is then the vector that
    follows its weight.

    Args:
        tensors: By name, in the model's order.

    Returns:
        Role to names; no names where the model has no such tensor.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    order = list(shapes)
    inner = [name for name in order if name.startswith(OWN_PREFIX)] or order
    patches = next((name for name in inner if len(shapes[name]) == 4 and shapes[name][1] == 3), None)
    head = next((name for name in reversed(inner) if len(shapes[name]) == 2), None)
    width = None if patches is None else shapes[patches][0]
    positions = {
        name
        for name, shape in shapes.items()
        if name == names.UNKNOWN_EMBEDDING
        or (len(shape) == 3 and shape[0] == 1 and shape[1] > 1 and width in (None, shape[2]))
    }
    head_names = _with_bias(head, order, shapes)
    return {
        "patch_embedding": _with_bias(patches, order, shapes),
        "position_embedding": frozenset(positions),
        "head": head_names,
        "body": frozenset(order) - head_names,
    }


def roles_of(model: nn.Module | Entrance) -> dict[str, frozenset[str]]:
    """Sort a model's parameters into roles, as ``roles_of_tensors`` does.

    Args:
        model: A network, or what is known of its entrance.
    """
    return roles_of_tensors(dict(model.named_parameters()))


def _with_bias(weight: str | None, order: Sequence[str], shapes: Mapping[str, torch.Size]) -> frozenset[str]:
    if weight is None:
        return frozenset()
    likely: Iterable[str] = order[order.index(weight) + 1 :][:1]
    if weight.endswith("weight"):
        likely = [weight.removesuffix("weight") + "bias"]
    return frozenset({weight, *(name for name in likely if shapes.get(name) == shapes[weight][:1])})
