"""From a campaign to what is run: pictures, plan, ledger."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedmjp.arithmetic import Arithmetic
from fedmjp.attacks.held_out import developed_on, seen_before
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.folder.ledger import Ledger
from fedmjp.benchmarks.plan.experiment import Experiment, Plan
from fedmjp.benchmarks.plan.planning import plan
from fedmjp.data.datasets import DatasetPictures
from fedmjp.data.selection import Selection, open_source, pick, select
from fedmjp.metrics import DISCLOSED, RECOGNISABLE
from fedmjp.models.build import build
from fedmjp.training import run_folder

DIRECT = "computed in process from the pictures (direct mode), without Flower; a test holds both modes together"


@dataclass(frozen=True)
class Prepared:
    """A campaign that can be run: its pictures, cells and trials, and what its folder will say of itself."""

    campaign: Campaign
    selection: Selection
    plan: Plan
    ledger: Ledger


def prepare(
    campaign: Campaign, *, device: Literal["cpu", "cuda"], command: str, arithmetic: Arithmetic = "float32"
) -> Prepared:
    """Choose the pictures and plan the trials of what ``command`` repeats; nothing is attacked yet.

    Clients compute in the arithmetic where the campaign's file states none.

    Raises:
        BadInputError: If pictures, weights or a combination cannot be used.
    """
    selection = _selection(campaign)
    planned = plan_of(campaign, selection, device=device, arithmetic=arithmetic)
    ledger = _ledger(
        planned,
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
    return Prepared(campaign, selection, planned, ledger)


def plan_of(
    campaign: Campaign, selection: Selection, *, device: Literal["cpu", "cuda"], arithmetic: Arithmetic
) -> Plan:
    """The cells and trials on these pictures.

    Raises:
        BadInputError: If weights or a combination cannot be used.
    """
    experiments = campaign.experiments(device=device, arithmetic=arithmetic)
    for arm in dict.fromkeys(experiment.arm for experiment in experiments if experiment.arm.weights):
        build(arm)  # a checkpoint that does not fit is told before anything is run
    batches = [selection.batches(experiment.scenario) for experiment in experiments]
    return plan(experiments, batches, uploads="direct")


def source_of(campaign: Campaign) -> DatasetPictures:
    """Where its pictures are; DataError if it cannot be used."""
    return open_source(campaign.data.source, size=campaign.image_size, classes=campaign.classes)


def _selection(campaign: Campaign) -> Selection:
    data, source = campaign.data, source_of(campaign)
    if data.ids:
        return pick(source, data.ids)
    leave_out = seen_before if data.held_out else developed_on
    return select(source, data.pictures, seed=data.seed, leave_out=leave_out)


def published(campaign: Campaign) -> dict[str, Any]:
    """The configuration as results show it: names instead of paths, which say nothing elsewhere."""
    values = campaign.model_dump(mode="json")
    values["data"]["source"] = campaign.data.label
    values["weights"] = {label: Path(path).name for label, path in campaign.weights.items()}
    return values


def ledger_of(experiments: Sequence[Experiment], planned: Plan, *, title: str, uploads: str, command: str) -> Ledger:
    """The ledger of experiments on the same data that no campaign's file states, such as the quickstart."""
    return _ledger(
        planned,
        {"experiments": [run_folder.published(experiment) for experiment in experiments]},
        name=title.lower().replace(" ", "-"),
        title=title,
        data=Path(experiments[0].scenario.data).name,
        metrics=list(experiments[0].metrics),
        uploads=uploads,
        command=command,
    )


def _ledger(planned: Plan, config: Mapping[str, Any], **about: Any) -> Ledger:
    """With what most runs say of themselves where ``about`` does not."""
    usual = {"question": "", "recognisable_at": RECOGNISABLE, "utility": {}, "keep": "all"}
    empty: dict[str, list[str]] = {"reported": [], "skipped": [], "notes": []}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    if any(each.cell.reveals != "pictures" for each in planned.cells):
        about["metrics"] = [*about["metrics"], *DISCLOSED]
    return Ledger.of(planned, {"config": config, "config_sha256": digest, **usual, **empty, **about})
