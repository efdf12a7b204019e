"""A guard that runs a SuperLink and makes sure that nothing of it outlives its owner, however the owner ends.

Started as ``python -m fedmjp.benchmarks.federation.guard HOME COMMAND...``. The owner holds the other end
of standard input; when that closes (on purpose, by Ctrl-C or by kill -9), everything that inherited
the environment of the SuperLink is stopped and its home folder removed; and so when the SuperLink's own
SuperExec dies. If the guard itself is killed, the SuperLink ends with it, and the owner stops the rest; if both are
killed, the next owner does.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

MODULE = "fedmjp.benchmarks.federation.guard"
PREFIX = "flower-private-"  # of homes; an audited app reads it, and is not told whose it is
SUPEREXEC = ("flower-superexec", "flower-superexe")  # Linux keeps 15 letters of what is dead
STOP_SECONDS = 3
POLL_SECONDS = 0.2
# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(home: Path, command: list[str]) -> None:
    """Run a SuperLink until it ends or standard input closes, then clean up.

    Args:
        home: Its folder, which is removed.
        command: That starts it.
    """
    adopt_orphans()
    neutral = home / "empty"
    neutral.mkdir()
    log = home / "superlink.log"
    with log.open("wb") as output:
        superlink = subprocess.Popen(
            command,
            cwd=neutral,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )
    superexec = None
    while superlink.poll() is None and not _owner_is_gone():
        superexec = superexec or _superexec(superlink.pid)
        if superexec is not None and not is_alive(superexec):
            break  # the SuperLink does not notice, and its runs would wait for ever
    if superlink.poll() is not None:
        print(*log.read_text(errors="replace").strip().splitlines()[-1:])  # noqa: T201 (read by the owner)
    superlink.terminate()
    psutil.wait_procs(_family(home), timeout=STOP_SECONDS)
    end(partial(_family, home))
    shutil.rmtree(home, ignore_errors=True)


def end(find: Callable[[], set[psutil.Process]]) -> None:
    """Kill processes until there is none: one may have started another a moment before it died.

    Args:
        find: Finds those that live.
    """
    while family := find():
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=STOP_SECONDS)


def end_abandoned(folder: Path) -> None:
    """Stop the processes of SuperLinks whose guard and owner were killed.

    A server's app trains on without them, and would write into the folder of a run that is gone on with.

    Args:
        folder: Holds the homes of SuperLinks.
    """
    flower_homes = {_flower_home(process) or "" for process in psutil.process_iter()}
    for home in [Path(name) for name in flower_homes if name.startswith(str(folder / PREFIX))]:
        if not any(_is_guard(process) for process in marked(home)):
            end(partial(marked, home))
            shutil.rmtree(home, ignore_errors=True)


def marked(home: Path) -> set[psutil.Process]:
    """Find the living processes that inherited a SuperLink's environment, and those that they have started.

    Args:
        home: Of the SuperLink.
    """
    heirs = [process for process in psutil.process_iter() if _flower_home(process) == str(home)]
    return {process for heir in heirs for process in (heir, *below(heir)) if is_alive(process)}


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies (Linux), so that none gets out of sight.

    Ray's agents overwrite their environment and outlive their parent; nothing else would find them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_with_parent() -> None:
    """Die with the parent (Linux): a SuperLink without a guard would train on beside the next one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _superexec(superlink: int) -> psutil.Process | None:
    """Find the process that starts a SuperLink's apps; None before it runs."""
    try:
        return next((child for child in psutil.Process(superlink).children() if child.name() in SUPEREXEC), None)
    except psutil.NoSuchProcess:
        return None


def _owner_is_gone() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _family(home: Path) -> set[psutil.Process]:
    """Find the guard's living descendants, and whoever else inherited the SuperLink's environment."""
    guard = psutil.Process()
    return {process for process in marked(home) | set(below(guard)) if is_alive(process)} - {guard}


def below(process: psutil.Process) -> list[psutil.Process]:
    """List the descendants of a process; none if it has ended.

    Args:
        process: Any.
    """
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Tell whether a process runs, and does not only wait to be reaped.

    Args:
        process: Any.
    """
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_guard(process: psutil.Process) -> bool:
    try:
        return MODULE in process.cmdline()
    except psutil.Error:
        return False


def _flower_home(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("FLWR_HOME")
    except psutil.Error:
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
