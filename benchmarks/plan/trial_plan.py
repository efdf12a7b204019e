"""The plan of a folder of results: its cells and trials, readable with any later release, without the data."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from fedmjp.benchmarks.folder.output import write_json, write_text
from fedmjp.benchmarks.folder.trials import START_OVER
from fedmjp.defences.pipeline import NONE, Defences, Pipeline, pipeline_of
from fedmjp.errors import OutputError
from fedmjp.files import read_file
from fedmjp.settings import Picture, Protocol, Reveals, Role, Setting
from fedmjp.texts import guard, unguard
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    import pandas as pd

    from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment
    from fedmjp.config import ModelConfig
    from fedmjp.data.pictures import PictureEntry

ABOUT, TRIALS = "plan.json", "plan.csv"
COLUMNS = ("key", "cell", "picture", "picture_sha256", "seed", "stem")
ABOUT_KEYS = (
    "name", "title", "question", "config", "config_sha256", "data", "metrics", "uploads", "recognisable_at", "utility",
    "keep", "reported", "skipped", "notes", "command",
)  # fmt: skip
TEXTS = tuple(name for name in COLUMNS if name not in ("cell", "seed"))
TABLE_SHA256 = "plan_csv_sha256"
LARGEST = 2**30  # bytes


@dataclass(frozen=True)
class Cell:
    """What one row of the leaderboard stands for, and what is known of it before anything is run.

    Cells are the same where their first fields are (``identity``): ``refusal`` and what follows only describes them.

    Attributes:
        model: Name of the architecture.
        weights: "untrained", or the SHA-256 of the checkpoint.
        defences: Of the clients, in order.
        mask_ratio: Share of patches that were to be shuffled or masked in what went into the gradient.
        attack: Its label, options included.
        role: Attack, floor or bound.
        setting: Which picture is attacked, and which it is compared with.
        protocol: In which precision pictures are scored.
        threat: What the server sees.
        reveals: What the cell is scored by: pictures, features or labels.
        refusal: Why the attack does not apply: such a cell has no trials and stays in every table.
        left_out: Number of pictures that are not attacked because the attack's own prior was made of them.
        adapted: Whether the attack takes the cell's defences into account.
        caveat: What its scores must not be read without.
        upload_bytes: Size of one whole float32 update.
    """

    model: str
    weights: str
    defences: Defences
    mask_ratio: float
    attack: str
    role: Role
    setting: Setting
    protocol: Protocol
    threat: ThreatModel
    reveals: Reveals = "pictures"
    refusal: str | None = field(default=None, compare=False)
    left_out: int = field(default=0, compare=False)
    adapted: bool = field(default=False, compare=False)
    caveat: str | None = field(default=None, compare=False)
    upload_bytes: int = field(default=0, compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the fields that make two cells the same."""
        return {name: getattr(self, name) for name in IDENTITY}

    @property
    def pipeline(self) -> Pipeline:
        """Return the defences themselves, in order."""
        return pipeline_of(self.defences)

    @property
    def defence(self) -> str:
        """Return the label of the defences."""
        return self.pipeline.label

    def files(self, stem: str) -> dict[str, str]:
        """Name the files of a trial: its ``clean`` and ``shuffled`` picture and its ``reconstruction``.

        Reconstructions have a folder of the cell; settings b and c share uploads, so they share it.

        Args:
            stem: Of the trial.
        """
        # Options of attacks and defences hold anything, hence the digest.
        configured = [self.attack, *(config.text for config in self.defences)]
        digest = hashlib.sha256(json.dumps(configured).encode()).hexdigest()[:8]
        names = "+".join(config.name for config in self.defences) or NONE
        folder = f"{self.model}-{names}-{self.attack.split()[0]}-{digest}-{self.setting.gradient_of}"
        private = {str(version): f"{stem}-{version}.png" for version in Picture}
        return {**private, "reconstruction": f"{folder}/{stem}.png"}

    @property
    def columns(self) -> dict[str, Any]:
        """Return what the row of a trial says of its cell."""
        names = ("model", "defence", "mask_ratio", "attack", "protocol")
        return {"setting": str(self.setting), **{name: getattr(self, name) for name in names}}


IDENTITY = tuple(field.name for field in fields(Cell) if field.compare)
_CELLS = TypeAdapter(tuple[Cell, ...])


@dataclass(frozen=True)
class PlannedTrial:
    """A trial of an experiment, with what it takes to run it.

    Attributes:
        key: Digest of everything that determines the result.
        stem: Beginning of the names of the picture's files.
        cell: It belongs to.
        seed: Of the scenario.
        arm: The network that is attacked.
        attack: With its options.
        picture: The one that is scored.
        batch: Names of the pictures behind the same upload, in order, this one among them.
    """

    key: str
    stem: str
    cell: Cell
    seed: int
    arm: ModelConfig
    attack: AttackConfig
    picture: PictureEntry
    batch: tuple[str, ...]

    @property
    def files(self) -> dict[str, str]:
        """Return its files in the folder of pictures, as ``Cell.files`` names them."""
        return self.cell.files(self.stem)


