"""Whether a campaign's memory grows as trials go by: of its processes together, from its first minute to its last.

``python -m fedmjp.benchmarks.performance.campaign_memory --campaign FILE --data FOLDER --output DIR --json FILE``

The campaign is run by its command, in the folder that ``--output`` names; with ``--database URL`` instead by one worker
of an empty PostgreSQL database, whose own memory does not count. What processes share counts once (PSS).
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer

from fedmjp.benchmarks.scripts import Json, keep_figures
from fedmjp.errors import BadInputError, FedmjpError
from fedmjp.running import run_function

SAMPLE_SECONDS = 2.0
SPAN_SECONDS = 300.0  # samples of so long are one row
GIGABYTE = 1e9


def main(
    json: Json,
    campaign: Annotated[Path, typer.Option(help="The campaign's file.")],
    data: Annotated[Path, typer.Option(help="Folder of its pictures.", metavar="FOLDER")],
    output: Annotated[Path | None, typer.Option(help="Folder that its results go to.", metavar="DIR")] = None,
    database: Annotated[
        str | None, typer.Option(help="That its results go to instead, one worker's.", metavar="URL")
    ] = None,
    pictures: Annotated[int | None, typer.Option(min=1, help="So many instead of the file's.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that run its trials in a folder.")] = 1,
) -> None:
    """Run the campaign and look at its memory all along."""
    if (output is None) is (database is None):
        raise BadInputError("give either --output or --database")
    program, asked = [sys.executable, "-m", "fedmjp", "campaign"], [str(campaign), f"data.source={data}"]
    asked += [f"data.pictures={pictures}"] if pictures else []
    environment = {**os.environ, "FEDMJP_DATABASE": database or ""}  # no command line shows its password
    if database:
        subprocess.run([*program, "start", *asked], env=environment, check=True)
        command = [*program, "work"]
    else:
        command = [*program, "run", *asked, "--output", str(output), "--workers", str(workers)]
    began = time.perf_counter()
    spans: dict[int, list[float]] = {}
    with subprocess.Popen(command, env=environment) as process:
        while process.poll() is None:
            passed = time.perf_counter() - began
            spans.setdefault(int(passed // SPAN_SECONDS), []).append(memory_below(process.pid))
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise FedmjpError(f"the campaign ended with exit code {process.returncode}; what it printed says why")
    rows = [
        {
            "minutes": number * SPAN_SECONDS / 60,
            "median_gb": round(median(held), 3),
            "largest_gb": round(max(held), 3),
        }
        for number, held in spans.items()
    ]
    keep_figures(json, {"minutes": round((time.perf_counter() - began) / 60, 1), "spans": rows}, {})


def memory_below(pid: int) -> float:
    """Gigabytes of a process and those below it; of those that have ended, none."""
    held = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                held += int(process.memory_full_info().pss)
    return held / GIGABYTE


if __name__ == "__main__":
    run_function(main)
