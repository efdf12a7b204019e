"""What would come back of fewer records and steps: the app's own step, run again on records that hooks saw."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedmjp.benchmarks.audit.app_loss import AppLoss, Examples
from fedmjp.benchmarks.audit.attacking import attempt_all
from fedmjp.benchmarks.audit.evaluating import Private, scored, summarise_records
from fedmjp.benchmarks.audit.intervals import area_under_curve
from fedmjp.benchmarks.audit.labels import LabelCase, count_update
from fedmjp.benchmarks.audit.membership import COSINE, Scorer
from fedmjp.benchmarks.audit.network import Network
from fedmjp.benchmarks.audit.recipe import as_one_group, threat_of, unreadable
from fedmjp.benchmarks.audit.rerunning import resize_recipe, run_steps
from fedmjp.errors import BadInputError, FedmjpError

SIZES = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (8, 1), (1, 8), (16, 1), (1, 16))  # records, steps on all of them
SECONDS = 60.0  # of the processors, for all of them
OF_AN_ATTACK = 8.0  # seconds


@dataclass(frozen=True)
class Rerun:
    """The app's step that is run again: its network as the server sent it, its recipe, and a client's records."""

    network: Network
    recipe: Mapping[str, Any]
    kind: str  # "weights" or "gradient"
    examples: Examples  # distinct
    private: Private  # the same records, as attacks are scored on them


def trace_curve(rerun: Rerun) -> list[dict[str, Any]]:
    """Run the step with few records and steps and attack what it would send, as long as time allows.

    Args:
        rerun: The step.

    Returns:
        A row for each size under the report's keys; none where the step cannot be run again.
    """
    started, rows = time.process_time(), list[dict[str, Any]]()
    try:
        loss = AppLoss(rerun.network.module, rerun.recipe["loss"])
        gradient = loss.gradient(rerun.examples[:1])
        scorer = Scorer(loss, rerun.examples, gradient) if len(rerun.examples) > 1 else None
    except (BadInputError, RuntimeError, ValueError, LookupError, TypeError):
        return []
    for pictures, steps in SIZES:
        spent = time.process_time() - started
        if pictures > len(rerun.examples) or (steps > 1 and rerun.kind == "gradient") or spent > SECONDS / 2:
            continue
        try:
            rows.append(_attack_size(rerun, scorer, pictures, steps))
        except (FedmjpError, RuntimeError, ValueError, LookupError, TypeError):  # as BatchNorm refuses one record
            continue
    return sorted(rows, key=lambda row: (row["steps"], row["pictures"]))


def _attack_size(rerun: Rerun, scorer: Scorer | None, pictures: int, steps: int) -> dict[str, Any]:
    batch, module = rerun.examples[:pictures], rerun.network.module
    recipe = resize_recipe(rerun.recipe, pictures, pictures, steps)
    change = run_steps(module, batch, recipe, rerun.kind)
    threat, why = threat_of(recipe, rerun.kind), unreadable(recipe, rerun.kind)
    update = as_one_group(change, module.state_dict(), recipe) if rerun.kind == "weights" and why is None else change
    whole = rerun.private
    private = Private(
        (torch.cat(whole.entered)[:pictures],),
        None if whole.pictures is None else whole.pictures[:pictures],
        None if whole.labels is None else whole.labels[:pictures],
    )
    attempts = attempt_all(rerun.network, update, threat, unreadable=why, seconds=OF_AN_ATTACK, change=change)
    rows = [
        {"attack": attempt.attack, "role": attempt.role, "reveals": attempt.reveals, **values}
        for attempt in attempts
        if attempt.ran and (values := scored(attempt, private, rerun.network))
    ]
    records = summarise_records(rows, {})
    case = LabelCase("", module, update, change, threat, why is None, rerun.kind == "gradient")
    sign = -1.0 if rerun.kind == "gradient" else 1.0
    auc = None
    if scorer is not None and pictures < len(scorer.records):
        scores = scorer.score({name: sign * tensor for name, tensor in change.items()})[COSINE]
        auc = round(area_under_curve(scores[:pictures], scores[pictures:]), 4)
    return {
        "pictures": pictures,
        "steps": steps,
        "labels_right": _labels_right(case, private.labels, recipe),
        "membership_auc": auc,
        "best": records["best"] if records["attack"] else None,
        "unit": records["unit"],
        "kind": records["kind"],
        "of": records["of"],
        "came_back": records["came_back"] if records["attack"] else None,
        "attacks": sorted({row["attack"] for row in rows if row["role"] == "attack"}),
    }


def _labels_right(case: LabelCase, labels: Tensor | None, recipe: Mapping[str, Any]) -> float | None:
    """Count labels and return the share that is right; None where nothing tells them."""
    if labels is None:
        return None
    try:
        counts, _ = count_update(case, len(labels), recipe)
    except FedmjpError:
        return None
    true = torch.bincount(labels, minlength=len(counts))
    return round(float(torch.minimum(counts, true[: len(counts)]).sum()) / len(labels), 4)
