"""The folder that a run writes into."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmjp.benchmarks.folder.pictures import PictureFolder
from fedmjp.claims import claim_folder
from fedmjp.files import SQLITE, replacing

if TYPE_CHECKING:
    from fedmjp.benchmarks.federation.simulation import RunFolder
    from fedmjp.benchmarks.folder.store import Store

OF_AN_ATTACK = ("scores.csv", "reconstructions.jpg")


@dataclass(frozen=True)
class OutputFolder:
    """Names of what lies in it."""

    root: Path

    @property
    def database(self) -> Path:
        """Return the file of trials."""
        return self.root / "trials.sqlite"

    def store(self, database: str = "") -> Store:
        """Open the trials.

        Args:
            database: URL; the folder's own file if empty.
        """
        from fedmjp.benchmarks.folder.store import Store  # noqa: PLC0415 (an attack does without a database)

        return Store.open(database) if database else Store.at(self.database)

    @property
    def pictures(self) -> Path:
        """Return the folder of originals and reconstructions."""
        return self.kept.folder

    @cached_property
    def kept(self) -> PictureFolder:
        """Return the same folder, for whoever writes and deletes in it."""
        return PictureFolder(self.root)

    @property
    def run(self) -> RunFolder:
        """Return the records of the federated run, which go when no trial needs them any more."""
        from fedmjp.benchmarks.federation.simulation import RunFolder  # noqa: PLC0415 (it brings torch)

        return RunFolder(self.root / "run")

    def prepare(self, *, fresh: bool) -> None:
        """Make the folder ours.

        Args:
            fresh: Whether to delete what a former run of ours wrote into it, and nothing else.

        Raises:
            OutputError: If it cannot be written, or holds what is not ours.
        """
        claim_folder(self.root)
        if fresh:
            if self.database.exists():
                from fedmjp.benchmarks.folder.store import require_ours  # noqa: PLC0415 (as above)

                require_ours(self.database)
            for name in (*(f"{self.database.name}{end}" for end in SQLITE), *OF_AN_ATTACK):
                (self.root / name).unlink(missing_ok=True)
            self.kept.clear()
            self.run.clear()


def write_text(path: Path, content: str) -> None:
    """Write a text file, whole or not at all.

    Args:
        path: The file.
        content: Its text.
    """
    with replacing(path) as partial:
        partial.write_text(content, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON, whole or not at all.

    Args:
        path: The file.
        content: Its values.
    """
    write_text(path, json.dumps(content, indent=2) + "\n")
