"""What the scripts of ``studies`` and ``performance`` share: options, pictures, times, and how results are kept."""

import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import pandas as pd
import typer
from rich.console import Console

from fedmjp import provenance
from fedmjp.attacks.held_out import seen_before
from fedmjp.benchmarks.folder.output import write_json
from fedmjp.benchmarks.folder.study import keep_rows
from fedmjp.config import ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source, select

Pictures = Annotated[str, typer.Option(help="FOLDER/CLASS/picture.", metavar="FOLDER")]
Json = Annotated[Path, typer.Option(help="Where the figures go.", metavar="FILE")]
T = TypeVar("T")


def unseen(data: str, count: int, model: ModelConfig, seed: int) -> list[LabelledPicture]:
    """Draw pictures of a source, in the model's size, that attacks have not seen before."""
    source = open_source(data, size=model.image_size, classes=model.classes)
    chosen = select(source, count, seed=seed, leave_out=seen_before)
    return [chosen.load(entry) for entry in chosen.entries]


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What the work gives, and the wall-clock seconds that it took."""
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def keep_table(folder: Path, rows: pd.DataFrame, about: Mapping[str, Any]) -> None:
    """Keep the rows of a study, with the command and the environment that they come from."""
    keep_rows(folder, rows, {"command": command_line(), **about, **provenance.environment()})


def keep_figures(path: Path, figures: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Print figures and write them, with the command and the environment that they come from."""
    write_json(path, {"command": command_line(), **about, **figures, **provenance.environment()})
    Console().print_json(data=figures)


def command_line() -> str:
    """The command that runs, as it is published: files and folders of this machine by their metavar."""
    context = click.get_current_context()
    words = [context.command_path]
    for option in context.command.params:
        value = context.params[str(option.name)]
        if value is None or value is False:
            continue
        for said in value if isinstance(value, list | tuple) else [value]:
            words += option.opts[:1] if isinstance(option, click.Option) else []
            if value is not True:
                words.append(option.metavar if option.metavar and value != option.default else shlex.quote(str(said)))
    return " ".join(words)
