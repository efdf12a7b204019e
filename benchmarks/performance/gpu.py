"""What a GPU makes of it: tests, matrix rates, closed forms, training and gradient matching, in one call.

``python -m fedmjp.benchmarks.performance.gpu --pictures FOLDER --json FILE --minutes 8``

Each part is written as soon as it is done, and one that fails leaves its error and does not stop the others. On a CPU,
``--n 4`` shows that it runs; its figures say nothing there.
"""

import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fedmjp import provenance
from fedmjp.benchmarks.folder.output import write_json
from fedmjp.benchmarks.performance import gpu_closed_forms, gpu_matching, gpu_rates, gpu_tests, gpu_training
from fedmjp.benchmarks.performance.gpu_work import Work
from fedmjp.benchmarks.scripts import Json, Pictures, command_line
from fedmjp.errors import UnknownNameError
from fedmjp.running import run_function

# By what a run that is cut should have.
PARTS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "rates": gpu_rates.measure,
    "closed_forms": gpu_closed_forms.measure,
    "training_uncompiled": partial(gpu_training.measure, arm="uncompiled"),
    "tests": gpu_tests.measure,
    "training_none": partial(gpu_training.measure, arm="none"),
    "matching": gpu_matching.measure,
    "training_mjp": partial(gpu_training.measure, arm="mjp"),
    "training_bare": partial(gpu_training.measure, arm="bare"),
    "training_mjp_masks_per_batch": partial(gpu_training.measure, arm="mjp_masks_per_batch"),
    "training_loader": partial(gpu_training.measure, arm="loader"),
}


def main(
    json: Json,
    pictures: Pictures = "bundled",
    n: Annotated[int, typer.Option(min=1, help="Pictures of the closed forms; other sizes follow.")] = 1000,
    minutes: Annotated[float, typer.Option(help="No part is begun, or goes on, after so many.")] = 8.0,
    part: Annotated[list[str] | None, typer.Option(help="One of them alone; repeat it for several.")] = None,
    commit: Annotated[str, typer.Option(help="Of this tree, where it is no checkout.")] = "",
) -> None:
    """Measure, part by part."""
    for name in part or ():
        if name not in PARTS:
            raise UnknownNameError("part", name, PARTS)
    work = Work(
        device="cuda" if torch.cuda.is_available() else "cpu",
        pictures=pictures,
        n=n,
        deadline=time.monotonic() + 60 * minutes,
    )
    made_with = provenance.environment()
    if commit:
        made_with["revision"] = {"commit": commit, "modified": False}
    about = {"command": command_line(), "device": work.device, "n": n}
    done: dict[str, Any] = {}
    for name in part or PARTS:
        began = time.monotonic()
        try:
            done[name] = PARTS[name](work) if work.left() > 0 else {"left_out": "the time was up"}
        except Exception as error:  # noqa: BLE001 (whatever it is, the other parts are measured)
            frames = traceback.extract_tb(error.__traceback__)[-6:]
            where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
            done[name] = {"error": f"{type(error).__name__}: {error}", "where": where}
        done[name]["took_seconds"] = round(time.monotonic() - began, 1)
        _keep(json, {**about, "parts": done, **made_with}, name)
        work.free()


def _keep(path: Path, figures: dict[str, Any], name: str) -> None:
    write_json(path, figures)
    typer.echo(f"{name}: {figures['parts'][name]}")


if __name__ == "__main__":
    run_function(main)
