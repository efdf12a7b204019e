"""The app's ServerApp behind a Grid that writes down what crosses the wire."""

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from . import settings
from .wire import describe_message, write_arrays

SETTINGS = settings.read(settings.SERVER)
FOLDER = Path(SETTINGS["folder"])
WARM_SECONDS = 180
KEPT_NODES = 2  # of which arrays are kept, in each round
KEPT_BYTES = 2**31  # of all arrays that are kept
REPEATS = 2
REPEATED_WITHIN = 20  # seconds that an answer may take to be asked for again
POLL_SECONDS = 0.3
PAUSE_SECONDS = 10  # between two questions for clients, from which on the app did something else in between
# Flower's functions that wait until as many clients are there as a local variable of theirs says.
WAITING = {"wait_for": "num_clients", "sample_nodes": "min_available_nodes"}
UPDATER = "_update_client_manager"  # asks all the time, also while the server computes


def end(file: str, line: dict[str, Any]) -> NoReturn:
    """Say why, and end the process: Flower's older loops send from threads, which swallow every exception.

    Args:
        file: That the line goes to.
        line: The reason, by name.
    """
    settings.note(FOLDER, file, line)
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()  # clients would stay, with gigabytes each
    os._exit(0)


class Tap(Grid):
    """Passes everything through, and keeps it."""

    def __init__(self, grid: Grid, rounds: int) -> None:
        self._grid, self._rounds = grid, rounds
        self._round, self._kept, self._sent = 0, 0, False
        self._asked, self._last_asked = -math.inf, -math.inf  # when it began to ask for clients, and last did
        self._trained: dict[int, int] = {}
        self._nodes: dict[int, list[int]] = {}
        self._evaluated: set[str] = set()  # types of messages
        self._unanswered: dict[str, tuple[Message, float]] = {}  # by identifier, with when it was sent
        self._repeatable: Message | None = None
        self._numbers = itertools.count()  # of files
        self._ending = threading.Lock()

    def set_run(self, run: Any) -> None:
        """Set the run, as the Grid does."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Return the Grid's run."""
        return self._grid.run

    def create_message(self, *arguments: Any, **keywords: Any) -> Message:
        """Create a message as the Grid does."""
        return self._grid.create_message(*arguments, **keywords)

    def get_node_ids(self) -> Iterable[int]:
        """List clients as the Grid does; asked repeatedly before anything is sent, the app waits for more clients."""
        now = time.monotonic()
        nodes = list(self._grid.get_node_ids())
        callers, count = _seek_waiting()
        computes = UPDATER in callers and not count
        if computes or now - self._last_asked > PAUSE_SECONDS:
            self._asked = now
        self._last_asked = now
        patience = 2 if count > len(nodes) else SETTINGS["waiting"]
        if not self._sent and now - self._asked > patience:
            end("waiting.jsonl", {"nodes": len(nodes), "wanted": count})
        return nodes

    def get_nodes(self) -> Any:
        """List nodes as the Grid does."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, and keep what was sent.

        Args:
            messages: Of the app.
        """
        outgoing = list(messages)
        self._count(outgoing)
        identifiers = list(self._grid.push_messages(outgoing))
        self._keep("down", outgoing)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch, and keep what came.

        Args:
            message_ids: Of the messages that are answered.
        """
        replies = list(self._grid.pull_messages(message_ids))
        self._keep("up", replies)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, and wait as the Grid does; an answer is kept also where another never comes.

        Args:
            messages: Of the app.
            timeout: Seconds; None waits for ever.
        """
        waiting = set(self.push_messages(messages))
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting and time.monotonic() < deadline:
            came = list(self.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in came}
            replies += came
            if waiting:
                time.sleep(POLL_SECONDS)
        return replies

    def repeat(self) -> None:
        """Ask a client twice more what it last answered with arrays: same weights, and the same draws but of noise."""
        if self._repeatable is None:
            return
        about, content = self._repeatable.metadata, self._repeatable.content
        for number in range(REPEATS):
            marked = RecordDict({**content, settings.REPEAT: ConfigRecord({"number": number})})
            request = Message(
                marked, dst_node_id=about.dst_node_id, message_type=about.message_type, group_id=about.group_id
            )
            for reply in self._grid.send_and_receive([request], timeout=REPEATED_WITHIN):
                if not reply.has_error():
                    line = {"of": about.message_id, "id": reply.metadata.reply_to_message_id}
                    settings.note(FOLDER, "repeats.jsonl", {**line, "file": self._arrays("up", reply, {})})

    def _count(self, outgoing: list[Message]) -> None:
        """Count rounds, and end when enough were seen: before another, or before the last is evaluated too."""
        if outgoing and not self._sent:
            self._sent = True
            self._warm()
        for message in outgoing:
            self._count_one(message)
        types = {message.metadata.message_type for message in outgoing}
        evaluates_again = self._round == self._rounds and bool(types & self._evaluated)
        self._evaluated |= {kind for kind in types if kind.partition(".")[0] == "evaluate"}
        if self._round > self._rounds or evaluates_again:
            with self._ending:  # older loops send from several threads
                self.repeat()
                end("ended.jsonl", {"ended": "enough"})

    def _count_one(self, message: Message) -> None:
        """Take the round as the app names it; where it does not, how often a client was asked to train."""
        # Secure aggregation takes several messages to a round, one of which holds the weights.
        if not _trains(message) or not message.content.array_records:
            return
        node = message.metadata.dst_node_id
        self._trained[node] = self._trained.get(node, 0) + 1
        configs: list[Any] = [*message.content.config_records.values(), {"server-round": message.metadata.group_id}]
        stated = [config["server-round"] for config in configs if str(config.get("server-round", "")).isdigit()]
        self._round = max(self._round, int(stated[0]) if stated else self._trained[node])

    def _warm(self) -> None:
        """Have every client import the app; what that fails of, its answers to the app's own messages say again."""
        requests = [
            Message(RecordDict(), dst_node_id=node, message_type=settings.WARM) for node in self._grid.get_node_ids()
        ]
        list(self._grid.send_and_receive(requests, timeout=WARM_SECONDS))

    def _keep(self, way: str, messages: list[Message]) -> None:
        shared: dict[int, str] = {}
        for message in messages:
            about = message.metadata
            node = about.dst_node_id if way == "down" else about.src_node_id
            line = describe_message(message, way, self._round, node)
            if not message.has_error() and _trains(message) and self._wanted(node):
                line["file"] = self._arrays(way, message, shared)
                self._remember(way, message)
            settings.note(FOLDER, "wire.jsonl", line)

    def _remember(self, way: str, message: Message) -> None:
        """Remember messages with arrays that were soon answered with arrays: they can be repeated."""
        if not message.content.array_records:
            return
        if way == "down":
            self._unanswered[message.metadata.message_id] = (message, time.monotonic())
        elif pending := self._unanswered.pop(message.metadata.reply_to_message_id, None):
            question, when = pending
            if time.monotonic() - when < REPEATED_WITHIN:
                self._repeatable = question

    def _wanted(self, node: int) -> bool:
        nodes = self._nodes.setdefault(self._round, [])
        if node not in nodes and len(nodes) < KEPT_NODES:
            nodes.append(node)
        return node in nodes and self._kept < KEPT_BYTES

    def _arrays(self, way: str, message: Message, shared: dict[int, str]) -> str:
        """Write a message's arrays to a file and return its name; messages that share their content share it."""
        if id(message.content) in shared:
            return shared[id(message.content)]
        name = f"{way}-{next(self._numbers):04d}.npz"
        self._kept += write_arrays(FOLDER / name, message)
        shared[id(message.content)] = name
        return name


def _seek_waiting() -> tuple[set[str], int]:
    """Name the functions that this thread is in, and tell how many clients Flower waits for, in whatever thread."""
    this_thread, count, callers = threading.get_ident(), 0, set()
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None:
            name = frame.f_code.co_name
            if name in WAITING and "flwr" in frame.f_globals.get("__name__", ""):
                count = max(count, int(frame.f_locals.get(WAITING[name]) or 0))
            if thread == this_thread:
                callers.add(name)
            frame = frame.f_back
    return callers, count


def _trains(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == "train"


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the app's own ServerApp until it ends, or as many rounds were seen as were asked for."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        settings.contain(SETTINGS)
        if SETTINGS["stand_in"]:
            from . import stand_ins  # noqa: PLC0415 (only where asked for)

            stand_ins.install(SETTINGS)
        tap = Tap(grid, SETTINGS["rounds"])
        settings.load(SETTINGS["component"])(tap, context)
        tap.repeat()
    except (Exception, SystemExit) as error:
        settings.note_problem(FOLDER, "server", error)
        raise
    else:
        settings.note(FOLDER, "ended.jsonl", {"ended": "by itself"})
