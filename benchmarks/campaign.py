"""From an experiment's configuration to its cells and trials. Pure: nothing is run here."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from fedmjp import provenance
from fedmjp.config import Config, FederationConfig, ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.metrics import metric
from fedmjp.metrics.protocol import Protocol
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel

# Packages whose release can change a trial's numbers.
DECISIVE = ("fedmjp", "torch", "timm", "scikit-image", "pillow")


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
    """A trial that the experiment consists of, with the key of its result."""

    key: str
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
    versions = {name: version for name, version in provenance.versions().items() if name in DECISIVE}
    return [
        PlannedTrial(_key(experiment, arm, cell, picture, versions), cell, arm, picture)
        for arm in experiment.federation.arms
        for cell in cells(experiment, arm)
        for picture in pictures
    ]


def _mask_ratio(experiment: Experiment, arm: ModelConfig, setting: Setting) -> float:
    sees_clean_only = arm.defence == "none" and setting is Setting.A
    return 0.0 if sees_clean_only else experiment.federation.mask_ratio


def _key(
    experiment: Experiment, arm: ModelConfig, cell: Cell, picture: LabelledPicture, versions: dict[str, str]
) -> str:
    federation = experiment.federation
    determines = {
        "cell": asdict(cell),
        "model": arm.digest(),
        "threat": experiment.threat.digest(),
        # Weights for LPIPS that arrive later make new trials, not stale ones.
        "metrics": [name for name in experiment.metrics if metric(name).missing() is None],
        "seed": federation.seed,
        "server_learning_rate": federation.server_learning_rate,
        # Once the weights move, who takes part and in which order matters too.
        "federation": federation.digest() if federation.server_learning_rate else None,
        "device": federation.device,
        "picture": [picture.name, picture.digest(), picture.label],
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(determines, sort_keys=True).encode()).hexdigest()
