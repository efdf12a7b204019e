"""The app's ServerApp behind a Grid that writes down what crosses the wire."""

import base64
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp

from . import settings

SETTINGS = settings.read(settings.SERVER)
FOLDER = Path(SETTINGS["folder"])
KEPT_NODES = 2  # of which arrays are kept, in each round
KEPT_BYTES = 2**31  # of all arrays that are kept
WAITING_SECONDS = 12.0  # asking for nodes so long, with nothing sent, is waiting for more of them


class Enough(BaseException):
    """As many rounds were seen as the audit asked for; no Exception, so that no app takes it for a failure."""


class Tap(Grid):
    """Passes everything through, and keeps it."""

    def __init__(self, grid: Grid, rounds: int) -> None:
        self._grid, self._rounds = grid, rounds
        self._round, self._kept, self._asked = 0, 0, 0.0
        self._training: dict[str, int] = {}
        self._nodes: dict[int, list[int]] = {}

    def set_run(self, run: Any) -> None:
        """As the Grid's."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """As the Grid's."""
        return self._grid.run

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        """As the Grid's."""
        return self._grid.create_message(*arguments, **named)

    def get_node_ids(self) -> Iterable[int]:
        """As the Grid's; asked again and again, the app waits for more clients than there are."""
        now = time.monotonic()
        self._asked = self._asked or now
        nodes = list(self._grid.get_node_ids())
        if now - self._asked > WAITING_SECONDS:
            settings.note(FOLDER, "waiting.jsonl", {"nodes": len(nodes)})
            raise Enough
        return nodes

    def get_nodes(self) -> Any:
        """As the Grid's."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, and keep what was sent."""
        outgoing = list(messages)
        self._require_rounds(outgoing)
        identifiers = list(self._grid.push_messages(outgoing))
        self._keep("down", outgoing)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch, and keep what came."""
        replies = list(self._grid.pull_messages(message_ids))
        self._keep("up", replies)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, wait, and keep both."""
        outgoing = list(messages)
        self._require_rounds(outgoing)
        replies = list(self._grid.send_and_receive(outgoing, timeout=timeout))
        self._keep("down", outgoing)
        self._keep("up", replies)
        return replies

    def _require_rounds(self, outgoing: list[Message]) -> None:
        self._asked = 0.0
        # Secure aggregation takes several messages to a round, one of which holds the weights.
        if any(_trains(message) and message.content.array_records for message in outgoing):
            self._round += 1
            if self._round > self._rounds:
                raise Enough

    def _keep(self, way: str, messages: list[Message]) -> None:
        shared: dict[int, str] = {}
        for message in messages:
            about = message.metadata
            line = {
                "way": way, "type": about.message_type, "round": self._round, "id": about.message_id,
                "reply_to": about.reply_to_message_id, "node": about.dst_node_id if way == "down" else about.src_node_id,
            }  # fmt: skip
            if message.has_error():
                settings.note(
                    FOLDER, "wire.jsonl", {**line, "error": message.error.code, "reason": message.error.reason}
                )
                continue
            line["records"] = {name: _described(record) for name, record in message.content.items()}
            if _trains(message) and self._wanted(int(line["node"])):
                line["file"] = self._arrays(way, message, shared)
            settings.note(FOLDER, "wire.jsonl", line)

    def _wanted(self, node: int) -> bool:
        nodes = self._nodes.setdefault(self._round, [])
        if node not in nodes and len(nodes) < KEPT_NODES:
            nodes.append(node)
        return node in nodes and self._kept < KEPT_BYTES

    def _arrays(self, way: str, message: Message, shared: dict[int, str]) -> str:
        """The file that holds a message's arrays; messages that share their content share it."""
        if id(message.content) in shared:
            return shared[id(message.content)]
        name = f"{way}-{len(list(FOLDER.glob('*.npz'))):04d}.npz"
        arrays = {
            f"{record}/{entry}": array.numpy()
            for record, several in message.content.array_records.items()
            for entry, array in several.items()
        }
        self._kept += sum(array.nbytes for array in arrays.values())
        np.savez(FOLDER / name, **arrays)
        shared[id(message.content)] = name
        return name


def _trains(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == "train"


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


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the app's own ServerApp until it ends, or as many rounds were seen as were asked for."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        if SETTINGS["stand_in"]:
            from . import stand_ins  # noqa: PLC0415 (only where asked for)

            stand_ins.install(SETTINGS)
        settings.load(SETTINGS["component"])(Tap(grid, SETTINGS["rounds"]), context)
    except Enough:
        settings.note(FOLDER, "ended.jsonl", {"ended": "enough"})
    except Exception as error:
        settings.note_problem(FOLDER, "server", error)
        raise
    else:
        settings.note(FOLDER, "ended.jsonl", {"ended": "by itself"})
