"""Helpers that the scripts in results/ and benchmarks/performance share: options, pictures, times and kept results."""

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import pandas as pd
import typer

import fedmjp
from fedmjp import provenance
from fedmjp.attacks.held_out import developed_on, seen_before
from fedmjp.benchmarks.folder.study import keep_rows
from fedmjp.config import ModelConfig
from fedmjp.data.pictures import LabelledPicture, PictureSource
from fedmjp.data.selection import Selection, open_source, select

Pictures = Annotated[str, typer.Option(help="FOLDER/CLASS/picture.", metavar="FOLDER")]
Result = TypeVar("Result")


def load_unseen(data: str, count: int, model: ModelConfig, seed: int) -> list[LabelledPicture]:
    """Draw pictures that no attack was developed or measured on, in the model's size.

    Args:
        data: A picture source: a folder, a data set of the hub or ``bundled``.
        count: Number of pictures.
        model: Gives the size in pixels and the number of classes.
        seed: Seed of the draw.
    """
    selection = select_unseen(open_source(data, size=model.image_size, classes=model.classes), count, seed=seed)
    return [selection.load(entry) for entry in selection.entries]


def select_unseen(source: PictureSource, count: int, *, seed: int = 0, development: bool = False) -> Selection:
    """Select pictures that attacks have not seen before.

    Args:
        source: The pictures to choose from.
        count: Number of pictures.
        seed: Seed of the draw.
        development: Select the pictures that attacks were developed on instead.
    """
    return select(
        source, count, seed=seed, leave_out=(lambda name: not developed_on(name)) if development else seen_before
    )


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Call a function and measure it.

    Args:
        work: A function without arguments.

    Returns:
        Its result, and the wall-clock seconds that it took.
    """
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def keep_table(folder: Path, rows: pd.DataFrame, about: Mapping[str, Any]) -> None:
    """Write the rows of a study with the command and the environment that they come from.

    Args:
        folder: Folder of the study; its trials.parquet and manifest.json are replaced.
        rows: The rows.
        about: Further entries of the manifest, ready for JSON.
    """
    keep_rows(folder, rows, {"command": command_line(), **about, **provenance.environment()})


def command_line() -> str:
    """Return the running command as it is published: the metavar stands for files and folders of this machine."""
    context = click.get_current_context()
    words = [f"python {_script()}", *([context.info_name or ""] if context.parent else [])]
    for option in context.command.params:
        value = context.params[str(option.name)]
        if value is None or value is False:
            continue
        for entry in value if isinstance(value, list | tuple) else [value]:
            words += option.opts[:1] if isinstance(option, click.Option) else []
            if value is not True:
                words.append(option.metavar if option.metavar and value != option.default else shlex.quote(str(entry)))
    return " ".join(words)


def _script() -> str:
    """Name the running script from the top of its clone."""
    path, clone = Path(sys.argv[0]).resolve(), Path(fedmjp.__file__).resolve().parents[1]
    return str(path.relative_to(clone) if path.is_relative_to(clone) else path.name)
