"""``scores.csv``: what `fedmjp attack` leaves, a row per picture, attack and setting, written upload by upload."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmjp.benchmarks.folder.output import write_json, write_text
from fedmjp.benchmarks.folder.trials import START_OVER, TRIAL_COLUMNS, TrialResult
from fedmjp.benchmarks.plan.trial_plan import ABOUT_KEYS, PlannedTrial, TrialPlan, cells_as_json, cells_from_json
from fedmjp.benchmarks.plan.trial_plan import COLUMNS as PLANNED
from fedmjp.claims import claim_folder, is_gone
from fedmjp.config import digest_of
from fedmjp.errors import GAVE_UP, OutputError, OutputGoneError
from fedmjp.files import read_file
from fedmjp.metrics import COLOUR, METRICS
from fedmjp.texts import guard, unguard

if TYPE_CHECKING:
    from fedmjp.benchmarks.folder.trials import StudyTrials

SCORES, MANIFEST = "scores.csv", "manifest.json"
KIND = "attack"  # of the manifest
SCORED = (*METRICS, COLOUR)
RECIPE = ("cell", "model", "weights", "defence", "mask_ratio", "attack", "role", "setting", "protocol", "seed")
NUMBERS = ("mask_ratio", "attack_seconds", "realised_ratio", *SCORED)
COLUMNS = (
    *RECIPE, "upload", "picture", "status", "error", *SCORED, "attack_seconds", "realised_ratio", "picture_sha256",
    "weights_sha256", "diagnostics", "stem", "environment_sha256", "recorded_at", "key",
)  # fmt: skip
DIGITS = 12  # of a cell's digest
LARGEST = 2**30  # bytes
Row = dict[str, str]


class ScoreTable:
    """The rows of one run of `fedmjp attack`, in its folder; a later run finds them and makes only what is missing.

    Rows of other cells that the folder holds stay; those of the same cells that no longer belong to the run go.
    """

    def __init__(self, folder: Path, planned: TrialPlan) -> None:
        self._folder, self._path, self._manifest = folder, folder / SCORES, folder / MANIFEST
        dumped = cells_as_json(planned.cells)
        names = [digest_of(entry["cell"])[:DIGITS] for entry in dumped]
        self._cells = dict(zip(planned.cells, names, strict=True))
        self._planned = {trial.key: trial for trial in planned.tasks}
        self._uploads: dict[str, int] = {}  # the number of each trial's upload within its part
        for part in planned.parts:
            numbers = {
                batch: number for number, batch in enumerate(dict.fromkeys(trial.batch for trial in part.trials))
            }
            self._uploads |= {trial.key: numbers[trial.batch] for trial in part.trials}
        self.trials: dict[str, TrialResult] = {}  # of this run by their keys, done or failed
        former = read_rows(self._path) if self._path.exists() else []
        about = _read_manifest(folder) if former else {"cells": {}, "environments": {}}
        self._environments: dict[str, Any] = dict(about["environments"])
        replaced = set(names)
        rows = [row for row in former if row["cell"] not in replaced or _is_finished(row, self._planned)]
        for row in rows:
            if row["key"] in self._planned:
                self.trials[row["key"]] = _trial_of(row, self._environments)
        # Trials that need not be run again: they ended well before, or their attack gave up.
        self.finished = {key for key, trial in self.trials.items() if _ends(trial.status, trial.error)}
        other_names = {row["cell"] for row in rows} - replaced
        self._other_cells = {name: cell for name, cell in about["cells"].items() if name in other_names}
        self._planned_cells = dict(zip(names, dumped, strict=True))
        self._former = [[row[name] for name in COLUMNS] for row in rows]
        self._about: dict[str, Any] = {}
        write_text(self._path, _text([list(COLUMNS), *self._former]))

    def put(self, trials: Iterable[TrialResult]) -> None:
        """Append the rows of an upload in one write, so that an interruption leaves whole rows.

        Args:
            trials: As the engine made them.

        Raises:
            OutputError: If the file cannot be written.
        """
        trials = list(trials)
        self.trials |= {trial.key: trial for trial in trials}
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                file.write(_text(self._cells_of(trial) for trial in trials))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(
                f"{self._path} cannot be written: {error.strerror or error}; finished trials are kept, make room and "
                "run again"
            ) from None

    def require_place(self, trials: Iterable[TrialResult] = ()) -> None:
        """Refuse to go on where the folder went away since, and write all rows again.

        Args:
            trials: That are not put yet, and are written too.

        Raises:
            OutputGoneError: If it was removed, moved or replaced; the message says what is kept.
        """
        if not is_gone(self._folder) and self._path.exists():
            return
        former = {row[COLUMNS.index("key")] for row in self._former}
        self.trials |= {trial.key: trial for trial in trials}
        rows = [*self._former, *(self._cells_of(trial) for key, trial in self.trials.items() if key not in former)]
        remark = f"its {len(rows)} rows were written again, without pictures: run the same command again"
        try:
            claim_folder(self._folder)
            write_text(self._path, _text([list(COLUMNS), *rows]))
            write_json(self._manifest, self._about)
        except (OSError, OutputError) as error:
            remark = f"its rows could not be written again: {error}"
        raise OutputGoneError(
            f"{self._folder} was removed, moved or replaced while the attack wrote to it; {remark}"
        ) from None

    def write_manifest(self, about: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Write the manifest, before rows of the environment: what they are of, and where all rows come from.

        Args:
            about: Command, data, configuration and the like.
            environment: Of the trials that are to be put.
        """
        self._environments[digest_of(environment)] = dict(environment)
        cells = {**self._other_cells, **self._planned_cells}
        self._about = {"kind": KIND, **about, "cells": cells, "environments": self._environments}
        write_json(self._manifest, self._about)

    def _cells_of(self, trial: TrialResult) -> list[Any]:
        planned = self._planned[trial.key]
        values = {
            **vars(trial),
            **{name: trial.scores.get(name) for name in SCORED},
            "cell": self._cells[planned.cell],
            "weights": planned.cell.weights,
            "role": planned.cell.role,
            "upload": self._uploads[trial.key],
            "stem": planned.stem,
            "diagnostics": json.dumps(trial.diagnostics),
            "environment_sha256": digest_of(trial.environment),
            "recorded_at": trial.recorded_at.isoformat(),
        }
        return [_plain(values[name]) for name in COLUMNS]


