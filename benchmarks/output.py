"""The folder that a run writes into."""

import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.federation.simulation import RunFolder
from benchmarks.pictures import PictureFolder
from fedmjp.errors import OutputError


@dataclass(frozen=True)
class OutputFolder:
    """Names of what lies in it."""

    root: Path

    @property
    def database(self) -> Path:
        """The trials."""
        return self.root / "trials.sqlite"

    @property
    def pictures(self) -> PictureFolder:
        """Originals and reconstructions."""
        return PictureFolder(self.root / "pictures")

    @property
    def run(self) -> RunFolder:
        """Records of the federated run; removed when no trial needs them any more."""
        return RunFolder(self.root / "run")

    def prepare(self, *, fresh: bool) -> None:
        """Make the folder, or empty it of what a former run left.

        Raises:
            OutputError: If it cannot be written.
        """
        prepare_folder(self.root)
        if fresh:
            self._remove_former()

    def _remove_former(self) -> None:
        for database_file in self.root.glob("trials.sqlite*"):
            database_file.unlink()
        for folder in (self.pictures.root, self.run.root):
            if folder.exists():
                shutil.rmtree(folder)


def prepare_folder(folder: Path) -> None:
    """Make a folder and check that files can be written there; OutputError if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror or error}; name another --output") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON, whole or not at all."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
