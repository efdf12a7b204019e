"""The manifest: everything that one needs to know to repeat a run or to doubt it."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from benchmarks.folder.ledger import Ledger

SCHEMA_VERSION = 2


def manifest(ledger: Ledger, trials: pd.DataFrame, environments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Configuration, seeds, the environments that trials ran in, digests of pictures and weights.

    Args:
        ledger: What was planned.
        trials: What the store has of it, as ``Store.frame`` gives it.
        environments: By digest.

    Returns:
        JSON-ready content. ``weights`` maps model and defence to the SHA-256 of the tensors that the
        server had sent; ``pictures`` maps names to the SHA-256 of their float32 pixels.
    """
    finished = trials[trials["status"] == "ok"]
    times = trials["recorded_at"]
    arms = (finished["model"] + "-" + finished["defence"]).to_list()
    return {
        "schema_version": SCHEMA_VERSION,
        **{key: value for key, value in ledger.about.items() if key not in ("notes", "skipped")},
        "seeds": sorted({int(seed) for seed in ledger.trials["seed"]}),
        "threat_models": [
            {**threat.model_dump(mode="json"), "sentence": threat.sentence()}
            for threat in dict.fromkeys(planned.cell.threat for planned in ledger.cells)
        ],
        "trials": {
            "planned": len(ledger.trials),
            "ok": len(finished),
            "failed": len(trials) - len(finished),
            "refused_cells": sum(planned.refusal is not None for planned in ledger.cells),
            "first": _stamp(times.min()) if len(times) else None,
            "last": _stamp(times.max()) if len(times) else None,
        },
        # As recorded with the trials, not as found when this was rendered. More than one: a mixture.
        "environments": [environments[sha256] for sha256 in sorted(set(trials["environment_sha256"]))],
        "pictures": dict(sorted(zip(ledger.trials["picture"], ledger.trials["picture_sha256"], strict=True))),
        "skipped_pictures": list(ledger.about["skipped"]),
        "weights": dict(sorted(zip(arms, finished["weights_sha256"], strict=True))),
        "weights_origin": sorted({_origin(planned.cell.weights) for planned in ledger.cells}),
        "rendered_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _stamp(time: pd.Timestamp) -> str:
    return time.replace(tzinfo=UTC).isoformat(timespec="seconds")


def _origin(weights: str) -> str:
    return "initial weights drawn from the seed; untrained" if weights == "untrained" else f"checkpoint {weights}"