@dataclass(frozen=True)
class PlanPart:
    """An experiment and those of its trials that no earlier part of the plan has."""

    experiment: Experiment
    trials: tuple[PlannedTrial, ...]


@dataclass(frozen=True, eq=False)
class TrialPlan:
    """Every cell and every trial of one or more experiments on the same pictures.

    Attributes:
        cells: In the order of tables.
        table: The trials as ``trials`` has them, in a plan that was read from a folder.
        about: What the manifest says that is known before anything is run (``ABOUT_KEYS``).
        parts: What it takes to run the trials; none in a plan that was read from a folder.
    """

    cells: tuple[Cell, ...]
    table: pd.DataFrame | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[PlanPart, ...] = ()

    @property
    def tasks(self) -> list[PlannedTrial]:
        """Return the trials that can be run, in the order in which they are."""
        return [trial for part in self.parts for trial in part.trials]

    @cached_property
    def trials(self) -> pd.DataFrame:
        """Return a row per trial, with ``COLUMNS``: ``cell`` is an index into ``cells``."""
        import pandas as pd  # noqa: PLC0415 (an attack does without)

        if self.table is not None:
            return self.table
        places = {cell: index for index, cell in enumerate(self.cells)}
        rows = [
            (trial.key, places[trial.cell], trial.picture.name, trial.picture.sha256, trial.seed, trial.stem)
            for trial in self.tasks
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def files_of(self, trial: Mapping[Any, Any]) -> dict[str, str]:
        """Name the files of a row of ``trials`` in the folder of pictures, as ``Cell.files`` does.

        Args:
            trial: The row.
        """
        cell: Cell = self.cells[trial["cell"]]
        return cell.files(trial["stem"])

    @cached_property
    def uploads(self) -> npt.NDArray[np.int64]:
        """Number the upload of each trial, among those of its cell and seed.

        A plan names the pictures of an upload one after another; of a server that isolates some of them, these.
        """
        behind = np.array([cell.threat.isolated.pictures for cell in self.cells])
        ranks = self.trials.groupby(["cell", "seed"]).cumcount().to_numpy(dtype=np.int64)
        numbers: npt.NDArray[np.int64] = ranks // behind[self.trials["cell"].to_numpy(dtype=np.int64)]
        return numbers

    def save(self, folder: Path) -> None:
        """Write the plan into a folder of results.

        Args:
            folder: Must exist.
        """
        table = self.trials.map(guard).to_csv(index=False, lineterminator="\r\n")  # either within a cell is quoted
        about = {**self.about, "cells": cells_as_json(self.cells), TABLE_SHA256: _sha256(table.encode())}
        write_text(folder / TRIALS, table)
        write_json(folder / ABOUT, about)

    @classmethod
    def load(cls, folder: Path) -> TrialPlan:
        """Read the plan of a folder of results.

        Args:
            folder: What a run wrote.

        Raises:
            OutputError: If it holds none, or a damaged one.
        """
        try:
            about, table = (read_file(folder / name, LARGEST) for name in (ABOUT, TRIALS))
        except FileNotFoundError as error:
            raise OutputError(f"{folder} holds no results: {Path(error.filename).name} is missing") from None
        except OSError as error:
            raise OutputError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None
        import pandas as pd  # noqa: PLC0415 (an attack does without)

        try:
            values = json.loads(about)
            if {*ABOUT_KEYS, "cells", TABLE_SHA256} - values.keys():
                raise OutputError(f"the plan in {folder} is of another version of fedmjp; {START_OVER}")
            if values.pop(TABLE_SHA256) != _sha256(table):
                raise OutputError(f"{folder / TRIALS} was changed or damaged; {START_OVER}")
            cells = cells_from_json(values.pop("cells"))
            trials = pd.read_csv(io.BytesIO(table), dtype=dict.fromkeys(TEXTS, str), keep_default_na=False)
            trials[list(TEXTS)] = trials[list(TEXTS)].map(unguard)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, pd.errors.ParserError) as error:
            raise OutputError(f"the plan in {folder} is damaged ({type(error).__name__}); {START_OVER}") from None
        return cls(cells, trials, values)


def cells_as_json(cells: tuple[Cell, ...]) -> list[dict[str, Any]]:
    """Dump cells as plans state them: what identifies each under ``cell``, what describes it beside.

    Args:
        cells: Of a plan.
    """
    return [
        {"cell": {name: values.pop(name) for name in IDENTITY}, **values}
        for values in _CELLS.dump_python(cells, mode="json")
    ]


def cells_from_json(values: Sequence[Mapping[str, Any]]) -> tuple[Cell, ...]:
    """Read what ``cells_as_json`` gave.

    Args:
        values: One entry per cell.

    Raises:
        ValueError: If a value is missing or of a wrong type.
    """
    return _CELLS.validate_python([{**entry, **entry["cell"]} for entry in values])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
