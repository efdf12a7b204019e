"""From experiments to their cells and trials. Pure: nothing is run here."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fedmjp import provenance
from fedmjp.attacks import ATTACKS
from fedmjp.attacks.held_out import measured_on
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment
from fedmjp.benchmarks.plan.trial_plan import Cell, PlannedTrial, PlanPart, TrialPlan, cells_as_json
from fedmjp.config import ModelConfig, digest_of
from fedmjp.data.pictures import PictureEntry
from fedmjp.defences import DEFENCES
from fedmjp.metrics import metric
from fedmjp.models.build import blueprint, parameter_count
from fedmjp.settings import Setting

# Packages whose release can change a trial's numbers; our own code counts by its content.
DECISIVE = (
    "torch", "torchvision", "timm", "breaching", "hydra-core", "lpips", "scikit-image", "scipy", "numpy", "pillow",
)  # fmt: skip
BYTES = 4  # of a float32 value
READABLE = 60  # letters of a picture's name in the names of its files
Batches = Sequence[tuple[PictureEntry, ...]]
Targets = Sequence[tuple[tuple[PictureEntry, ...], Sequence[PictureEntry]]]  # batches, and what the server is after


def plan(experiments: Sequence[Experiment], batches: Sequence[Batches], *, uploads: str) -> TrialPlan:
    """Plan every cell and trial; what several experiments share is planned once.

    Args:
        experiments: What to run.
        batches: The pictures behind each upload of an arm and version, per experiment.
        uploads: Where they come from: "federated", "direct", or the digest of what was recorded.
    """
    cells: dict[Cell, Cell] = {}
    keys: set[str] = set()
    parts: list[PlanPart] = []
    code, versions = provenance.code_digest(), provenance.versions()  # once: files may change while a long plan is made
    for experiment, experiment_batches in zip(experiments, batches, strict=True):
        scenario = experiment.scenario
        shared = {
            # Weights for LPIPS that arrive later make new trials, not stale ones.
            "metrics": [name for name in experiment.metrics if metric(name).missing() is None],
            "seed": scenario.seed,
            # Once the weights move, who takes part and in which order matters too.
            "federation": scenario.digest() if scenario.server_learning_rate else None,
            "device": scenario.device,
            "versions": {name: versions[name] for name in DECISIVE},
            "uploads": uploads,
            "code": code,
        }
        targets = [
            (batch, [batch[place] for place in scenario.wanted([entry.label for entry in batch])])
            for batch in experiment_batches
        ]
        trials: list[PlannedTrial] = []
        for attack, setting in itertools.product(experiment.attacks, experiment.settings):
            cell = _cell(experiment, attack, setting, _refusal(experiment, attack, uploads))
            planned = [] if cell.refusal else _trials(experiment, attack, cell, shared, targets)
            left_out = 0 if cell.refusal else sum(len(entries) for _, entries in targets) - len(planned)
            cells.setdefault(cell, replace(cell, left_out=left_out))
            trials += [trial for trial in planned if trial.key not in keys]
            keys |= {trial.key for trial in planned}
        parts.append(PlanPart(experiment, tuple(trials)))
    return TrialPlan(tuple(cells.values()), parts=tuple(parts))


def decisive_facts(experiments: Sequence[Experiment]) -> dict[str, str]:
    """List what must be the same on two machines that compute the same trials: versions and digests by their names.

    Args:
        experiments: The machines work on.

    Raises:
        UnknownNameError: If this machine lacks the package of an attack or a defence.
    """
    versions = provenance.versions()
    facts = {"the digest of fedmjp's code": provenance.code_digest(), **{name: versions[name] for name in DECISIVE}}
    for experiment in experiments:
        for attack in experiment.attacks:
            facts[f"the package of attack {attack.name}"] = _code(ATTACKS.get(attack.name).__module__)
        for defence in experiment.scenario.defences:
            facts[f"the package of defence {defence.name}"] = _code(DEFENCES.get(defence.name).__module__)
        for name in experiment.metrics:
            facts[f"metric {name}"] = "missing" if metric(name).missing() else "computed"
    return facts


def _cell(experiment: Experiment, attack: AttackConfig, setting: Setting, refusal: str | None) -> Cell:
    scenario, built = experiment.scenario, attack.build()
    arm, threat = scenario.network, scenario.threat
    model = blueprint(arm)
    return Cell(
        model=arm.name,
        weights=arm.weights.sha256 if arm.weights else "untrained",
        defences=scenario.defences,
        mask_ratio=scenario.pipeline.mask_ratio,
        attack=attack.label,
        role=built.role,
        setting=setting,
        protocol=experiment.protocol,
        threat=threat,
        reveals=built.reveals,
        refusal=refusal,
        adapted=bool(scenario.defences) and attack.adapted(scenario.pipeline, model, threat, setting),
        caveat=None if refusal else attack.caveat(model, threat),
        upload_bytes=BYTES * parameter_count(arm),
    )


def _refusal(experiment: Experiment, attack: AttackConfig, uploads: str) -> str | None:
    model, scenario = blueprint(experiment.scenario.network), experiment.scenario
    server = scenario.server and scenario.server.build().refusal(model, scenario.threat, trains=False)
    if scenario.server and attack.build().role == "bound":
        server = server or "is a bound of what honest servers see"
    refusal = server or attack.refusal(model, experiment.scenario.threat)
    if attack.build().role == "bound" and uploads != "direct":
        return refusal or "is a bound: no recorded upload holds the gradients at all tokens"
    return refusal


def _trials(
    experiment: Experiment, attack: AttackConfig, cell: Cell, shared: Mapping[str, Any], targets: Targets
) -> list[PlannedTrial]:
    """Plan a trial per picture that the server is after, without those that the attack's prior was made of."""
    arm, seed, threat = (
        experiment.scenario.network,
        experiment.scenario.seed,
        cell.threat.digest(),
    )  # once: trials are many
    specific = {
        "cell": cells_as_json((cell,))[0]["cell"],
        "attack": [attack.digest(), _code(ATTACKS.get(attack.name).__module__)],
        "defences": [_code(DEFENCES.get(defence.name).__module__) for defence in cell.defences],
        "model": arm.digest(),
        # Features are looked up among all pictures.
        "gallery": [vars(entry) for batch, _ in targets for entry in batch] if cell.reveals == "features" else None,
    }
    determined = digest_of({**shared, **specific})
    has_prior = attack.build().uses_natural_patches
    return [
        PlannedTrial(
            key=digest_of([determined, vars(entry), [vars(mate) for mate in batch]]),
            stem=_stem(arm, cell, entry, batch, seed, threat),
            cell=cell,
            seed=seed,
            arm=arm,
            attack=attack,
            picture=entry,
            batch=tuple(mate.name for mate in batch),
        )
        for batch, entries in targets
        if not (has_prior and any(measured_on(mate.name, mate.sha256) for mate in batch))
        for entry in entries
    ]


@lru_cache
def _code(module: str) -> str:
    """Digest another package's attack or defence; ours are in the digest of our own code."""
    return "" if module.partition(".")[0] == "fedmjp" else provenance.package_digest(module)


def _stem(
    arm: ModelConfig, cell: Cell, entry: PictureEntry, batch: tuple[PictureEntry, ...], seed: int, threat: str
) -> str:
    # Apart for pictures, batches, seeds, mask ratios, weights and threat models that differ.
    mates = " ".join(f"{mate.name} {mate.label} {mate.sha256}" for mate in batch)
    network = f"{arm.image_size} {arm.patch_size} {arm.classes} {cell.weights}"  # arms share the originals
    identity = f"{mates} {seed} {cell.mask_ratio} {network} {entry.name} {threat}"
    # The end of a name tells most; a file name must not be longer than file systems take.
    readable = entry.name.replace("/", "_")[-READABLE:]
    return f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
