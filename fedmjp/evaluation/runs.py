"""Trained models as they are evaluated: where their weights are, and which of them are alike but for the seed."""

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

# What is not the same in two runs of one kind: seeds, and what only says how a run was carried out.
INCIDENTAL = {
    "seed", "model.seed", "device", "checkpoint_every", "recipe.workers", "recipe.compile", "round_seconds", "quorum",
    "records",
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A trained model, by the name of its folder or of its file of weights."""

    name: str
    model: ModelConfig  # with the trained weights
    config: TrainingConfig | TrainingScenario | None  # how it was trained, if that is known
    unfinished: str = ""  # how far its training is, if it has not ended

    @property
    def learning(self) -> Learning | None:
        """How a client, or the only party, trains."""
        return self.config.training if isinstance(self.config, TrainingScenario) else self.config

    @property
    def seed(self) -> int | None:
        """Of the training, if it is known."""
        return self.config.seed if self.config else None

    @property
    def crop_share(self) -> float:
        """Of pictures that it is evaluated on."""
        return (self.learning.recipe if self.learning else Recipe()).crop_share

    @property
    def reported(self) -> Reported | None:
        """What the paper says of such a model. One that was trained elsewhere is taken to have its best ratio."""
        return reported(self.model, self.config.pipeline if self.config else None)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that makes it what it is but for seeds, by dotted key."""
        if self.config is None:
            values: dict[str, Any] = {"model": self.model.model_dump(mode="json", context=DIGEST)}
        else:
            values = self.config.model_dump(mode="json", context=DIGEST)
        if isinstance(self.config, TrainingScenario):
            values |= values.pop("training")
            del values["recipe"]["epochs"]  # rounds take its place
        if self.config is not None:
            made = self.config.pipeline.defences
            values["defences"] = [
                (defence.name, defence.options.model_dump(exclude={"mask_ratio"})) for defence in made
            ]
            values["mask_ratio"] = self.config.pipeline.mask_ratio
        if "data" in values:
            values["data"] = Path(values["data"]).name  # wherever it lies
        return {key: value for key, value in _flat(values) if key not in INCIDENTAL}


@dataclass(frozen=True)
class Kind:
    """What runs have in common that differ in their seed alone, in words."""

    model: str
    defence: str
    localisation: str
    training: str

    def __str__(self) -> str:
        localisation = "" if self.localisation == "none" else f", DAL {self.localisation}"
        return f"{self.model}, {_word('defence', self.defence)}{localisation}; {self.training}"


def open_run(folder: Path) -> Trained:
    """The model in a training run's folder; BadInputError if there is no such folder, run in it, or weights yet."""
    run = TrainingFolder(folder)
    if not folder.is_dir():
        raise BadInputError(f"there is no folder {folder}")
    config = run.config()
    if not run.weights.exists():
        raise BadInputError(f"{folder} has no weights yet: its training has not reached a checkpoint")
    return Trained(folder.absolute().name, run.trained(), config, _unfinished(run, config))


def refuse_twins(runs: Iterable[Trained]) -> None:
    """BadInputError if two runs are of one kind and one seed: they would count as two seeds."""
    seen: dict[str, str] = {}
    for run in runs:
        key = json.dumps([run.settings, run.seed], sort_keys=True)
        if key in seen:
            raise BadInputError(
                f"{seen[key]} and {run.name} are the same training with the same seed: name one of them"
            )
        seen[key] = run.name


def kinds(runs: Sequence[Trained]) -> list[Kind]:
    """The kind of each run. Kinds that read the same say what else they differ in."""
    described = [_described(run) for run in runs]
    distinct = []
    for run, kind in zip(runs, described, strict=True):
        alike = [other.settings for other, same in zip(runs, described, strict=True) if same == kind]
        differing = [key for key, value in run.settings.items() if any(other.get(key) != value for other in alike)]
        more = "".join(f"; {key} {run.settings[key]}" for key in differing)
        distinct.append(Kind(kind.model, kind.defence, kind.localisation, kind.training + more))
    return distinct


def told_apart(kinds: Sequence[Kind]) -> tuple[str, list[str]]:
    """What all kinds share, as the beginning of a title, and what tells each of them from the others."""
    if len(kinds) == 1:
        return "", [str(kinds[0])]
    fields = {name: [getattr(kind, name) for kind in kinds] for name in Kind.__dataclass_fields__}
    shared = [_word(name, values[0]) for name, values in fields.items() if len(set(values)) == 1]
    telling = [name for name, values in fields.items() if len(set(values)) > 1]
    common = "".join(f"{word}; " for word in shared if not word.startswith("no "))
    return common, [", ".join(_word(name, getattr(kind, name)) for name in telling) for kind in kinds]


def _word(name: str, value: str) -> str:
    if value == NONE:
        return {"defence": "no defence", "localisation": "no DAL"}[name]
    return f"DAL {value}" if name == "localisation" else value


def _described(run: Trained) -> Kind:
    model, config = run.model, run.config
    if config is None:
        defence, training = "unknown embedding" if model.unknown_embedding else NONE, "trained elsewhere"
    else:
        defence, training = config.pipeline.label, _training(config)
        if ratio := config.pipeline.mask_ratio:
            defence += f" {ratio:g}"  # the label leaves it out
    return Kind(model.name, defence + (" + IDX" if model.index_embedding else ""), model.localisation, training)


def _training(config: TrainingConfig | TrainingScenario) -> str:
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


def _unfinished(run: TrainingFolder, config: TrainingConfig | TrainingScenario) -> str:
    wanted = config.rounds if isinstance(config, TrainingScenario) else config.recipe.epochs
    if not run.history.exists():
        return ""
    with run.history.open(newline="", encoding="utf-8") as lines:
        done = [row[0] for row in csv.reader(lines)][1:]
    what = "rounds" if isinstance(config, TrainingScenario) else "epochs"
    return "" if done and int(float(done[-1])) >= wanted else f"{len(done)} of {wanted} {what}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
