"""From trials to the leaderboard."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.folder.ledger import Ledger
from benchmarks.leaderboard.assembly import entries_of
from benchmarks.leaderboard.entries import Board, Entry, Reported
from benchmarks.leaderboard.manifest import manifest
from benchmarks.leaderboard.notes import notes
from benchmarks.leaderboard.observations import observe
from benchmarks.leaderboard.standings import standings


def board_of(
    ledger: Ledger,
    trials: pd.DataFrame,
    environments: Mapping[str, dict[str, Any]],
    *,
    reported: Sequence[Reported] = (),
    submitted: Sequence[Entry] = (),
) -> Board:
    """The leaderboard of a folder of results.

    Args:
        ledger: What was planned. Every cell gets an entry, also without any trial.
        trials: What the store has of it, as ``Store.frame`` gives it.
        environments: What trials were run with, by digest, as ``Store.environments`` gives it.
        reported: Rows of papers to stand beside it.
        submitted: Entries by third parties to stand behind ours.

    Raises:
        RecordError: If a finished trial has scores that are no finite numbers.
    """
    entries = (*entries_of(observe(ledger, trials), ledger.about, environments), *submitted)
    return Board(
        name=ledger.about["name"],
        title=ledger.about["title"],
        question=ledger.about["question"],
        recognisable_at=ledger.about["recognisable_at"],
        metrics=tuple(ledger.about["metrics"]),
        entries=entries,
        standings=tuple(standings(entries)),
        reported=tuple(reported),
        notes=tuple(notes(entries, ledger.about, reported)),
        about=json.loads(json.dumps(manifest(ledger, trials, environments))),  # as it will be read again
    )
