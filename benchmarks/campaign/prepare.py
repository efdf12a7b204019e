"""From a campaign to what is run: pictures and plan."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedmjp.arithmetic import Arithmetic
from fedmjp.attacks.held_out import developed_on, seen_before
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.plan.planning import plan
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.data.selection import Selection, open_source, pick, select
from fedmjp.metrics import DISCLOSED, RECOGNISABLE
from fedmjp.models.build import build

DIRECT = "computed in process from the pictures (direct mode), without Flower; a test holds both modes together"


@dataclass(frozen=True)
class Prepared:
    """A campaign that can be run: its pictures and its plan."""

    campaign: Campaign
    selection: Selection
    plan: TrialPlan


def prepare(
    campaign: Campaign, *, device: Literal["cpu", "cuda"], command: str, arithmetic: Arithmetic = "float32"
) -> Prepared:
    """Choose the pictures and plan the trials of a campaign; nothing is attacked yet.

    Args:
        campaign: As its file states it.
        device: Where attacks run.
        command: What repeats it, for the manifest.
        arithmetic: Of clients, where the file states none.

    Raises:
        BadInputError: If pictures, weights or a combination cannot be used.
    """
    selection = _selection(campaign)
    experiments = campaign.experiments(device=device, arithmetic=arithmetic)
    for network in dict.fromkeys(experiment.scenario.network for experiment in experiments):
        if network.weights:
            build(network)  # a checkpoint that does not fit is told before anything is run
    batches = [selection.batches(experiment.scenario) for experiment in experiments]
    described = _described(
        plan(experiments, batches, uploads="direct"),
        published(campaign),
        name=campaign.name,
        title=campaign.title or campaign.name,
        question=campaign.question,
        data=campaign.data.label,
        metrics=list(campaign.metrics),
        uploads=DIRECT,
        recognisable_at=campaign.recognisable_at,
        utility={label: utility.model_dump() for label, utility in campaign.accuracy.items()},
        keep=campaign.keep,
        reported=list(campaign.reported),
        skipped=list(selection.skipped),
        **({"battery": campaign.battery_label} if campaign.battery else {}),
        notes=[f"Not run: {reason}." for reason in campaign.not_run],
        command=command,
    )
    return Prepared(campaign, selection, described)


def _selection(campaign: Campaign) -> Selection:
    data = campaign.data
    source = open_source(data.source, size=campaign.image_size, classes=campaign.classes)
    if data.ids:
        return pick(source, data.ids)
    leave_out = seen_before if data.held_out else developed_on
    return select(source, data.pictures, seed=data.seed, leave_out=leave_out)


def published(campaign: Campaign) -> dict[str, Any]:
    """Dump the configuration as results show it: with names instead of paths.

    Args:
        campaign: As its file states it.
    """
    values = campaign.model_dump(mode="json")
    values["data"]["source"] = campaign.data.label
    values["weights"] = {label: Path(path).name for label, path in campaign.weights.items()}
    return values


def describe(planned: TrialPlan, *, title: str, uploads: str, command: str) -> TrialPlan:
    """Add what the manifest says to a plan that no campaign's file states, such as the quickstart's.

    Args:
        planned: Of experiments on the same data.
        title: Of tables.
        uploads: Where uploads come from, in words.
        command: What repeats the run.
    """
    experiments = [part.experiment for part in planned.parts]
    return _described(
        planned,
        {"experiments": [experiment.published() for experiment in experiments]},
        name=title.lower().replace(" ", "-"),
        title=title,
        data=Path(experiments[0].scenario.data).name,
        metrics=list(experiments[0].metrics),
        uploads=uploads,
        command=command,
    )


def _described(planned: TrialPlan, config: Mapping[str, Any], **about: Any) -> TrialPlan:
    """Add what most runs say of themselves where ``about`` does not."""
    usual = {"question": "", "recognisable_at": RECOGNISABLE, "utility": {}, "keep": "all"}
    empty: dict[str, list[str]] = {"reported": [], "skipped": [], "notes": []}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    if any(cell.reveals != "pictures" for cell in planned.cells):
        about["metrics"] = [*about["metrics"], *DISCLOSED]
    return replace(planned, about={"config": config, "config_sha256": digest, **usual, **empty, **about})