def holds_scores(folder: Path) -> bool:
    """Tell whether a folder is what `fedmjp attack` left.

    Args:
        folder: Any.
    """
    return (folder / SCORES).exists()


def read_rows(path: Path) -> list[Row]:
    """Read the whole rows of a table of scores; the last one of each trial counts.

    Args:
        path: Of ``scores.csv``.

    Raises:
        OutputError: If it cannot be read, or is none.
    """
    try:
        header, *lines = list(csv.reader(io.StringIO(read_file(path, LARGEST).decode(), newline=""))) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise OutputError(f"{path} cannot be read: {error}; {START_OVER}") from None
    if tuple(header) != COLUMNS:
        raise OutputError(f"{path} is damaged, or of another version of fedmjp; {START_OVER}")
    whole = (dict(zip(COLUMNS, map(unguard, line), strict=True)) for line in lines if _is_whole(line))
    return list({row["key"]: row for row in whole}.values())


def read_scores(folder: Path) -> tuple[TrialPlan, StudyTrials]:
    """Read what `fedmjp attack` left, as the leaderboard reads a campaign's results.

    Args:
        folder: With ``scores.csv`` and its manifest.

    Raises:
        OutputError: If one of them is damaged.
    """
    import pandas as pd  # noqa: PLC0415 (an attack does without)

    from fedmjp.benchmarks.folder.trials import StudyTrials, frame_of  # noqa: PLC0415

    rows, about = read_rows(folder / SCORES), _read_manifest(folder)
    try:
        cells = cells_from_json(list(about["cells"].values()))
        places = {name: place for place, name in enumerate(about["cells"])}
        rows.sort(key=lambda row: (places[row["cell"]], int(row["seed"]), int(row["upload"])))
        trials = [_trial_of(row, about["environments"]) for row in rows]
        planned = [{**row, "cell": places[row["cell"]], "seed": int(row["seed"])} for row in rows]
        plan = TrialPlan(
            cells, pd.DataFrame(planned, columns=list(PLANNED)), {name: about[name] for name in ABOUT_KEYS}
        )
        digests = {row["key"]: row["environment_sha256"] for row in rows}
        values = [{**vars(trial), "environment_sha256": digests[trial.key]} for trial in trials]
        frame = frame_of(sorted(tuple(value[name] for name in TRIAL_COLUMNS) for value in values))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise OutputError(f"{folder / SCORES} and its manifest do not agree ({error}); {START_OVER}") from None
    return plan, StudyTrials(frame, about["environments"])


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads(read_file(folder / MANIFEST, LARGEST))
        if about["kind"] != KIND or not isinstance(about["cells"], dict) or not isinstance(about["environments"], dict):
            raise ValueError("it is not of an attack")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise OutputError(f"{folder / MANIFEST} is missing or damaged ({error}); {START_OVER}") from None
    return dict(about)


def _ends(status: str, error: str | None) -> bool:
    return status == "ok" or (error or "").startswith(GAVE_UP)


def _is_finished(row: Row, planned: Mapping[str, PlannedTrial]) -> bool:
    return row["key"] in planned and _ends(row["status"], row["error"])


def _is_whole(line: Sequence[str]) -> bool:
    """Tell whether a row was not cut: its last column is a digest."""
    return len(line) == len(COLUMNS) and len(line[-1]) == hashlib.sha256().digest_size * 2


def _plain(value: Any) -> Any:
    """Make a value one cell of a file that spreadsheets show as it is."""
    if not isinstance(value, str):
        return "" if value is None else value
    return guard(value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00"))


def _text(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _trial_of(row: Row, environments: Mapping[str, Any]) -> TrialResult:
    numbers = {name: float(row[name]) if row[name] else None for name in NUMBERS}
    scores = {name: numbers[name] for name in SCORED} if row["status"] == "ok" else {}
    texts = ("key", "status", "model", "defence", "attack", "setting", "protocol", "picture", "picture_sha256")
    return TrialResult(
        **{name: row[name] for name in texts},
        error=row["error"] or None,
        mask_ratio=numbers["mask_ratio"] or 0.0,
        seed=int(row["seed"]),
        realised_ratio=numbers["realised_ratio"],
        weights_sha256=row["weights_sha256"] or None,
        attack_seconds=numbers["attack_seconds"],
        scores={name: value for name, value in scores.items() if name != COLOUR or value is not None},
        diagnostics=json.loads(row["diagnostics"]),
        environment=environments[row["environment_sha256"]],
        recorded_at=datetime.fromisoformat(row["recorded_at"]),
    )
