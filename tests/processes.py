"""Looks at processes that may end meanwhile."""

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    ip: str
    port: int


def alive(process: psutil.Process) -> bool:
    """Whether it runs; one that waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> tuple[str, list[str]] | None:
    """Its name and command line, none of one that waits to be reaped; None if it has ended."""
    try:
        about = process.as_dict(["name", "cmdline"])
    except psutil.NoSuchProcess:
        return None
    return about["name"], about["cmdline"] or []


def wait_until(holds: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)


def listeners(processes: Iterable[psutil.Process]) -> set[Listener]:
    """Where they listen for connections."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections("inet")
            addresses = (each.laddr for each in connections if each.status == psutil.CONN_LISTEN)
            found |= {Listener(address.ip.removeprefix("::ffff:"), address.port) for address in addresses}
    return found


def heed_interrupts() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
