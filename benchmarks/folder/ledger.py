"""What a folder of results says of itself: its cells and trials, readable with any later release, without the data."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import TypeAdapter

from fedmjp.benchmarks.folder.output import as_json, write_text
from fedmjp.benchmarks.folder.pictures import files_in, folder_of
from fedmjp.benchmarks.folder.store import START_OVER
from fedmjp.benchmarks.plan.cells import PlannedCell
from fedmjp.errors import OutputError
from fedmjp.files import read_file
from fedmjp.texts import guard, unguard

if TYPE_CHECKING:
    from fedmjp.benchmarks.plan.experiment import Plan

ABOUT, TRIALS = "plan.json", "plan.csv"
COLUMNS = ("key", "cell", "picture", "picture_sha256", "seed", "stem")
ABOUT_KEYS = (
    "name", "title", "question", "config", "config_sha256", "data", "metrics", "uploads", "recognisable_at", "utility",
    "keep", "reported", "skipped", "notes", "command",
)  # fmt: skip
TEXTS = tuple(name for name in COLUMNS if name not in ("cell", "seed"))
TABLE_SHA256 = "plan_csv_sha256"
LARGEST = 2**30  # bytes
CELLS = TypeAdapter(tuple[PlannedCell, ...])


@dataclass(frozen=True)
class Ledger:
    """The plan of a folder of results.

    ``about`` is the manifest's part that is known before anything is run (``ABOUT_KEYS``). ``trials`` has one row per
    planned trial (``COLUMNS``): ``cell`` is an index into ``cells``, ``stem`` names the picture's files.
    """

    about: Mapping[str, Any]
    cells: tuple[PlannedCell, ...]
    trials: pd.DataFrame

    @classmethod
    def of(cls, plan: Plan, about: Mapping[str, Any]) -> Ledger:
        """The ledger of a plan."""
        places = {planned.cell: index for index, planned in enumerate(plan.cells)}
        rows = [
            {
                "key": trial.key,
                "cell": places[trial.cell],
                "picture": trial.picture.name,
                "picture_sha256": trial.picture.sha256,
                "seed": trial.seed,
                "stem": trial.stem,
            }
            for trial in plan.trials
        ]
        return cls(about, plan.cells, pd.DataFrame(rows, columns=list(COLUMNS)))

    def files_of(self, trial: Mapping[Any, Any]) -> dict[str, str]:
        """The files of a row of ``trials`` in the picture folder, as ``files_in`` names them."""
        return files_in(self._folders[trial["cell"]], trial["stem"])

    @property
    def files(self) -> set[str]:
        """Of all trials in the picture folder."""
        return {name for trial in self.trials.to_dict("records") for name in self.files_of(trial).values()}

    @cached_property
    def uploads(self) -> npt.NDArray[np.int64]:
        """Of each trial the number of its upload, among those of its cell and seed.

        A plan names the pictures of an upload one after another; of a server that isolates some of them, these.
        """
        behind = np.array([planned.cell.threat.isolated.pictures for planned in self.cells])
        before = self.trials.groupby(["cell", "seed"]).cumcount().to_numpy(dtype=np.int64)
        numbers: npt.NDArray[np.int64] = before // behind[self.trials["cell"].to_numpy(dtype=np.int64)]
        return numbers

    @cached_property
    def _folders(self) -> list[str]:
        return [folder_of(planned.cell) for planned in self.cells]

    def texts(self) -> dict[str, str]:
        """What is written of it, by the names of the files."""
        table = self.trials.map(guard).to_csv(index=False, lineterminator="\r\n")  # either within a cell is quoted
        cells = CELLS.dump_python(self.cells, mode="json")
        about = {**self.about, "cells": cells, TABLE_SHA256: _sha256(table.encode())}
        return {TRIALS: table, ABOUT: as_json(about)}

    def save(self, folder: Path) -> None:
        """Write into a folder of results."""
        for name, text in self.texts().items():
            write_text(folder / name, text)

    @classmethod
    def load(cls, folder: Path) -> Ledger:
        """Read from a folder of results.

        Raises:
            OutputError: If it holds none, or a damaged one.
        """
        try:
            about, table = (read_file(folder / name, LARGEST) for name in (ABOUT, TRIALS))
        except FileNotFoundError as error:
            raise OutputError(f"{folder} holds no results: {Path(error.filename).name} is missing") from None
        except OSError as error:
            raise OutputError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None
        return cls.read(about, table, str(folder))

    @classmethod
    def read(cls, about: str | bytes, table: bytes, where: str) -> Ledger:
        """The inverse of ``texts``; ``where`` they are from stands in messages.

        Raises:
            OutputError: If they are damaged.
        """
        try:
            said = json.loads(about)
            if {*ABOUT_KEYS, "cells", TABLE_SHA256} - said.keys():
                raise OutputError(f"the plan in {where} is of another version of fedmjp; {START_OVER}")
            if said.pop(TABLE_SHA256) != _sha256(table):
                raise OutputError(f"{Path(where) / TRIALS} was changed or damaged; {START_OVER}")
            cells = CELLS.validate_python(said.pop("cells"))
            trials = pd.read_csv(io.BytesIO(table), dtype=dict.fromkeys(TEXTS, str), keep_default_na=False)
            trials[list(TEXTS)] = trials[list(TEXTS)].map(unguard)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, pd.errors.ParserError) as error:
            raise OutputError(f"the plan in {where} is damaged ({type(error).__name__}); {START_OVER}") from None
        return cls(said, cells, trials)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
