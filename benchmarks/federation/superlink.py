"""A private Flower SuperLink in simulation mode: started for us, used by us, gone with us.

`flwr run` by itself starts a SuperLink that outlives the command, listens on one fixed port for
whoever comes, and installs the app's dependencies at run time. Here the SuperLink gets a free port,
a state folder of its own, an empty working directory (clients would import code from there first),
a secret that whoever gives it orders must know, and no permission to install anything.
"""

import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Self

from fedmjp.benchmarks import private_ray
from fedmjp.benchmarks.federation import locked_superlink
from fedmjp.benchmarks.federation.connection import Connection, free_port, program
from fedmjp.benchmarks.federation.guard import MODULE, PREFIX, end, end_abandoned, marked
from fedmjp.benchmarks.federation.locked_superlink import write_credentials
from fedmjp.errors import FederationError

CONNECTION = "private"
START_SECONDS = 60


class PrivateSuperLink(Connection):
    """A context manager around the SuperLink process and everything that it starts.

    A guard process stands between (``fedmjp.benchmarks.federation.guard``): it stops the SuperLink when we
    leave the context, and also when we are killed; ``home`` is a folder for temporary files that goes with it.
    Where both were killed, the next SuperLink on this machine stops what they left.

    Args:
        simulation: Whether clients are processes of Flower's simulation; else SuperNodes come by ``start_node``.
    """

    def __init__(self, *, simulation: bool = True) -> None:
        self._simulation, self._ray = simulation, private_ray.environment() if simulation else {}
        super().__init__(private_ray.socket_folder(PREFIX), CONNECTION)
        self._port = free_port()
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
            command: Takes the arguments of ``flower-supernode``; empty is that itself.
            number: Of its partition, from 0.
            log: File for its output.
        """
        arguments = [*(command or (program("flower-supernode"),)), "--insecure"]
        arguments += ["--superlink", f"127.0.0.1:{self._port}", "--port", str(free_port())]
        arguments += ["--node-config", f"partition-id={number} num-partitions={number + 1}"]
        with log.open("wb") as output:
            subprocess.Popen(
                arguments,
                cwd=self.home / "empty",
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def close(self) -> None:
        """Have the guard stop the SuperLink and whatever it started, and remove the temporary files."""
        if self._guard is not None:
            self._guard.communicate()  # closes its standard input, which is the sign to stop
            end(partial(marked, self.home))  # nobody is left, unless the guard was killed
        shutil.rmtree(self.home, ignore_errors=True)

    def _start(self) -> None:
        end_abandoned(self.home.parent)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{self._port}"\ninsecure = true\n'
        )
        secret = secrets.token_hex(32)
        write_credentials(self.home, f"127.0.0.1:{self._port}", secret)
        superlink = [sys.executable, "-P", "-m", locked_superlink.MODULE, "--insecure", "--host", "127.0.0.1"]
        superlink += ["--simulation"] if self._simulation else []
        superlink += ["--port", str(self._port), "--disable-runtime-dependency-installation"]
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(self.home), *superlink],
            env={**self.environment, locked_superlink.SECRET: secret, **self._ray},
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
