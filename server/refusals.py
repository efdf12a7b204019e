"""The list of replies that were refused."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from fedmjp.files import replacing
from fedmjp.texts import guard, unguard


class Refusal(NamedTuple):
    """A client whose reply was not used in a round, and why; None for a node that is no client, or for all of them."""

    round: int
    client: int | None
    reason: str

    def __str__(self) -> str:
        who = "" if self.client is None else f"client {self.client} in "
        return f"{who}round {self.round}: {self.reason}"


@dataclass(frozen=True)
class RefusalFile:
    """A CSV file with a line per refusal; it does not exist where nothing was refused."""

    path: Path

    @classmethod
    def of_run(cls, folder: Path) -> Self:
        """Return the file of a training run.

        Args:
            folder: The run's folder.
        """
        return cls(folder / "refused.csv")

    def read(self) -> list[Refusal]:
        """Read all refusals, in the order of rounds; none where the file does not exist."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            _, *rows = csv.reader(file)
        return [
            Refusal(int(number), int(client) if client else None, unguard(reason)) for number, client, reason in rows
        ]

    def add(self, refusals: list[Refusal]) -> None:
        """Append refusals to the file.

        Args:
            refusals: New ones; none leaves the file as it is.
        """
        if refusals:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write([*self.read(), *refusals])

    def keep_until(self, last: int) -> None:
        """Drop the refusals of rounds after a checkpoint, which will be played again.

        Args:
            last: The checkpoint's round.
        """
        if self.path.exists():
            self._write([refusal for refusal in self.read() if refusal.round <= last])

    def _write(self, refusals: list[Refusal]) -> None:
        with replacing(self.path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Refusal._fields)
            writer.writerows((refusal.round, refusal.client, guard(refusal.reason)) for refusal in refusals)
