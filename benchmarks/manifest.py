"""The manifest: everything that one needs to know to repeat a run or to doubt it."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.experiment import Experiment, PlannedTrial
from fedmjp.store import Trial

SCHEMA_VERSION = 1


def manifest(
    experiment: Experiment, planned: Sequence[PlannedTrial], trials: Sequence[Trial], *, uploads: str
) -> dict[str, Any]:
    """Configuration, seeds, the environments that trials ran in, digests of pictures and weights.

    Returns:
        JSON-ready content. ``uploads`` says how they came about. ``weights`` maps model and defence
        to the SHA-256 of the weights that the server had sent; ``pictures`` maps names to the SHA-256
        of their float32 pixels.
    """
    finished = [trial for trial in trials if trial.status == "ok"]
    times = [trial.recorded_at.replace(tzinfo=UTC).isoformat(timespec="seconds") for trial in trials]
    environments = {json.dumps(trial.environment, sort_keys=True): trial.environment for trial in trials}
    return {
        "schema_version": SCHEMA_VERSION,
        "uploads": uploads,
        "config": experiment.model_dump(mode="json"),
        "config_sha256": experiment.digest(),
        "seed": experiment.federation.seed,
        "trials": {
            "planned": len(planned),
            "ok": len(finished),
            "failed": len(trials) - len(finished),
            "first": min(times) if times else None,
            "last": max(times) if times else None,
        },
        # As recorded with the trials, not as found when this was rendered. More than one: a mixture.
        "environments": list(environments.values()),
        "pictures": {plan.picture.name: plan.picture.sha256 for plan in planned},
        "weights": {f"{trial.model}-{trial.defence}": trial.weights_sha256 for trial in finished},
        "weights_origin": "initial weights drawn from the seed; untrained",
        "rendered_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
