"""From an experiment's configuration to its cells and trials. Pure: nothing is run here."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from attacks import ATTACKS
from attacks.base import Role
from fedmjp import provenance
from fedmjp.config import Config, FederationConfig, ModelConfig
from fedmjp.data.pictures import PictureEntry
from fedmjp.metrics import metric
from fedmjp.metrics.protocol import Protocol
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel

# Packages whose release can change a trial's numbers; our own code counts by its content.
DECISIVE = (
    "torch", "torchvision", "timm", "breaching", "hydra-core", "lpips", "scikit-image", "scipy", "numpy", "pillow",
)  # fmt: skip
SMALLEST = 11  # pixels per side of SSIM's window
Scalar = str | int | float | bool | None


class AttackConfig(Config):
    """An attack by name, and the options that are not left at their defaults.

    Raises:
        UnknownNameError: If there is no such attack.
        ConfigError: If it has no such option or the value is out of range.
    """

    name: str
    options: Mapping[str, Scalar] = {}

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        ATTACKS.get(self.name)(self.options)
        return self

    @property
    def label(self) -> str:
        """Name and options, as rows show it: ``patch_embedding reading=zeros``."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in sorted(self.options.items()))])


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class Experiment(Config):
    """A federation, what attacks it, and how the result is scored.

    ``attacks`` gives the attacks per model name, each by name or with options: the closed form of
    APRIL, for one, applies to a modified architecture only.
    """

    federation: FederationConfig
    attacks: Mapping[str, tuple[Annotated[AttackConfig, BeforeValidator(_named)], ...]]
    settings: tuple[Setting, ...] = tuple(Setting)
    metrics: tuple[str, ...] = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
    protocol: Protocol = "float"
    labels_known: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        without = [model for model in self.federation.models if not self.attacks.get(model)]
        if without:
            raise ValueError(f"attacks names none for {', '.join(without)}")
        for name, values in (("settings", self.settings), ("metrics", self.metrics)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must each be named once, got {', '.join(values)}")
        for attacks in self.attacks.values():
            labels = [attack.label for attack in attacks]
            if len(set(labels)) < len(labels):
                raise ValueError(f"attacks must each be named once, got {', '.join(labels)}")
        if self.federation.image_size < SMALLEST and {"ssim", "ssim_mjp"} & set(self.metrics):
            raise ValueError(f"image-size {self.federation.image_size} is less than SSIM's window of {SMALLEST}")
        missing = [str(s) for s in self.settings if s.gradient_of not in self.federation.inputs]
        if missing:
            raise ValueError(f"settings {', '.join(missing)} need gradients that federation.inputs leaves out")
        return self

    @property
    def threat(self) -> ThreatModel:
        """What the server sees of this federation, and knows."""
        shared = ("update", "batch_size", "local_steps", "local_learning_rate")
        return ThreatModel(labels_known=self.labels_known, **{name: getattr(self.federation, name) for name in shared})


@dataclass(frozen=True)
class Cell:
    """What one row of the leaderboard stands for.

    ``mask_ratio`` is the share of patches that were to be shuffled or masked in what went into the
    gradient: 0 for an undefended model that sees the clean picture (setting a). ``attack`` is the
    label, options included; ``role`` says whether it is an attack, a floor or a bound.
    """

    model: str
    defence: str
    mask_ratio: float
    attack: str
    role: Role
    setting: Setting
    protocol: Protocol


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that the experiment consists of.

    ``key`` is the digest of everything that determines the result; ``stem`` names the picture's
    files, apart for pictures, batches, seeds, mask ratios and threat models that differ. ``batch``
    names the pictures behind the same upload, in order, this one among them.
    """

    key: str
    stem: str
    cell: Cell
    arm: ModelConfig
    attack: AttackConfig
    picture: PictureEntry
    batch: tuple[str, ...]


def plan(experiment: Experiment, batches: Sequence[tuple[PictureEntry, ...]], *, uploads: str) -> list[PlannedTrial]:
    """Every trial of the experiment.

    Args:
        experiment: What to run.
        batches: The pictures behind each upload of an arm and version.
        uploads: Where they come from: "federated", "direct", or the digest of what was recorded.
    """
    shared = _shared(experiment) | {"uploads": uploads}
    return [
        _trial(experiment, shared, arm, attack, setting, entry, batch)
        for arm in experiment.federation.arms
        for attack in experiment.attacks[arm.name]
        for setting in experiment.settings
        for batch in batches
        for entry in batch
    ]


def _trial(
    experiment: Experiment,
    shared: Mapping[str, Any],
    arm: ModelConfig,
    attack: AttackConfig,
    setting: Setting,
    entry: PictureEntry,
    batch: tuple[PictureEntry, ...],
) -> PlannedTrial:
    cell = Cell(
        model=arm.name,
        defence=arm.defence,
        mask_ratio=_mask_ratio(experiment, arm, setting),
        attack=attack.label,
        role=ATTACKS.get(attack.name).role,
        setting=setting,
        protocol=experiment.protocol,
    )
    own = {
        "cell": asdict(cell),
        "attack": [attack.digest(), _code(attack.name)],
        "model": arm.digest(),
        "picture": asdict(entry),
        "batch": [mate.sha256 for mate in batch],
    }
    key = hashlib.sha256(json.dumps({**shared, **own}, sort_keys=True).encode()).hexdigest()
    names = tuple(mate.name for mate in batch)
    return PlannedTrial(key, _stem(experiment, entry, batch), cell, arm, attack, entry, names)


@lru_cache
def _code(attack: str) -> str:
    """Digest of another package's attack; ours are in the digest of our own code."""
    module = ATTACKS.get(attack).__module__
    return "" if module.partition(".")[0] in provenance.CODE else provenance.package_digest(module)


def _mask_ratio(experiment: Experiment, arm: ModelConfig, setting: Setting) -> float:
    sees_clean_only = arm.defence == "none" and setting is Setting.A
    return 0.0 if sees_clean_only else experiment.federation.mask_ratio


def _shared(experiment: Experiment) -> dict[str, Any]:
    """What determines every trial of the experiment alike."""
    federation, versions = experiment.federation, provenance.versions()
    return {
        "threat": experiment.threat.digest(),
        # Weights for LPIPS that arrive later make new trials, not stale ones.
        "metrics": [name for name in experiment.metrics if metric(name).missing() is None],
        "seed": federation.seed,
        # Once the weights move, who takes part and in which order matters too.
        "federation": federation.digest() if federation.server_learning_rate else None,
        "device": federation.device,
        "versions": {name: versions[name] for name in DECISIVE},
        "code": provenance.code_digest(),
    }


def _stem(experiment: Experiment, entry: PictureEntry, batch: tuple[PictureEntry, ...]) -> str:
    federation = experiment.federation
    mates = " ".join(mate.sha256 for mate in batch)
    apart = f"{entry.name} {mates} {federation.seed} {federation.mask_ratio} {experiment.threat.digest()}"
    return f"{entry.name.replace('/', '_')}-{hashlib.sha256(apart.encode()).hexdigest()[:8]}"
