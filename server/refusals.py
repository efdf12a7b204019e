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
        """That of a training run's folder."""
        return cls(folder / "refused.csv")

    def read(self) -> list[Refusal]:
        """All of them."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            _, *rows = csv.reader(file)
        return [
            Refusal(int(number), int(client) if client else None, unguard(reason)) for number, client, reason in rows
        ]

    def add(self, refusals: list[Refusal]) -> None:
        """Append."""
        if refusals:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write([*self.read(), *refusals])

    def keep_until(self, last: int) -> None:
        """Drop those of the rounds after a checkpoint: they will be played again."""
        if self.path.exists():
            self._write([refusal for refusal in self.read() if refusal.round <= last])

    def _write(self, refusals: list[Refusal]) -> None:
        with replacing(self.path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Refusal._fields)
            writer.writerows((refusal.round, refusal.client, guard(refusal.reason)) for refusal in refusals)
