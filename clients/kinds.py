"""Tell weights from updates of weights, by what the server had sent: not by their size alone."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from fedmjp.tensors import FARTHEST

COSINE = 0.5  # of a reply with the weights that were sent, from which on it is likely to be weights
Readings = tuple[bool, ...]


def read_as_weights(reply: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Readings:
    """Tell whether a reply holds weights (True) or an update of them (False).

    Near to the weights that were sent it is weights. Further off it is likely to be weights where it points along them,
    as trained weights do and gradients do not. That is certain where tensors agree: some come back bit by bit of
    weights; of an update some are zero, or counters fall. Where it is not certain both readings are returned.

    Args:
        reply: Tensors by name.
        sent: What came in, with the same names and shapes.

    Returns:
        The readings that fit, the likelier first.
    """
    pairs = [(tensor, sent[name]) for name, tensor in reply.items()]
    product, length, replied, moved = (sum(sums) for sums in zip(*_products(pairs), strict=True))
    if not length or moved <= FARTHEST**2 * length:  # from weights of zeros both readings are the same numbers
        return (True,)
    likely = product >= COSINE * (length * replied) ** 0.5
    marks = {mark for pair in pairs if (mark := _mark(*pair)) is not None}
    return (likely,) if marks == {likely} else (likely, not likely)


def _mark(tensor: Tensor, sent: Tensor) -> bool | None:
    """Tell weights or an update by one tensor alone; None where it does not say."""
    if not tensor.numel() or not bool(sent.any()):
        return None
    if not tensor.is_floating_point():
        return False if tensor.numel() == 1 and bool(tensor < sent) else None
    if not bool(tensor.any()):
        return False
    return True if bool((tensor == sent.to(tensor.dtype)).all()) else None


def _products(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[float, float, float, float]]:
    """Yield of each tensor the product with what was sent, both squared lengths, and that of their difference."""
    yield 0.0, 0.0, 0.0, 0.0
    for tensor, sent in pairs:
        if tensor.is_floating_point():
            first, second = tensor.double().flatten(), sent.double().flatten()
            difference = first - second
            yield float(first @ second), float(second @ second), float(first @ first), float(difference @ difference)
