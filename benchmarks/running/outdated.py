"""Finished trials that no longer count, since what they were computed with is not what is here now."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedmjp import provenance
from fedmjp.benchmarks.folder.trials import RecordedTrials
from fedmjp.benchmarks.plan.planning import DECISIVE
from fedmjp.benchmarks.plan.trial_plan import TrialPlan

SAME = ["model", "defence", "mask_ratio", "attack", "setting", "protocol", "picture_sha256", "seed"]


def describe_outdated(plan: TrialPlan, store: RecordedTrials) -> str | None:
    """Say how many finished trials are of a plan's cells and pictures but not of its keys, and why.

    Args:
        plan: That is to be run.
        store: Of earlier trials.

    Returns:
        A sentence with a remedy; None where all trials count.
    """
    rows = store.frame()
    keys = set(plan.trials["key"])
    rows = rows[(rows["status"] == "ok") & ~rows["key"].isin(keys)]
    if rows.empty:
        return None
    cells = pd.DataFrame([cell.columns for cell in plan.cells])
    planned = plan.trials[["cell", "picture_sha256", "seed"]].join(cells, on="cell")
    outdated = rows.merge(planned[SAME].drop_duplicates(), on=SAME, how="inner")
    if outdated.empty:
        return None
    environments = store.environments()
    counts = Counter(_differences(environments[digest]) for digest in outdated["environment_sha256"])
    reasons = "; ".join(f"{count} {reason}" for reason, count in counts.most_common(3))
    number = f"{len(outdated)} finished {'trial' if len(outdated) == 1 else 'trials'} no longer count"
    return f"{number} and will be run anew ({reasons}). To keep them, stop and go back to what they were computed with."


def _differences(environment: Mapping[str, Any]) -> str:
    """Name the packages whose releases were others, or else what remains."""
    then, now = environment.get("versions", {}), provenance.versions()
    changed = [
        f"{name} {then.get(name, 'unknown')}, here {now[name]}" for name in DECISIVE if then.get(name) != now[name]
    ]
    if changed:
        return f"with {', '.join(changed)}"
    return "with the same packages: the code of fedmjp, the weights, metrics or the configuration changed"
