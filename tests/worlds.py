"""A small network on this machine: a server and sites, each with a network of its own, gone with the test process.

Everything lives in a PID namespace whose first process dies with the test's, and takes all others with it.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import psutil

from fedmjp.benchmarks.deployment.rendering import PROGRAM_PATHS
from tests.units import Unit, environment

PR_SET_PDEATHSIG = 1  # linux/prctl.h
SERVER = "10.77.0.1"
# Adopts whoever is left behind, and is told of nobody's end.
FIRST = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('ready', flush=True); signal.pause()"


@cache
def lacking() -> str | None:
    """Why this machine can hold no such network."""
    if not (shutil.which("nginx") or shutil.which("nginx", path=PROGRAM_PATHS)):
        return "nginx is not installed"
    missing = [name for name in ("unshare", "nsenter", "ip", "openssl") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    command = ["unshare", "--net", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-ec"]
    asked = "ip link add br0 type bridge; mount -t tmpfs none /mnt"
    made = subprocess.run([*command, asked], capture_output=True, check=False)
    return "no right to make network namespaces" if made.returncode else None


class World:
    """A server in one network, and sites in others; the server is at ``SERVER``."""

    def __init__(self, sites: Sequence[str], folder: Path) -> None:
        self.sites, self.folder = sites, folder
        self.server: Any = None  # whoever runs the server's programs
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        self._unshare = subprocess.Popen(
            [*command, sys.executable, "-c", FIRST], stdout=subprocess.PIPE, preexec_fn=_die_with_parent
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == b"ready\n"
        (first,) = psutil.Process(self._unshare.pid).children()
        self._enter = ["nsenter", "--target", str(first.pid), "--net", "--pid", "--mount", f"--wd={self.folder}", "--"]
        lines = [
            "mount -t tmpfs none /run",
            "mount -t tmpfs none /dev/shm",
            "ip link set lo up",
            "ip link add br0 type bridge",
        ]
        lines += [f"ip addr add {SERVER}/24 dev br0", "ip link set br0 up"]
        for number, site in enumerate(self.sites):
            at = f"ip -n {site}"
            lines += [f"ip netns add {site}", f"ip link add v{number} type veth peer name eth0 netns {site}"]
            lines += [f"ip link set v{number} master br0 up", f"{at} addr add 10.77.0.{number + 2}/24 dev eth0"]
            lines += [f"{at} link set eth0 up", f"{at} link set lo up"]
        self.run("sh", "-ec", "; ".join(lines))
        return self

    def __exit__(self, *_: object) -> None:
        self._unshare.kill()  # and with it the first process, and all
        self._unshare.wait()
        for process in self._started:
            process.kill()  # nsenter stops itself with what it started, and would hear of no end
            process.wait()

    def run(self, *command: str, site: str | None = None, **named: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end, at the server or at a site; it must succeed unless ``check=False``."""
        named = {"check": True, "capture_output": True, "text": True, **named}
        try:
            return subprocess.run([*self._place(site), *command], **named)
        except subprocess.CalledProcessError as error:
            raise AssertionError(f"{command}: {error.stdout}{error.stderr}") from None

    def fedmjp(self, *arguments: str, site: str | None = None, **named: Any) -> "subprocess.CompletedProcess[str]":
        """Run our command line."""
        return self.run(*_fedmjp(arguments), site=site, **named)

    def start(self, *arguments: str, log: Path, site: str | None = None) -> "subprocess.Popen[bytes]":
        """Start our command line, which goes on; it is the leader of its own session."""
        return self._start(_fedmjp(arguments), log, site, {**os.environ, "OMP_NUM_THREADS": "1"})

    def start_unit(self, unit: Unit, log: Path, site: str | None = None) -> "subprocess.Popen[bytes]":
        """Start what a unit says, in its directory and with hardly any environment."""
        command = ["env", f"--chdir={unit.directory}", *unit.command]
        return self._start(command, log, site, environment())

    def _start(
        self,
        command: Sequence[str],
        log: Path,
        site: str | None,
        variables: Mapping[str, str],
    ) -> "subprocess.Popen[bytes]":
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self._place(site), *command],
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._started.append(process)
        return process

    def signal(self, process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
        """Send a signal to a process that was started, and to all that it started."""
        started = psutil.Process(process.pid)
        for each in started.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # short-lived ones come and go
                each.send_signal(number)
        started.send_signal(number)
        if number == signal.SIGTERM:  # nsenter stops with its child, and may have missed that the child goes on
            started.send_signal(signal.SIGCONT)

    def _place(self, site: str | None) -> list[str]:
        return [*self._enter, *([] if site is None else ["ip", "netns", "exec", site])]


def _fedmjp(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "fedmjp", *arguments]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os._exit(1)
