"""The harness of benchmarks: a decorator that makes a function a command, clocks, and memory of processes."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch
import typer
from rich.console import Console

from fedmjp import provenance
from fedmjp.benchmarks.folder.output import write_json
from fedmjp.benchmarks.scripts import command_line

MATRIX = 2048  # rows of the product that tells a machine's rate
Result = TypeVar("Result")
Seconds = npt.NDArray[np.float64]  # wall-clock, processor

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Measurement(NamedTuple):
    """What a benchmark measured, and what must be known to read it; both ready for JSON."""

    figures: Mapping[str, Any]
    about: Mapping[str, Any] = {}


def benchmark(function: Callable[..., Measurement | Iterator[Measurement]]) -> Callable[..., Any]:
    """Make a function a command of ``run.py`` that writes what it returns to ``--json FILE``.

    Args:
        function: Returns a measurement, or yields several, each of which replaces the file. Its parameters are the
            command's options, its name is the command's.

    Returns:
        The function itself.
    """

    def command(json: Path, **options: Any) -> None:
        measured = function(**options)
        for figures, about in [measured] if isinstance(measured, Measurement) else measured:
            write_json(json, {"command": command_line(), **provenance.environment(), **about, **figures})
            Console().print_json(data=figures)

    signature = inspect.signature(function)
    json = inspect.Parameter(
        "json",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[Path, typer.Option(help="Where the figures go.", metavar="FILE")],
    )
    options = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
    command.__signature__ = inspect.Signature([json, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (json, *options)}
    command.__doc__ = function.__doc__
    app.command(function.__name__)(command)
    return function


def clocked(work: Callable[[], Result]) -> tuple[Result, Seconds]:
    """Call a function; return its result and its seconds by the wall clock and of the processor."""
    began = np.array([time.perf_counter(), time.process_time()])
    return work(), np.array([time.perf_counter(), time.process_time()]) - began


def spread(values: npt.ArrayLike, digits: int = 2) -> list[float]:
    """Return median, least and greatest value."""
    return [round(float(value), digits) for value in np.quantile(np.asarray(values), (0.5, 0, 1))]


def matrix_product() -> Seconds:
    """Time one large matrix product."""
    factor = torch.rand(MATRIX, MATRIX)
    return clocked(lambda: torch.matmul(factor, factor))[1]


def proportional_memory(pid: int | None = None) -> int:
    """Add up the bytes of a process (this one by default) and those below it; shared memory counts once (PSS)."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):
                total += int(process.memory_full_info().pss)
    return total


@contextmanager
def sampled(measure: Callable[[], int], seconds: float) -> Iterator[list[int]]:
    """Sample a quantity while the block runs; the list that is yielded grows.

    Args:
        measure: Returns the quantity.
        seconds: Between two samples.
    """
    samples, over = [measure()], threading.Event()

    def watch() -> None:
        while not over.wait(seconds):
            samples.append(measure())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        over.set()
        watcher.join()
