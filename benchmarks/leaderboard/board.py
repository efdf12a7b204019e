"""From trials to the leaderboard."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.leaderboard.assembly import entries_of
from benchmarks.leaderboard.entries import Board, Entry, Reported
from benchmarks.leaderboard.notes import notes
from benchmarks.leaderboard.observations import Observation, observe, times, used
from benchmarks.leaderboard.standings import standings
from benchmarks.ledger import Ledger


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
    observations = observe(ledger, trials)
    entries = (*entries_of(observations, ledger.about, environments), *submitted)
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
        about=_about(ledger, observations, environments),
    )


def _about(
    ledger: Ledger, observations: Sequence[Observation], environments: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """The manifest: what was planned, what became of it, with what it was run."""
    rows = pd.concat([observation.rows for observation in observations])
    first, last = times(rows)
    counts = rows["status"].value_counts()
    found = {
        **ledger.about,
        "trials": {
            "planned": len(rows),
            "ok": int(counts.get("ok", 0)),
            "failed": int(counts.get("failed", 0)),
            "missing": int(rows["status"].isna().sum()),
            "first": first,
            "last": last,
        },
        # As recorded with the trials, not as found when this was made. More than one: a mixture.
        "environments": used(rows, environments),
        "pictures": dict(sorted(zip(rows["picture"], rows["picture_sha256"], strict=True))),
        "weights": _weights(observations),
    }
    known: dict[str, Any] = json.loads(json.dumps(found))  # as it will be read again
    return known


def _weights(observations: Sequence[Observation]) -> dict[str, list[str]]:
    """What the server had sent, by model and defence."""
    found: dict[str, set[str]] = {}
    for observation in observations:
        cell = observation.planned.cell
        found.setdefault(f"{cell.model}-{cell.defence}", set()).update(observation.rows["weights_sha256"].dropna())
    return {label: sorted(digests) for label, digests in sorted(found.items())}
