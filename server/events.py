"""The events of a run, one JSON line each: the server's app writes them, the command that started it follows them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from fedmjp.config import RunConfig

Kind = Literal["round begun", "round done", "update refused", "picture skipped", "error", "end"]


class Event(NamedTuple):
    """A step of a run with its figures or reasons; of private data it holds nothing."""

    kind: str
    values: dict[str, Any]


class EventFile:
    """A file to which every event is appended at once, so that whoever follows it can read it right away.

    Args:
        path: Of the file, in a folder that exists; without one nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def of_run(cls, run: RunConfig) -> Self:
        """Return the file of a run.

        Args:
            run: Its configuration, which names the file.
        """
        return cls(Path(run.events_file) if run.events_file else None)

    def add(self, kind: Kind, **values: object) -> None:
        """Append an event.

        Args:
            kind: Of the event.
            values: Whatever JSON can hold.
        """
        if self._path is None:
            return
        line = json.dumps({"event": kind, **values}).encode() + b"\n"
        with self._path.open("a+b", buffering=0) as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            # A killed app may have left half a line, which stays one of its own.
            file.write(line if file.read(1) in (b"", b"\n") else b"\n" + line)


class EventReader:
    """Reads the events that are appended to a file from now on.

    Args:
        path: Of the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> Iterator[Event]:
        """Yield the events that were added since the last call; skip lines that are not whole."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict) and "event" in values:
                yield Event(str(values.pop("event")), values)
