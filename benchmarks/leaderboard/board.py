"""The leaderboard from trials, with its manifest: all that is needed to repeat a run or to doubt it."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import pandas as pd

from fedmjp.benchmarks.leaderboard.assembly import build_entries, summarise_times
from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry, Claim, ReportedRow
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.leaderboard.notes import collect_notes
from fedmjp.benchmarks.leaderboard.standings import rank_models
from fedmjp.benchmarks.plan.trial_plan import TrialPlan

MANIFEST_VERSION: Final = 2  # of the manifest's own form


def board_of(
    plan: TrialPlan,
    trials: pd.DataFrame,
    environments: Mapping[str, dict[str, Any]],
    *,
    reported: Sequence[ReportedRow] = (),
    submitted: Sequence[BoardEntry] = (),
    claims: Sequence[Claim] = (),
) -> Board:
    """Build the leaderboard of a folder of results: every planned cell gets an entry, even without any trial.

    Args:
        plan: The plan of the folder.
        trials: The store's trials, as ``Store.frame`` gives them.
        environments: Environments of the trials, by digest, as ``Store.environments`` gives them.
        reported: Rows of papers to stand beside it.
        submitted: Recomputed entries by third parties to stand behind ours.
        claims: Claims of third parties to stand apart.

    Raises:
        RecordError: If a finished trial has no leakage, or a score that is no finite number.
    """
    entries = (*build_entries(plan, trials, environments), *submitted)
    return Board(
        **{name: plan.about[name] for name in ("name", "title", "question", "recognisable_at")},
        metrics=tuple(
            dict.fromkeys([*plan.about["metrics"], *(name for entry in submitted for name in entry.metrics)])
        ),
        entries=entries,
        standings=tuple(rank_models(entries)),
        claims=tuple(claims),
        reported=tuple(reported),
        notes=tuple(collect_notes(entries, plan.about, reported)),
        about=json.loads(json.dumps(_manifest(plan, trials, environments))),  # as it will be read again
    )


def _manifest(plan: TrialPlan, trials: pd.DataFrame, environments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Collect configuration, seeds, environments and digests; ``weights`` digests the tensors sent, by arm."""
    finished = trials[trials["status"] == "ok"]
    arms = (finished["model"] + "-" + finished["defence"]).to_list()
    return {
        "schema_version": MANIFEST_VERSION,
        **{key: value for key, value in plan.about.items() if key not in ("notes", "skipped")},
        "seeds": sorted({int(seed) for seed in plan.trials["seed"]}),
        "threat_models": [
            {**threat.model_dump(mode="json"), "sentence": threat.sentence(cell.pipeline for cell in cells)}
            for threat, cells in grouped(plan.cells, lambda cell: cell.threat).items()
        ],
        "trials": {
            "planned": len(plan.trials),
            "ok": len(finished),
            "failed": len(trials) - len(finished),
            "refused_cells": sum(planned.refusal is not None for planned in plan.cells),
            **summarise_times(trials["recorded_at"]),
        },
        # As recorded with the trials, not as found when this was rendered. More than one: a mixture.
        "environments": [environments[sha256] for sha256 in sorted(set(trials["environment_sha256"]))],
        "pictures": dict(sorted(zip(plan.trials["picture"], plan.trials["picture_sha256"], strict=True))),
        "skipped_pictures": list(plan.about["skipped"]),
        "weights": dict(sorted(zip(arms, finished["weights_sha256"], strict=True))),
        "weights_origin": sorted(
            "initial weights drawn from the seed; untrained" if weights == "untrained" else f"checkpoint {weights}"
            for weights in {cell.weights for cell in plan.cells}
        ),
        "rendered_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
