"""A private Flower SuperLink in simulation mode: started for us, used by us, gone with us.

`flwr run` by itself starts a SuperLink that outlives the command, listens on one fixed port for
whoever comes, and installs the app's dependencies at run time. Here the SuperLink gets a free port,
a state folder of its own, an empty working directory (clients would import code from there first)
and no permission to install anything.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from fedmjp.errors import FederationError

CONNECTION = "private"
START_SECONDS = 60


class PrivateSuperLink:
    """Context manager around the SuperLink process and everything that it starts.

    A guard process stands between (``benchmarks.federation.guard``): it stops the SuperLink when we
    leave the context, and also when we are killed; ``home`` is a folder for temporary files that goes with it.

    Args:
        simulation: Whether clients are processes of Flower's simulation; else SuperNodes come by ``start_node``.
    """

    def __init__(self, *, simulation: bool = True) -> None:
        self._simulation = simulation
        self.home = Path(tempfile.mkdtemp(prefix="fedmjp-", dir=_short_folder()))
        self._port = _free_port()
        self._environment = _environment(self.home)
        self._guard: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_node(self, *command: str, number: int, log: Path) -> None:
        """Start a SuperNode of this SuperLink; it goes with it.

        Args:
            command: What takes the arguments of ``flower-supernode``; empty is that itself.
            number: From 0; its partition.
            log: File for what it prints.
        """
        arguments = [*(command or (_program("flower-supernode"),)), "--insecure"]
        arguments += ["--superlink", f"127.0.0.1:{self._port}", "--port", str(_free_port())]
        arguments += ["--node-config", f"partition-id={number} num-partitions={number + 1}"]
        with log.open("wb") as output:
            subprocess.Popen(
                arguments,
                cwd=self.home / "empty",
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def submit(self, app: Path, run_config: Path, federation_config: str | None = None) -> str:
        """Start a run of an app's folder, with its run-config as a TOML file and the federation as `flwr run` takes it.

        Returns:
            The run's identifier.

        Raises:
            FederationError: If Flower refuses the app.
        """
        arguments = ["run", str(app), CONNECTION, "--format", "json"]
        arguments += ["--run-config", str(run_config)]
        arguments += [] if federation_config is None else ["--federation-config", federation_config]
        answer = self._flwr(*arguments)
        if not answer.get("success"):
            raise FederationError(f"Flower refused the run: {answer.get('error-message', answer)}")
        return str(answer["run-id"])

    def log(self, run: str) -> Iterator[str]:
        """The run's log, line by line, until the run ends."""
        with subprocess.Popen(
            [_program("flwr"), "log", run, CONNECTION, "--stream"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None  # noqa: S101 (a pipe was asked for)
            try:
                yield from (line.rstrip("\n") for line in process.stdout)
            finally:
                process.kill()

    def status(self, run: str) -> str:
        """The run's status, such as "finished:completed" or "finished:failed"."""
        answer = self._flwr("ls", CONNECTION, "--run-id", run, "--format", "json")
        if not answer.get("runs"):
            raise FederationError(f"Flower does not know the run any more: {answer.get('error-message', answer)}")
        return str(answer["runs"][0]["status"])

    def close(self) -> None:
        """Have the guard stop the SuperLink and whatever it started, and remove the temporary files."""
        if self._guard is not None:
            self._guard.communicate()  # closes its standard input, which is the sign to stop
        shutil.rmtree(self.home, ignore_errors=True)

    def _start(self) -> None:
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{self._port}"\ninsecure = true\n'
        )
        superlink = [_program("flower-superlink"), "--insecure", "--host", "127.0.0.1"]
        superlink += ["--simulation"] if self._simulation else []
        superlink += ["--port", str(self._port), "--disable-runtime-dependency-installation"]
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.federation.guard", str(self.home), *superlink],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches us alone; we then stop the rest in order
        )
        self._wait_until_healthy(self._guard)

    def _wait_until_healthy(self, guard: subprocess.Popen[str]) -> None:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and guard.poll() is None:
            try:
                with direct.open(f"http://127.0.0.1:{self._port}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        last_words, _ = guard.communicate()
        raise FederationError(f"the Flower SuperLink did not start: {last_words.strip() or 'it printed nothing'}")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [_program("flwr"), *arguments],
            check=False,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError:
            raise FederationError(f"flwr {arguments[0]} failed: {(done.stderr or done.stdout).strip()}") from None
        return answer


def _short_folder() -> str | None:
    """A folder for sockets: Ray's paths must stay under 107 characters, whatever TMPDIR says."""
    return "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 (mkdtemp makes a private folder in it)


def _environment(home: Path) -> dict[str, str]:
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


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        raise FederationError(f"the program {name!r} of the package flwr is not installed beside {sys.executable}")
    return program


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
