"""Seconds, memory and disk of `fedmjp quickstart`, all its processes together.

``python -m fedmjp.benchmarks.performance.quickstart --json FILE``
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import typer

from fedmjp.benchmarks.scripts import Json, keep_figures
from fedmjp.running import run_function

SAMPLE_SECONDS = 0.5
COMMAND = [sys.executable, "-c", "from fedmjp.cli import main; main()", "quickstart"]


def main(json: Json) -> None:
    """Run quickstart once in a temporary folder and measure it from outside."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results"
        started, memory, disk = time.monotonic(), 0, 0
        with subprocess.Popen([*COMMAND, "--output", str(output)], stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                memory = max(memory, proportional_memory(process.pid))
                disk = max(disk, size(output))
                time.sleep(SAMPLE_SECONDS)
        if process.returncode:
            raise typer.Exit(process.returncode)
        figures = {
            "seconds": round(time.monotonic() - started, 1),
            "peak_memory_gb": round(memory / 1e9, 2),
            "peak_disk_gb": round(disk / 1e9, 2),
            "left_on_disk_gb": round(size(output) / 1e9, 3),
        }
    keep_figures(json, figures, {"runs": 1})


def proportional_memory(root: int) -> int:
    """Bytes of a process and its descendants; memory that several share counts once (Linux: PSS)."""
    total = 0
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def size(folder: Path) -> int:
    """Bytes of all files below a folder that are there when they are looked at."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


if __name__ == "__main__":
    run_function(main)
