"""Trained models as they are evaluated: where their weights are, and which differ in their seed alone."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmjp.config import DIGEST, ModelConfig
from fedmjp.defences.pipeline import NONE
from fedmjp.errors import BadInputError
from fedmjp.learning import Learning, Recipe
from fedmjp.scenario import TrainingScenario
from fedmjp.training.config import TrainingConfig
from fedmjp.training.rows import Reported, reported
from fedmjp.training.run_folder import TrainingFolder

# Settings in which two runs of one kind may differ: seeds, and details of execution.
INCIDENTAL = {
    "seed", "model.seed", "device", "checkpoint_every", "recipe.workers", "recipe.compile", "round_seconds", "quorum",
    "records",
}  # fmt: skip


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, by the name of its folder or of its file of weights."""

    name: str
    model: ModelConfig  # with the trained weights
    config: TrainingConfig | TrainingScenario | None  # of its training; None if unknown
    unfinished: str = ""  # progress of a training that has not ended

    @property
    def learning(self) -> Learning | None:
        """Return how a client, or the only party, trains."""
        return self.config.training if isinstance(self.config, TrainingScenario) else self.config

    @property
    def seed(self) -> int | None:
        """Return the seed of the training, if known."""
        return self.config.seed if self.config else None

    @property
    def crop_share(self) -> float:
        """Return the share of a resized picture that is kept when it is evaluated."""
        return (self.learning.recipe if self.learning else Recipe()).crop_share

    @property
    def reported(self) -> Reported | None:
        """Return the paper's figures of such a model; one trained elsewhere is taken to have its best ratio."""
        return reported(self.model, self.config.pipeline if self.config else None)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Collect all settings that define it, except seeds, by dotted key."""
        if self.config is None:
            values: dict[str, Any] = {"model": self.model.model_dump(mode="json", context=DIGEST)}
        else:
            values = self.config.model_dump(mode="json", context=DIGEST)
        if isinstance(self.config, TrainingScenario):
            values |= values.pop("training")
            del values["recipe"]["epochs"]  # rounds take its place
        if self.config is not None:
            values["defences"] = [
                (defence.name, defence.options.model_dump(exclude={"mask_ratio"}))
                for defence in self.config.pipeline.defences
            ]
            values["mask_ratio"] = self.config.pipeline.mask_ratio
        if "data" in values:
            values["data"] = Path(values["data"]).name  # wherever it lies
        return {key: value for key, value in _flatten(values) if key not in INCIDENTAL}


@dataclass(frozen=True)
class Kind:
    """A description of runs that differ in their seed alone, in words."""

    model: str
    defence: str
    localisation: str
    training: str

    def __str__(self) -> str:
        localisation = "" if self.localisation == "none" else f", DAL {self.localisation}"
        return f"{self.model}, {_describe_field('defence', self.defence)}{localisation}; {self.training}"


def open_run(folder: Path) -> TrainedModel:
    """Open the model in the folder of a training run.

    Args:
        folder: Of the run.

    Raises:
        BadInputError: If there is no such folder, run in it, or weights yet.
    """
    run = TrainingFolder(folder)
    if not folder.is_dir():
        raise BadInputError(f"there is no folder {folder}")
    config = run.config()
    if not run.weights.exists():
        raise BadInputError(f"{folder} has no weights yet: its training has not reached a checkpoint")
    return TrainedModel(folder.absolute().name, run.trained(), config, _describe_progress(run, config))


def refuse_twins(runs: Iterable[TrainedModel]) -> None:
    """Refuse two runs of one kind and one seed, which would count as two seeds.

    Raises:
        BadInputError: If two are the same training with the same seed.
    """
    names: dict[str, str] = {}
    for run in runs:
        key = json.dumps([run.settings, run.seed], sort_keys=True)
        if key in names:
            raise BadInputError(
                f"{names[key]} and {run.name} are the same training with the same seed: name one of them"
            )
        names[key] = run.name


def describe_kinds(runs: Sequence[TrainedModel]) -> list[Kind]:
    """Describe the kind of each run; kinds with equal descriptions name the settings in which they differ."""
    described = [_describe(run) for run in runs]
    distinct = []
    for run, kind in zip(runs, described, strict=True):
        peers = [peer.settings for peer, label in zip(runs, described, strict=True) if label == kind]
        differing = [key for key, value in run.settings.items() if any(peer.get(key) != value for peer in peers)]
        more = "".join(f"; {key} {run.settings[key]}" for key in differing)
        distinct.append(Kind(kind.model, kind.defence, kind.localisation, kind.training + more))
    return distinct


def distinguish_kinds(kinds: Sequence[Kind]) -> tuple[str, list[str]]:
    """Split descriptions of kinds into their common part and the part that distinguishes each.

    Args:
        kinds: At least one.

    Returns:
        The common part as the beginning of a title, and a name for each kind.
    """
    if len(kinds) == 1:
        return "", [str(kinds[0])]
    fields = {name: [getattr(kind, name) for kind in kinds] for name in Kind.__dataclass_fields__}
    shared = [_describe_field(name, values[0]) for name, values in fields.items() if len(set(values)) == 1]
    telling = [name for name, values in fields.items() if len(set(values)) > 1]
    common = "".join(f"{word}; " for word in shared if not word.startswith("no "))
    return common, [", ".join(_describe_field(name, getattr(kind, name)) for name in telling) for kind in kinds]


def _describe_field(name: str, value: str) -> str:
    if value == NONE:
        return {"defence": "no defence", "localisation": "no DAL"}[name]
    return f"DAL {value}" if name == "localisation" else value


def _describe(run: TrainedModel) -> Kind:
    model, config = run.model, run.config
    if config is None:
        defence, training = "unknown embedding" if model.unknown_embedding else NONE, "trained elsewhere"
    else:
        defence, training = config.pipeline.label, _describe_training(config)
        if ratio := config.pipeline.mask_ratio:
            defence += f" {ratio:g}"  # the label leaves it out
    return Kind(model.name, defence + (" + IDX" if model.index_embedding else ""), model.localisation, training)


def _describe_training(config: TrainingConfig | TrainingScenario) -> str:
    if isinstance(config, TrainingConfig):
        return f"central, {config.recipe.epochs} epochs"
    training, partition = config.training, config.training.partition
    local = f" of {training.local_epochs} epochs" if training.local_epochs > 1 else ""
    schemes = {
        "iid": "iid",
        "dirichlet": f"dirichlet {partition.alpha:g}",
        "pathological": f"{partition.classes_per_client} classes each",
    }
    dealt = f"{config.clients} clients, {schemes[partition.scheme]}"
    return f"{training.strategy}, {dealt}, {training.rounds} rounds{local}"


def _describe_progress(run: TrainingFolder, config: TrainingConfig | TrainingScenario) -> str:
    if not run.history.exists():
        return ""
    total, unit = (
        (config.rounds, "rounds") if isinstance(config, TrainingScenario) else (config.recipe.epochs, "epochs")
    )
    with run.history.open(newline="", encoding="utf-8") as lines:
        finished = [row[0] for row in csv.reader(lines)][1:]
    return "" if finished and int(float(finished[-1])) >= total else f"{len(finished)} of {total} {unit}"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
