"""An experiment's configuration, and the cells and trials that it consists of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from attacks import ATTACKS
from attacks.base import Attack, Role
from attacks.stages import TENSORS, Stage, stage_caveat, stage_refusal
from fedmjp.config import Checkpoint, Config, Defence, FederationConfig, ModelConfig
from fedmjp.data.pictures import PictureEntry
from fedmjp.errors import BadInputError
from fedmjp.metrics.protocol import Protocol
from fedmjp.models.classifier import VitClassifier
from fedmjp.settings import Setting
from fedmjp.threat import PROTOCOL, ThreatModel

SMALLEST = 11  # pixels per side of SSIM's window
Keep = Literal["extremes", "all", "none"]  # which pictures of a cell stay on disk
Scalar = str | int | float | bool | None


class AttackConfig(Config):
    """An attack by name, the options that are not left at their defaults, and what its pictures pass afterwards.

    Raises:
        ConfigError: If there is no such attack, it has no such option or the value is out of range.
    """

    name: str
    options: Mapping[str, Scalar] = {}
    then: Stage | None = None

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        try:
            self.made()
        except BadInputError as error:
            raise ValueError(str(error)) from None  # so that a campaign's file can say where it stands
        return self

    @property
    def label(self) -> str:
        """Name, options and stage, as rows show it: ``patch_embedding reading=zeros then reassembly``."""
        after = [f"then {self.then}"] if self.then else []
        return " ".join([self.name, *(f"{key}={value}" for key, value in sorted(self.options.items())), *after])

    @classmethod
    def of_label(cls, label: str) -> Self:
        """The inverse of ``label``.

        Raises:
            UnknownNameError: If there is no such attack.
            ConfigError: If it has no such option, or there is no such stage.
        """
        attack, _, then = label.partition(" then ")
        name, *options = attack.split(" ")
        ATTACKS.get(name)
        pairs = (each.partition("=") for each in options)
        values = {key: None if value == "None" else value for key, _, value in pairs}
        return cls.parse({"name": name, "options": values, "then": then or None})

    def made(self) -> Attack:
        """The attack itself, anew."""
        return ATTACKS.get(self.name)(self.options)

    def tensors(self, model: VitClassifier) -> frozenset[str]:
        """What it and its stage read of uploads."""
        return frozenset(self.made().tensors(model)) | frozenset(TENSORS if self.then else ())

    def refusal(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Which requirement of it or its stage fails; None if both apply."""
        return self.made().refusal(model, threat) or (stage_refusal(model, threat) if self.then else None)

    def caveat(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """What a reader must know of its scores; None if nothing."""
        said = [self.made().caveat(model, threat), stage_caveat(model) if self.then else None]
        return "; ".join(each for each in said if each) or None


def named(value: object) -> object:
    """An attack without options may be given by its name alone."""
    return {"name": value} if isinstance(value, str) else value


class Experiment(Config):
    """A federation, what attacks it, and how the result is scored.

    ``attacks`` gives the attacks per model name, each by name or with options: the closed form of
    APRIL, for one, applies to a modified architecture only. ``checkpoints`` gives the weights per arm
    (``deit_small-mjp``); arms without one start from weights drawn from the seed.
    """

    federation: FederationConfig
    attacks: Mapping[str, tuple[Annotated[AttackConfig, BeforeValidator(named)], ...]]
    settings: tuple[Setting, ...] = tuple(Setting)
    metrics: tuple[str, ...] = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
    protocol: Protocol = "float"
    labels_known: bool = False
    checkpoints: Mapping[str, Checkpoint] = {}

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
    def arms(self) -> list[ModelConfig]:
        """What is attacked, with the weights that it has."""
        return [arm.model_copy(update={"weights": self.checkpoints.get(arm.label)}) for arm in self.federation.arms]

    @property
    def threat(self) -> ThreatModel:
        """What the server sees of this federation, and knows."""
        shared = ("update", "batch_size", "local_steps", "local_learning_rate", *PROTOCOL)
        return ThreatModel(labels_known=self.labels_known, **{name: getattr(self.federation, name) for name in shared})


@dataclass(frozen=True)
class Cell:
    """What one row of the leaderboard stands for.

    ``mask_ratio`` is the share of patches that were to be shuffled or masked in what went into the
    gradient: 0 where a model without the unknown embedding sees the clean picture (setting a).
    ``weights`` is "untrained" or the SHA-256 of the checkpoint. ``attack`` is the label, options
    included; ``role`` says whether it is an attack, a floor or a bound.
    """

    model: str
    weights: str
    defence: Defence
    mask_ratio: float
    attack: str
    role: Role
    setting: Setting
    protocol: Protocol
    threat: ThreatModel


@dataclass(frozen=True)
class PlannedCell:
    """A cell, and what is known of it before anything is run.

    ``refusal`` says why the attack does not apply: such a cell has no trials and stays in every table.
    ``left_out`` counts pictures that are not attacked because the attack's own prior was made of them.
    ``adapted`` says whether the attack takes the cell's defence into account. ``caveat`` is what its
    scores must not be read without. ``upload_bytes`` is the size of one whole float32 update.
    """

    cell: Cell
    refusal: str | None
    left_out: int
    adapted: bool
    caveat: str | None
    upload_bytes: int


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that the experiment consists of.

    ``key`` is the digest of everything that determines the result; ``stem`` names the picture's
    files, apart for pictures, batches, seeds, mask ratios, weights and threat models that differ.
    ``batch`` names the pictures behind the same upload, in order, this one among them.
    """

    key: str
    stem: str
    cell: Cell
    seed: int
    arm: ModelConfig
    attack: AttackConfig
    picture: PictureEntry
    batch: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """An experiment and those of its trials that no earlier part of the plan has."""

    experiment: Experiment
    trials: tuple[PlannedTrial, ...]


@dataclass(frozen=True)
class Plan:
    """Every cell and every trial of one or more experiments on the same pictures."""

    cells: tuple[PlannedCell, ...]
    parts: tuple[Part, ...]

    @property
    def trials(self) -> list[PlannedTrial]:
        """All trials, in the order in which they are run."""
        return [trial for part in self.parts for trial in part.trials]
