"""Flower's programs on this machine: their environment, and what `flwr` asks a SuperLink for."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedmjp.errors import FederationError
from fedmjp.wire import FAILED, PLAYED

# Seconds that a run's processes may take to end after the server's last word; one that hangs never does.
GRACE = 60.0


class Connection:
    """Asks a SuperLink by Flower's command line.

    Args:
        home: Folder with Flower's config.toml, which holds the connection.
        name: Of the connection there.
    """

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name = home, name
        self.environment = environment(home)

    def submit(self, app: Path, run_config: Path, federation_config: str | None = None) -> str:
        """Start a run of an app's folder, with its run-config as a TOML file and the federation as `flwr run` takes it.

        Returns:
            The run's identifier.

        Raises:
            FederationError: If Flower refuses the app.
        """
        arguments = ["run", str(app), self.name, "--format", "json"]
        arguments += ["--run-config", str(run_config)]
        arguments += [] if federation_config is None else ["--federation-config", federation_config]
        answer = self.ask(*arguments)
        if not answer.get("success"):
            raise FederationError(f"Flower refused the run: {_one_line(answer.get('error-message', answer))}")
        return str(answer["run-id"])

    def log(self, run: str) -> Iterator[str]:
        """The run's log, line by line, until the run ends, or should have ended after the server's last word."""
        with subprocess.Popen(
            [program("flwr"), "log", run, self.name, "--stream"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None  # noqa: S101 (a pipe was asked for)
            last = threading.Timer(GRACE, process.kill)
            try:
                for line in process.stdout:
                    yield line.rstrip("\n")
                    if (FAILED in line or PLAYED in line) and not last.is_alive():
                        last.start()
            finally:
                last.cancel()
                process.kill()

    def status(self, run: str) -> str:
        """The run's status, such as "finished:completed" or "finished:failed"."""
        answer = self.ask("ls", self.name, "--run-id", run, "--format", "json")
        if not answer.get("runs"):
            said = _one_line(answer.get("error-message", answer))
            raise FederationError(f"Flower does not know the run any more: {said}")
        return str(answer["runs"][0]["status"])

    def ask(self, *arguments: str) -> dict[str, Any]:
        """What a command of `flwr` answers in JSON; FederationError if it answers something else."""
        done = subprocess.run(
            [program("flwr"), *arguments],
            check=False,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            said = _one_line(done.stderr or done.stdout) or "it printed nothing"
            raise FederationError(f"flwr {arguments[0]} failed: {said}") from None
        return answer


def _one_line(said: object) -> str:
    return " ".join(str(said).split())


def environment(home: Path) -> dict[str, str]:
    """Of every program of Flower: its home, nothing told to anybody, nothing installed, nothing asked of a proxy."""
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {
        **inherited,
        # Everything here is on this machine.
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_TMPDIR": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Flower starts its other programs by name.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def program(name: str) -> str:
    """Where one of Flower's programs lies; FederationError if it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FederationError(f"the program {name!r} of the package flwr is not installed beside {sys.executable}")
    return found


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
