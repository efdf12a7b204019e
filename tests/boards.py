"""Hand-made ledgers and trials for leaderboards: the numbers are chosen, nothing is run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.benchmarks.plan.trial_plan import Cell, TrialPlan
from fedmjp.cli.leaderboard import show
from fedmjp.metrics import COLOUR
from fedmjp.scenario import Scenario
from fedmjp.settings import Setting

PICTURES = tuple(f"p{index}" for index in range(8))
ENVIRONMENT = {"versions": {"torch": "2"}, "revision": {"commit": "abc", "modified": False}, "hardware": {"cores": 2}}
ENVIRONMENTS = {"e": ENVIRONMENT}
NOISE = (-0.3, 0.2, -0.1, 0.3, -0.2, 0.1, 0.25, -0.25)  # sums to nothing
ABOUT: dict[str, Any] = {
    "name": "hand-made",
    "title": "Hand-made",
    "question": "Do the rules hold?",
    "config": {"seed": 0},
    "config_sha256": "c0" * 32,
    "data": "bundled",
    "metrics": ["psnr", "mse"],
    "uploads": "computed in process",
    "recognisable_at": 20.0,
    "utility": {"deit-none": {"top1": 79.8, "source": "paper"}},
    "keep": "all",
    "reported": [],
    "skipped": [],
    "notes": ["A note of the campaign."],
    "command": "fedmjp run hand-made",
}


@dataclass(frozen=True)
class Row:
    """A cell, and the leakage of each picture in it: none for a trial not run, text for one that failed."""

    cell: Cell
    leakage: Sequence[float | str | None] = ()
    adapted: bool = False
    refusal: str | None = None
    left_out: int = 0
    seeds: int = 1
    scores: Mapping[str, float | None] = field(default_factory=dict)
    colours: Sequence[float] = ()  # what the mean colour of each picture scores; not recorded without

    def on(self, **changes: Any) -> "Row":
        """The same with another cell."""
        return replace(self, cell=replace(self.cell, **changes))


def cell(attack: str = "april", defence: object = "mjp", setting: str = "a", **changes: Any) -> Cell:
    """A cell as a scenario with these defences has it in a setting; undefended pictures are shuffled in b and c."""
    scenario = Scenario(model="deit", defences=defence).in_setting(Setting(setting), 0.27)
    values = {
        "model": "deit",
        "weights": "untrained",
        "defences": scenario.defences,
        "mask_ratio": scenario.pipeline.mask_ratio,
        "attack": attack,
        "role": "floor" if attack == "grey" else "attack",
        "setting": Setting(setting),
        "protocol": "float",
        "threat": scenario.threat,
    }
    return Cell(**(values | changes))


def grey(defence: object = "mjp", setting: str = "a", **changes: Any) -> Row:
    """A guess at 12.5 dB on every picture."""
    return Row(cell("grey", defence, setting, **changes), [12.5] * len(PICTURES))


def near(mean: float) -> list[float]:
    """Leakage of eight pictures around a mean."""
    return [mean + noise for noise in NOISE]


def ledger_of(rows: Sequence[Row], **about: Any) -> tuple[TrialPlan, pd.DataFrame]:
    """A ledger, and the trials that the store has of it."""
    planned, found = [], []
    for index, row in enumerate(rows):
        for place, leakage in enumerate(row.leakage):
            picture, seed = f"p{place // row.seeds}", place % row.seeds
            identity = {
                "key": f"{index}-{place}",
                "picture": picture,
                "picture_sha256": hashlib.sha256(picture.encode()).hexdigest(),
                "seed": seed,
            }
            planned.append(identity | {"cell": index, "stem": ""})
            if leakage is not None:
                found.append(identity | _trial(row, leakage, place // row.seeds))
    cells = tuple(
        replace(row.cell, refusal=row.refusal, left_out=row.left_out, adapted=row.adapted, upload_bytes=1000)
        for row in rows
    )
    return TrialPlan(cells, pd.DataFrame(planned), ABOUT | about), pd.DataFrame(found)


def _trial(row: Row, leakage: float | str, place: int) -> dict[str, Any]:
    failed = isinstance(leakage, str)
    colour = {COLOUR: row.colours[place]} if row.colours else {}
    return {
        "model": row.cell.model,
        "defence": row.cell.defence,
        "status": "failed" if failed else "ok",
        "error": leakage if failed else None,
        "realised_ratio": 0.25 if row.cell.mask_ratio else 0.0,
        "weights_sha256": "ab" * 32,
        "attack_seconds": 2.0,
        "scores": {} if failed else {**_scores(row, leakage), **colour, **row.scores},
        "recorded_at": datetime(2026, 11, 20, 12, tzinfo=UTC).replace(tzinfo=None),
        "environment_sha256": "e",
    }


def _scores(row: Row, leakage: float) -> dict[str, float]:
    if row.cell.reveals != "pictures":
        return {MEASURES[row.cell.reveals].leakage: leakage}
    return {"psnr": leakage, "mse": 10 ** (-leakage / 10)}


def board(*rows: Row, **about: Any) -> Board:
    """The board of these cells."""
    ledger, trials = ledger_of(rows, **about)
    return board_of(ledger, trials, ENVIRONMENTS)


def entry(*rows: Row, **about: Any) -> BoardEntry:
    """The entry of the first cell."""
    return board(*rows, **about).entries[0]


def attack_board(folder: Path) -> pd.DataFrame:
    """What `fedmjp leaderboard` makes of what `fedmjp attack` left: an entry per cell."""
    show([folder], formats=["csv"], pictures=False)
    return pd.read_csv(folder / "leaderboard.csv")
