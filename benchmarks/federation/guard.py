"""Runs a SuperLink and makes sure that nothing of it outlives its owner, however the owner ends.

Started as ``python -m benchmarks.federation.guard HOME COMMAND...``. The owner holds the other end
of standard input; when that closes (on purpose, by Ctrl-C or by kill -9), everything that inherited
the environment of the SuperLink is stopped and its home folder removed.
"""

import ctypes
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

STOP_SECONDS = 3
POLL_SECONDS = 0.2
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(home: Path, command: list[str]) -> None:
    """Run ``command`` until it ends or standard input closes, then clean up."""
    _adopt_orphans()
    neutral = home / "empty"
    neutral.mkdir()
    log = home / "superlink.log"
    with log.open("wb") as output:
        superlink = subprocess.Popen(
            command, cwd=neutral, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    while superlink.poll() is None and not _owner_is_gone():
        pass
    if superlink.poll() is not None:
        print(*log.read_text(errors="replace").strip().splitlines()[-1:])  # noqa: T201 (read by the owner)
    superlink.terminate()
    psutil.wait_procs(_family(home), timeout=STOP_SECONDS)
    _kill_family(home)
    shutil.rmtree(home, ignore_errors=True)


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies (Linux), so that none gets out of sight.

    Ray's agents overwrite their environment and outlive their parent; nothing else would find them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _owner_is_gone() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _kill_family(home: Path) -> None:
    """Kill until nobody is left: a process may have started another one a moment before it died."""
    while family := _family(home):
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=STOP_SECONDS)


def _family(home: Path) -> set[psutil.Process]:
    """Living descendants, and whoever else inherited the SuperLink's environment; not the guard."""
    guard = psutil.Process()
    everybody = {process for process in psutil.process_iter() if _flower_home(process) == str(home)}
    return {p for p in everybody | set(guard.children(recursive=True)) if _is_alive(p)} - {guard}


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _flower_home(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("FLWR_HOME")
    except psutil.Error:
        return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
