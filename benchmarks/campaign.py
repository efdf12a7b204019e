"""From an experiment's configuration to its cells and trials. Pure: nothing is run here."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from pydantic import model_validator

from fedmjp import provenance
from fedmjp.config import Config, FederationConfig, ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.metrics import metric
from fedmjp.metrics.protocol import Protocol
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel

# Packages whose release can change a trial's numbers; our own code counts by its content.
DECISIVE = ("torch", "torchvision", "timm", "lpips", "scikit-image", "pillow")


class Experiment(Config):
    """A federation, what attacks it, and how the result is scored.

    ``attacks`` gives the attacks per model name: the closed form of APRIL, for one, applies to a
    modified architecture only.
    """

    federation: FederationConfig
    attacks: Mapping[str, tuple[str, ...]]
    settings: tuple[Setting, ...] = tuple(Setting)
    metrics: tuple[str, ...] = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
    protocol: Protocol = "float"
    threat: ThreatModel = ThreatModel()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        without = [model for model in self.federation.models if not self.attacks.get(model)]
        if without:
            raise ValueError(f"attacks names none for {', '.join(without)}")
        missing = [str(s) for s in self.settings if s.gradient_of not in self.federation.inputs]
        if missing:
            raise ValueError(f"settings {', '.join(missing)} need gradients that federation.inputs leaves out")
        return self


@dataclass(frozen=True)
class Cell:
    """What one row of the leaderboard stands for.

    ``mask_ratio`` is the share of patches that were to be shuffled or masked in what went into the
    gradient: 0 for an undefended model that sees the clean picture (setting a).
    """

    model: str
    defence: str
    mask_ratio: float
    attack: str
    setting: Setting
    protocol: Protocol


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that the experiment consists of.

    ``key`` is the digest of everything that determines the result; ``stem`` names the picture's
    files, apart for pictures, seeds and mask ratios that differ.
    """

    key: str
    stem: str
    cell: Cell
    arm: ModelConfig
    picture: LabelledPicture


def cells(experiment: Experiment, arm: ModelConfig) -> list[Cell]:
    """The cells of one arm."""
    return [
        Cell(
            model=arm.name,
            defence=arm.defence,
            mask_ratio=_mask_ratio(experiment, arm, setting),
            attack=attack,
            setting=setting,
            protocol=experiment.protocol,
        )
        for attack in experiment.attacks[arm.name]
        for setting in experiment.settings
    ]


def plan(experiment: Experiment, pictures: Sequence[LabelledPicture]) -> list[PlannedTrial]:
    """Every trial of the experiment."""
    shared = _shared(experiment)
    return [
        PlannedTrial(_key(shared, arm, cell, picture), _stem(experiment, picture), cell, arm, picture)
        for arm in experiment.federation.arms
        for cell in cells(experiment, arm)
        for picture in pictures
    ]


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


def _key(shared: Mapping[str, Any], arm: ModelConfig, cell: Cell, picture: LabelledPicture) -> str:
    own = {
        "cell": asdict(cell),
        "model": arm.digest(),
        "picture": [picture.name, picture.digest(), picture.label],
    }
    return hashlib.sha256(json.dumps({**shared, **own}, sort_keys=True).encode()).hexdigest()


def _stem(experiment: Experiment, picture: LabelledPicture) -> str:
    federation = experiment.federation
    apart = f"{picture.name} {picture.digest()} {federation.seed} {federation.mask_ratio}"
    return f"{picture.name.replace('/', '_')}-{hashlib.sha256(apart.encode()).hexdigest()[:8]}"
