"""Flower's programs on this machine: their environment, and what `flwr` asks a SuperLink for."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedmjp.errors import FederationError


class Connection:
    """A way to ask a SuperLink, by Flower's command line.

    Args:
        home: Folder with Flower's config.toml, which holds the connection.
        name: The connection's in that file.
    """

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name = home, name
        self.environment = environment(home)

    def submit(self, app: Path, run_config: Path, federation_config: str | None = None) -> str:
        """Start a run of an app and return the run's identifier.

        Args:
            app: The app's folder.
            run_config: A TOML file.
            federation_config: As `flwr run` takes it; None leaves the SuperLink's own.

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
        """Yield the lines of a run's log until the run ends.

        Args:
            run: Identifier of the run.
        """
        with self.streamed_log(run, subprocess.PIPE) as process:
            assert process.stdout is not None  # noqa: S101 (a pipe was asked for)
            for line in process.stdout:
                yield line.decode(errors="replace").rstrip("\n")

    @contextmanager
    def streamed_log(self, run: str, output: IO[bytes] | int) -> Iterator["subprocess.Popen[bytes]"]:
        """Start a process that writes a run's log and ends with the run; end it with the context.

        Args:
            run: Identifier of the run.
            output: What it writes to, as ``subprocess`` takes it.
        """
        with subprocess.Popen(
            [program("flwr"), "log", run, self.name, "--stream"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def status(self, run: str) -> str:
        """Return a run's status, such as "finished:completed" or "finished:failed".

        Args:
            run: Identifier of the run.

        Raises:
            FederationError: If Flower does not know the run.
        """
        answer = self.ask("ls", self.name, "--run-id", run, "--format", "json")
        if not answer.get("runs"):
            reason = _one_line(answer.get("error-message", answer))
            raise FederationError(f"Flower does not know the run any more: {reason}")
        return str(answer["runs"][0]["status"])

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run a command of `flwr` and return its answer, which is JSON.

        Args:
            arguments: Of the command.

        Raises:
            FederationError: If it answers something else.
        """
        answered = subprocess.run(
            [program("flwr"), *arguments],
            check=False,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        try:
            answer: dict[str, Any] = json.loads(answered.stdout)
        except json.JSONDecodeError:
            reason = _one_line(answered.stderr or answered.stdout) or "it printed nothing"
            raise FederationError(f"flwr {arguments[0]} failed: {reason}") from None
        return answer


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def environment(home: Path) -> dict[str, str]:
    """Build the environment of Flower's programs: without telemetry, installations and proxies.

    Args:
        home: Flower's home folder.
    """
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
    """Find one of Flower's programs.

    Args:
        name: Of the program.

    Raises:
        FederationError: If it is not installed.
    """
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise FederationError(f"the program {name!r} of the package flwr is not installed beside {sys.executable}")
    return path


def free_port() -> int:
    """Find a port of this machine that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
