"""Runs systemd units as systemd would: the very commands in them, in their order, with their folders in memory."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RUNTIME = Path("/run")
INSTALLED = "/usr/local/bin/fedmjp"  # where a site's unit has the program of its installation


@dataclass(frozen=True)
class Unit:
    """A service as its file says it."""

    name: str
    command: list[str]
    directory: Path
    after: str
    memory: Path | None  # its RuntimeDirectory
    restarts: bool

    @classmethod
    def read(cls, path: Path) -> "Unit":
        """Parse a unit file, as systemd resolves it where the file lies."""
        lines = [line for line in path.read_text().splitlines() if line and line[0] not in "#["]
        values = dict(line.partition("=")[::2] for line in lines)
        values = {key: value.replace("%Y", str(path.parent)) for key, value in values.items()}
        memory = values.get("RuntimeDirectory")
        program, *arguments = shlex.split(values["ExecStart"])
        start = [sys.executable, "-P", "-m", "fedmjp"] if program == INSTALLED else [program]
        return cls(
            name=path.name,
            command=[*start, *arguments],
            directory=Path(values["WorkingDirectory"]),
            after=values["After"],
            memory=RUNTIME / memory if memory else None,
            restarts=values["Restart"] == "always" and values["StartLimitIntervalSec"] == "0",
        )


def read_units(folder: Path) -> Sequence[Unit]:
    """Read the units of a folder, each behind those that it comes after."""
    units = [Unit.read(path) for path in sorted(folder.glob("*.service"))]
    return sorted(units, key=lambda unit: unit.after in {other.name for other in units})


def environment() -> dict[str, str]:
    """Make the environment of a service: little but a PATH, without that of this installation."""
    kept = ("HOME", "LANG", "OMP_NUM_THREADS", "COVERAGE_PROCESS_START")
    return {**{name: os.environ[name] for name in kept if name in os.environ}, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
