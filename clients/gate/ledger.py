"""What a site's gate decided, one line of JSON per message, in a file that outlives restarts.

A line is on the disk before what it speaks of leaves. A last line without an end is of a crash: nothing left then.
Lines hold counts, names and verdicts, never pictures, labels or features.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

from pydantic import ConfigDict, Field

from fedmjp.clients.gate.reasons import Reason, RefusedError
from fedmjp.config import Config
from fedmjp.errors import ConfigError, DefenceError

Verdict = Literal["passed", "defended", "refused"]


class Outcome(Config):
    """What an attack made of an upload, as counts."""

    attack: str
    of: Literal["pictures", "features", "labels"]
    came_back: int = Field(ge=0)
    among: int = Field(ge=0)
    reason: str = ""  # why it does not apply


class Entry(Config):
    """One message and what became of its reply."""

    model_config = ConfigDict(strict=True)

    time: str = ""  # UTC, of the writing
    place: Literal["app", "node"] = "app"  # beside the app, or in the SuperNode
    run: int
    node: int = 0
    round: str
    kind: str  # of the message
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    pictures: int | None = None  # distinct ones that were seen; None where none were
    steps: int | None = None
    outcomes: tuple[Outcome, ...] = ()
    checks: tuple[str, ...] = ()  # what was suspicious of the model that came in
    not_judged: int = 0  # bytes of arrays that did not come in: a channel that is open
    form: str = ""  # SHA-256 of names, types and shapes of the arrays that leave, where some are not judged
    leaves: tuple[str, ...] = ()
    policy: str = ""  # SHA-256 of the policy that was accepted
    bits: int = 0  # in clear
    reply_form: str = ""  # digest of which records, names and lengths the reply has
    sha256: str = ""  # of the arrays that leave
    multiplier: float | None = None  # of the noise
    seconds: float = 0.0


class GateLedger:
    """Appends entries and reads them; several processes may share the file.

    Raises:
        ConfigError: If its folder does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.absolute().parent.is_dir():
            raise ConfigError(f"ledger {str(path)!r}: its folder does not exist; make it first")

    def append(
        self, entry: Entry, *, delta: float = 1e-5, budget: float | None = None, run_bits: int | None = None
    ) -> float | None:
        """Write an entry, so that it outlives a crash.

        Args:
            entry: What was decided about a message.
            delta: At which epsilon is stated.
            budget: Epsilon of all defended uploads that must not be exceeded; None counts only.
            run_bits: In clear of all replies of a run that must not be exceeded; None counts only.

        Returns:
            Epsilon of all defended uploads, if this one has noise.

        Raises:
            RefusedError: If the run's bits in clear do not allow it.
            DefenceError: If the budget does not allow it, or the file is damaged or cannot be written. Nothing may
                leave then.
        """
        try:
            with self._locked() as file:
                epsilon = None
                if entry.multiplier is not None:
                    epsilon = compose_epsilon([*self._parse(file), entry], delta)
                    if budget is not None and epsilon > budget:
                        raise DefenceError(f"the privacy budget, epsilon {budget:g}, does not allow another upload")
                if run_bits is not None and entry.bits + sum_bits(self._parse(file), entry) > run_bits:
                    raise RefusedError(Reason.RUN_BITS)
                self._end_of_whole_lines(file)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                file.write(entry.model_copy(update={"time": now}).model_dump_json(exclude_defaults=True) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DefenceError(f"the ledger cannot be used: {error.strerror}") from error
        return epsilon

    def entries(self) -> list[Entry]:
        """Read all entries.

        Raises:
            DefenceError: If the file is damaged or cannot be read.
        """
        try:
            with self.path.open() as file:
                return self._parse(file)
        except OSError as error:
            raise DefenceError(f"the ledger {self.path} cannot be read: {error.strerror}") from error

    def approved(self, sha256: str, run: int) -> bool:
        """Tell whether the gate beside the app let these arrays pass in this run.

        Args:
            sha256: Of the arrays.
            run: Identifier of the run.
        """
        return any(
            entry.sha256 == sha256 and entry.run == run and entry.place == "app" and entry.verdict != "refused"
            for entry in self.entries()
        )

    def first_form(self, run: int) -> str | None:
        """Return the form of the first arrays that left in a run and were not judged.

        Args:
            run: Identifier of the run.
        """
        if not self.path.exists():
            return None
        passed = (entry for entry in self.entries() if entry.verdict != "refused" and entry.place == "app")
        return next((entry.form for entry in passed if entry.run == run and entry.form), None)

    def _parse(self, file: TextIO) -> list[Entry]:
        file.seek(0)
        entries = []
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break  # of a crash: it was not yet said to be written
            try:
                entries.append(Entry.model_validate_json(line))
            except ValueError as error:
                raise DefenceError(
                    f"the ledger is damaged in line {number}, so nobody knows what left; restore it from a copy, or "
                    "start a new one"
                ) from error
        return entries

    def _end_of_whole_lines(self, file: TextIO) -> None:
        """Remove what a crash left of a line, and go to the end."""
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            content = os.pread(file.fileno(), end, 0)
            file.truncate(content.rfind(b"\n") + 1)
            file.seek(0, os.SEEK_END)

    @contextmanager
    def _locked(self) -> Iterator[TextIO]:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            yield file


def sum_bits(entries: Sequence[Entry], like: Entry) -> int:
    """Add up the bits in clear that a node's replies of a run held.

    Args:
        entries: Of the ledger.
        like: Has the run, the node and the place.
    """
    return sum(entry.bits for entry in entries if _stream(entry) == _stream(like))


def find_last_form(entries: Sequence[Entry], like: Entry) -> str:
    """Find the form of a node's last reply of a kind in a run; empty before the first.

    Args:
        entries: Of the ledger.
        like: Has the run, the node, the place and the kind.
    """
    forms = (
        entry.reply_form for entry in reversed(entries) if _stream(entry) == _stream(like) and entry.kind == like.kind
    )
    return next((form for form in forms if form), "")


def _stream(entry: Entry) -> tuple[int, int, str]:
    return entry.run, entry.node, entry.place


def compose_epsilon(entries: Sequence[Entry], delta: float) -> float:
    """Compose the epsilon of all uploads with noise; z and z' cost what one with (z^-2 + z'^-2)^-1/2 costs.

    Args:
        entries: Of the ledger.
        delta: At which epsilon is stated.
    """
    inverse = sum(entry.multiplier**-2 for entry in entries if entry.multiplier is not None)
    if not inverse:
        return 0.0
    from fedmjp.defences.accounting import composed_epsilon  # noqa: PLC0415 (imports for a second)

    return composed_epsilon(inverse**-0.5, delta, 1)


def dump_entries(entries: Sequence[Entry]) -> str:
    """Write entries as one JSON document.

    Args:
        entries: Of the ledger.
    """
    return json.dumps([entry.model_dump(mode="json") for entry in entries], indent=1)
