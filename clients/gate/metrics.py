"""Metrics and settings of a reply, in the policy's number format, with what they cost in bits."""

import math
from collections.abc import Mapping
from typing import Any

from fedmjp.clients.gate.policy import Clear
from fedmjp.clients.gate.reasons import Reason, RefusedError
from fedmjp.wire import CORRECT, LOSS, REPORTED, UNDECIDED

# What Flower's documentation, its examples and fedmjp's own app call metrics.
USUAL = frozenset({
    *REPORTED, CORRECT, UNDECIDED, LOSS, "accuracy", "acc", "auc", "epsilon", "error", "f1", "f1-score", "f1_score",
    "mae", "mse", "num-correct", "num_examples", "partition-id", "precision", "r2", "recall", "rmse",
    *(f"{split}{dash}{name}" for split in ("train", "eval", "val", "valid", "test") for dash in "-_"
      for name in ("accuracy", "acc", "loss")),
})  # fmt: skip
# How Flower calls the records of its strategies, and those of a NumPyClient.
OF_FLOWER = frozenset({
    "arrays", "config", "metrics", "fitres.metrics", "fitres.num_examples", "fitres.parameters", "fitres.status",
    "evaluateres.loss", "evaluateres.metrics", "evaluateres.num_examples", "evaluateres.status",
    "getpropertiesres.properties", "getpropertiesres.status",
})  # fmt: skip
STATUS = ".status"
OK: Mapping[str, int | str] = {
    "code": 0,
    "message": "Success",
}  # the only answer of a NumPyClient that is none of errors
STRUCTURE = {
    "fitres.num_examples": "num_examples",
    "evaluateres.num_examples": "num_examples",
    "evaluateres.loss": "loss",
}
COUNT_BITS = 32
EXPONENT_BITS = 11  # with the sign
Plain = dict[str, Any]


def list_names(clear: Clear) -> frozenset[str]:
    """List the names of metrics and settings that may leave.

    Args:
        clear: What the policy says.
    """
    return USUAL if clear.names is None else frozenset(clear.names)


def rebuild_values(
    record_name: str, values: Mapping[str, Any], clear: Clear, names: frozenset[str]
) -> tuple[Plain, int]:
    """Write the values of a record in the policy's format, in the order of their names.

    Args:
        record_name: Of the reply's record.
        values: As the app made them.
        clear: What the policy says.
        names: That may leave.

    Returns:
        The values, and how many bits they hold.

    Raises:
        RefusedError: If a name is not listed, text is under a name that the policy does not list, or a count is no
            whole number of 32 bits.
    """
    if record_name.endswith(STATUS):
        if values.get("code") != 0 or values.keys() != OK.keys():
            raise RefusedError(Reason.ANSWERED)
        return dict(OK), 0
    rebuilt, bits = Plain(), 0
    for key in sorted(map(str, values)):
        if key not in names and STRUCTURE.get(record_name) != key:
            raise RefusedError(Reason.NAMES)
        rebuilt[key], cost = _rebuild_value(values[key], clear, listed=clear.names is not None)
        bits += cost
    return rebuilt, bits


def _rebuild_value(value: object, clear: Clear, *, listed: bool) -> tuple[Any, int]:
    if isinstance(value, list):
        pairs = [_rebuild_value(item, clear, listed=listed) for item in value]
        return [item for item, _ in pairs], sum(bits for _, bits in pairs)
    if isinstance(value, bool):
        return value, 1
    if isinstance(value, int):
        if not -(2 ** (COUNT_BITS - 1)) <= value < 2 ** (COUNT_BITS - 1):
            raise RefusedError(Reason.NUMBERS)
        return int(value), COUNT_BITS
    if isinstance(value, float):
        rounded = float(f"{value:.{clear.digits - 1}e}") + 0.0
        return (math.nan if math.isnan(rounded) else rounded), EXPONENT_BITS + math.ceil(clear.digits * math.log2(10))
    if isinstance(value, str | bytes) and listed:
        size = len(value) if isinstance(value, bytes) else len(value.encode(errors="surrogatepass"))
        return value, 8 * size
    raise RefusedError(Reason.NAMES)
