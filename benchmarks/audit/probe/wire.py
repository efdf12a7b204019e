"""Messages as lines of JSON and files of arrays, as the audit reads them."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

FILE = "wire.jsonl"


def describe_message(message: Message, way: str, server_round: int, node: int) -> dict[str, Any]:
    """Describe a message: all that it holds but the arrays' values.

    Args:
        message: That crossed the wire.
        way: ``down`` to a client, or ``up`` to the server.
        server_round: Number of the round.
        node: Of the client.
    """
    about = message.metadata
    line: dict[str, Any] = {
        "way": way,
        "type": about.message_type,
        "round": server_round,
        "id": about.message_id,
        "reply_to": about.reply_to_message_id,
        "node": node,
    }
    if message.has_error():
        return {**line, "error": message.error.code, "reason": message.error.reason}
    return {**line, "records": {name: _described(record) for name, record in message.content.items()}}


def write_arrays(path: Path, message: Message) -> int:
    """Write a message's arrays to a file and return their bytes.

    Args:
        path: Of the file.
        message: That crossed the wire.
    """
    arrays: dict[str, Any] = {
        f"{record}/{entry}": array.numpy()
        for record, several in message.content.array_records.items()
        for entry, array in several.items()
    }
    np.savez(path, **arrays)
    return sum(array.nbytes for array in arrays.values())


def _described(record: ArrayRecord | MetricRecord | ConfigRecord) -> dict[str, Any]:
    if isinstance(record, ArrayRecord):
        entries = {name: [array.dtype, list(array.shape), len(array.data)] for name, array in record.items()}
        return {"kind": "arrays", "entries": entries}
    kind = "metrics" if isinstance(record, MetricRecord) else "config"
    return {"kind": kind, "values": {name: _plain(value) for name, value in record.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value
