"""Runs a SuperLink and makes sure that nothing of it outlives its owner, however the owner ends.

Started as ``python -m benchmarks.federation.guard HOME COMMAND...``. The owner holds the other end
of standard input; when that closes (on purpose, by Ctrl-C or by kill -9), everything that inherited
the environment of the SuperLink is stopped and its home folder removed.
"""

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

STOP_SECONDS = 3
POLL_SECONDS = 0.2


def main(home: Path, command: list[str]) -> None:
    """Run ``command`` until it ends or standard input closes, then clean up."""
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
    stop_all(superlink, home)
    shutil.rmtree(home, ignore_errors=True)


def stop_all(superlink: subprocess.Popen[bytes], home: Path) -> None:
    """Let the SuperLink end in order for a moment, then kill whatever is left of it and its run."""
    family = set(psutil.Process().children(recursive=True))
    superlink.terminate()
    _, alive = psutil.wait_procs(family | _orphans(home), timeout=STOP_SECONDS)
    while alive:
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=STOP_SECONDS)
        alive = list(_orphans(home))


def _owner_is_gone() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _orphans(home: Path) -> set[psutil.Process]:
    """Who inherited this SuperLink's environment, whoever the parent is by now, but not the guard."""
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return {process for process in others if _environment(process).get("FLWR_HOME") == str(home)}


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
