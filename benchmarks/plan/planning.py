"""From experiments to their cells and trials. Pure: nothing is run here."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from attacks import ATTACKS
from attacks.base import Attack
from attacks.natural_patches import measured_on
from benchmarks.plan.experiment import AttackConfig, Cell, Experiment, Part, Plan, PlannedCell, PlannedTrial
from fedmjp import provenance
from fedmjp.config import ModelConfig
from fedmjp.data.pictures import PictureEntry
from fedmjp.defences import DEFENCES
from fedmjp.metrics import metric
from fedmjp.models.build import blueprint, upload_bytes
from fedmjp.settings import Setting

# Packages whose release can change a trial's numbers; our own code counts by its content.
DECISIVE = (
    "torch", "torchvision", "timm", "breaching", "hydra-core", "lpips", "scikit-image", "scipy", "numpy", "pillow",
)  # fmt: skip
READABLE = 60  # letters of a picture's name in the names of its files
Batches = Sequence[tuple[PictureEntry, ...]]


def plan(experiments: Sequence[Experiment], batches: Sequence[Batches], *, uploads: str) -> Plan:
    """Every cell and trial; what several experiments share is planned once.

    Args:
        experiments: What to run.
        batches: The pictures behind each upload of an arm and version, per experiment.
        uploads: Where they come from: "federated", "direct", or the digest of what was recorded.
    """
    cells: dict[Cell, PlannedCell] = {}
    known: set[str] = set()
    parts: list[Part] = []
    code = provenance.code_digest()  # once: files may change while a long plan is made
    for experiment, own in zip(experiments, batches, strict=True):
        trials: list[PlannedTrial] = []
        for group in _groups(experiment, {"uploads": uploads, "code": code}):
            if group.cell in cells and group.refusal:
                continue
            planned = [] if group.refusal else group.trials(own)
            left_out = 0 if group.refusal else sum(map(len, own)) - len(planned)
            cells.setdefault(group.cell, group.planned(left_out))
            trials += [trial for trial in planned if trial.key not in known]
            known |= {trial.key for trial in planned}
        parts.append(Part(experiment, tuple(trials)))
    return Plan(tuple(cells.values()), tuple(parts))


@dataclass(frozen=True)
class _Group:
    """Trials of one arm, attack and setting of one experiment."""

    experiment: Experiment
    shared: Mapping[str, Any]
    arm: ModelConfig
    tried: AttackConfig
    attack: Attack
    cell: Cell
    refusal: str | None

    def planned(self, left_out: int) -> PlannedCell:
        return PlannedCell(
            cell=self.cell,
            refusal=self.refusal,
            left_out=left_out,
            adapted=self.tried.adapted(self.cell.pipeline, _blueprint(self.arm), self.cell.threat, self.cell.setting),
            caveat=None if self.refusal else self.tried.caveat(_blueprint(self.arm), self.cell.threat),
            upload_bytes=_upload_bytes(self.arm),
        )

    def trials(self, batches: Batches) -> list[PlannedTrial]:
        """One per picture, without the pictures that the attack's prior was made of."""
        own = {
            "cell": _cell_record(self.cell),
            "attack": [self.tried.digest(), _code(ATTACKS.get(self.tried.name).__module__)],
            "defences": [_code(DEFENCES.get(defence.name).__module__) for defence in self.cell.defences],
            "model": self.arm.digest(),
        }
        determined = hashlib.sha256(json.dumps({**self.shared, **own}, sort_keys=True).encode()).hexdigest()
        return [
            self._trial(determined, entry, batch)
            for batch in batches
            if not (self.attack.uses_natural_patches and any(measured_on(mate.name, mate.sha256) for mate in batch))
            for entry in batch
        ]

    def _trial(self, determined: str, entry: PictureEntry, batch: tuple[PictureEntry, ...]) -> PlannedTrial:
        pictures = [asdict(entry), [asdict(mate) for mate in batch]]
        return PlannedTrial(
            key=hashlib.sha256(json.dumps([determined, *pictures], sort_keys=True).encode()).hexdigest(),
            stem=_stem(self.experiment, self.cell, self.arm, entry, batch),
            cell=self.cell,
            seed=self.experiment.scenario.seed,
            arm=self.arm,
            attack=self.tried,
            picture=entry,
            batch=tuple(mate.name for mate in batch),
        )


def _groups(experiment: Experiment, origin: Mapping[str, str]) -> list[_Group]:
    shared = {**_shared(experiment), **origin}
    return [
        _group(experiment, shared, tried, setting) for tried in experiment.attacks for setting in experiment.settings
    ]


def _group(experiment: Experiment, shared: Mapping[str, Any], tried: AttackConfig, setting: Setting) -> _Group:
    attack, arm, scenario = tried.made(), experiment.arm, experiment.scenario
    cell = Cell(
        model=arm.name,
        weights=arm.weights.sha256 if arm.weights else "untrained",
        defences=scenario.defences,
        mask_ratio=scenario.pipeline.mask_ratio,
        attack=tried.label,
        role=attack.role,
        setting=setting,
        protocol=experiment.protocol,
        threat=experiment.threat,
    )
    refusal = tried.refusal(_blueprint(arm), experiment.threat)
    if attack.role == "bound" and shared["uploads"] != "direct":
        refusal = refusal or "is a bound: no recorded upload holds the gradients at all tokens"
    return _Group(experiment, shared, arm, tried, attack, cell, refusal)


_blueprint = lru_cache(maxsize=64)(blueprint)
_upload_bytes = lru_cache(maxsize=64)(upload_bytes)


def _cell_record(cell: Cell) -> dict[str, Any]:
    fields = {name: getattr(cell, name) for name in Cell.__dataclass_fields__}
    defences = [config.model_dump(mode="json") for config in cell.defences]
    return fields | {"setting": str(cell.setting), "threat": cell.threat.digest(), "defences": defences}


@lru_cache
def _code(module: str) -> str:
    """Digest of another package's attack or defence; ours are in the digest of our own code."""
    return "" if module.partition(".")[0] in provenance.CODE else provenance.package_digest(module)


def _shared(experiment: Experiment) -> dict[str, Any]:
    """What determines every trial of the experiment alike."""
    scenario, versions = experiment.scenario, provenance.versions()
    return {
        # Weights for LPIPS that arrive later make new trials, not stale ones.
        "metrics": [name for name in experiment.metrics if metric(name).missing() is None],
        "seed": scenario.seed,
        # Once the weights move, who takes part and in which order matters too.
        "federation": scenario.digest() if scenario.server_learning_rate else None,
        "device": scenario.device,
        "versions": {name: versions[name] for name in DECISIVE},
    }


def _stem(
    experiment: Experiment, cell: Cell, arm: ModelConfig, entry: PictureEntry, batch: tuple[PictureEntry, ...]
) -> str:
    mates = " ".join(f"{mate.name} {mate.label} {mate.sha256}" for mate in batch)
    network = f"{arm.image_size} {arm.patch_size} {arm.classes} {cell.weights}"  # arms share the originals
    apart = f"{mates} {experiment.scenario.seed} {cell.mask_ratio} {network} {entry.name} {cell.threat.digest()}"
    # The end of a name tells most; a file name must not be longer than file systems take.
    readable = entry.name.replace("/", "_")[-READABLE:]
    return f"{readable}-{hashlib.sha256(apart.encode()).hexdigest()[:12]}"
