"""The app's ServerApp behind a Grid that writes down what crosses the wire."""

import base64
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

from . import settings

SETTINGS = settings.read(settings.SERVER)
FOLDER = Path(SETTINGS["folder"])
WARM_SECONDS = 180
KEPT_NODES = 2  # of which arrays are kept, in each round
KEPT_BYTES = 2**31  # of all arrays that are kept


def end(file: str, line: dict[str, Any]) -> NoReturn:
    """Say why, and end the process: Flower's older loops send from threads, which swallow every exception."""
    settings.note(FOLDER, file, line)
    os._exit(0)


class Tap(Grid):
    """Passes everything through, and keeps it."""

    def __init__(self, grid: Grid, rounds: int) -> None:
        self._grid, self._rounds = grid, rounds
        self._round, self._kept, self._asked, self._sent = 0, 0, 0.0, False
        self._trained: dict[int, int] = {}
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
        """As the Grid's; asked again and again before anything is sent, the app waits for more clients."""
        now = time.monotonic()
        self._asked = self._asked or now
        nodes = list(self._grid.get_node_ids())
        if not self._sent and now - self._asked > SETTINGS["waiting"]:
            end("waiting.jsonl", {"nodes": len(nodes)})
        return nodes

    def get_nodes(self) -> Any:
        """As the Grid's."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, and keep what was sent."""
        outgoing = list(messages)
        self._count(outgoing)
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
        self._count(outgoing)
        replies = list(self._grid.send_and_receive(outgoing, timeout=timeout))
        self._keep("down", outgoing)
        self._keep("up", replies)
        return replies

    def _count(self, outgoing: list[Message]) -> None:
        """Count rounds as the app names them; where it does not, by how often a client is asked to train."""
        if outgoing and not self._sent:
            self._sent = True
            self._warm()
        for message in outgoing:
            # Secure aggregation takes several messages to a round, one of which holds the weights.
            if _trains(message) and message.content.array_records:
                node = message.metadata.dst_node_id
                self._trained[node] = self._trained.get(node, 0) + 1
                configs: list[Any] = [
                    *message.content.config_records.values(),
                    {"server-round": message.metadata.group_id},
                ]
                stated = [one["server-round"] for one in configs if str(one.get("server-round", "")).isdigit()]
                self._round = max(self._round, int(stated[0]) if stated else self._trained[node])
        if self._round > self._rounds:
            end("ended.jsonl", {"ended": "enough"})

    def _warm(self) -> None:
        """Have every client import the app; what that fails of, its answers to the app's own messages say again."""
        asked = [
            Message(RecordDict(), dst_node_id=node, message_type=settings.WARM) for node in self._grid.get_node_ids()
        ]
        list(self._grid.send_and_receive(asked, timeout=WARM_SECONDS))

    def _keep(self, way: str, messages: list[Message]) -> None:
        shared: dict[int, str] = {}
        for message in messages:
            about = message.metadata
            line: dict[str, Any] = {
                "way": way,
                "type": about.message_type,
                "round": self._round,
                "id": about.message_id,
                "reply_to": about.reply_to_message_id,
                "node": about.dst_node_id if way == "down" else about.src_node_id,
            }
            if message.has_error():
                settings.note(
                    FOLDER, "wire.jsonl", {**line, "error": message.error.code, "reason": message.error.reason}
                )
                continue
            line["records"] = {name: _described(record) for name, record in message.content.items()}
            if _trains(message) and self._wanted(line["node"]):
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
        arrays: dict[str, Any] = {
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
    except Exception as error:
        settings.note_problem(FOLDER, "server", error)
        raise
    else:
        settings.note(FOLDER, "ended.jsonl", {"ended": "by itself"})
