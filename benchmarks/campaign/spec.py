"""A campaign: one question put to many cells, as one file states it."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from benchmarks.leaderboard.entries import LEAKAGE, RECOGNISABLE, Utility
from benchmarks.plan.experiment import AttackConfig, Experiment, Keep, named
from fedmjp.config import (
    MAX_SEED,
    Checkpoint,
    Config,
    Defence,
    FederationConfig,
    MaskRatio,
    ModelConfig,
    Precision,
    UpdateKind,
)
from fedmjp.errors import UnknownNameError
from fedmjp.metrics import metric
from fedmjp.metrics.protocol import Protocol
from fedmjp.models.build import architecture
from fedmjp.settings import Setting


def _listed(value: object) -> object:
    return (value,) if isinstance(value, int) else value


Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_listed), Field(min_length=1)]


def _known(look_up: Callable[[str], object], name: str) -> None:
    """ValueError unless there is such a thing, so that a campaign's file can say where the name stands."""
    try:
        look_up(name)
    except UnknownNameError as error:
        raise ValueError(str(error)) from None


class DataConfig(Config):
    """Which pictures are attacked, the same in every cell.

    ``source`` is "bundled" or a folder of CLASS/picture files. Either ``ids`` names the pictures, or
    ``pictures`` of them are drawn with ``seed``, with ``held_out`` from those that the prior of natural
    patches was not made of. ``name`` is what results call the source.
    """

    source: str = "bundled"
    name: str = ""
    pictures: int = Field(8, ge=1)
    held_out: bool = False
    ids: tuple[str, ...] = ()
    seed: int = Field(0, ge=0, le=MAX_SEED)

    @property
    def count(self) -> int:
        """Number of pictures."""
        return len(self.ids) or self.pictures

    @property
    def label(self) -> str:
        """What results call the source: never a path, which says nothing elsewhere."""
        return self.name or Path(self.source).name


class Threat(Config):
    """What a server sees and knows; each combination of what is listed makes a threat model."""

    update: UpdateKind = "gradient"
    batch_size: Counts = (1,)
    local_steps: Counts = (1,)
    local_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False)
    labels_known: bool = False
    uploads_per_picture: Counts = (1,)
    precision: Precision = "float32"
    noise: float = Field(0.0, ge=0, allow_inf_nan=False)
    kept: float = Field(1.0, gt=0, le=1)


class Grid(Config):
    """Every combination of what it lists. Attacks that do not apply to a model make refused rows.

    ``pictures`` lets attacks that take long have the first pictures of the campaign only.
    """

    models: tuple[str, ...] = Field(min_length=1)
    defences: tuple[Defence, ...] = Field(("none", "mjp"), min_length=1)
    attacks: tuple[Annotated[AttackConfig, BeforeValidator(named)], ...] = Field(min_length=1)
    settings: tuple[Setting, ...] = Field(tuple(Setting), min_length=1)
    mask_ratios: tuple[MaskRatio, ...] = Field((0.27,), min_length=1)
    threats: tuple[Threat, ...] = Field((Threat(),), min_length=1)
    pictures: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _models_are_known(self) -> Self:
        for name in self.models:
            _known(architecture, name)
        return self


class Budget(Config):
    """How much a run may take; what is left over waits for the next run."""

    hours: float | None = Field(None, gt=0, allow_inf_nan=False)


class Campaign(Config):
    """Everything that determines a campaign's trials, and how they are summarised.

    ``shared`` holds keys of grids that every grid has unless it says otherwise. ``weights`` gives
    checkpoints by model (``deit_small``) or by model and defence (``deit_small-mjp``), ``accuracy``
    likewise the top-1 accuracy where it is known.

    Raises:
        ConfigError: If values contradict each other.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    title: str = ""
    question: str = ""
    data: DataConfig = DataConfig()
    grids: tuple[Grid, ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0, le=MAX_SEED)], ...] = Field((0,), min_length=1)
    metrics: tuple[str, ...] = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
    protocol: Protocol = "float"
    image_size: int = Field(224, ge=1)
    patch_size: int = Field(16, ge=1)
    classes: int = Field(1000, ge=2)
    weights: Mapping[str, str] = {}
    accuracy: Mapping[str, Utility] = {}
    recognisable_at: float = Field(RECOGNISABLE, gt=0, allow_inf_nan=False, description="dB of PSNR")
    keep: Keep = "extremes"
    budget: Budget = Budget()
    reported: tuple[Literal["mjp_table5"], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _share(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or "shared" not in values:
            return values
        values = dict(values)
        shared, grids = values.pop("shared"), values.get("grids")
        if isinstance(shared, Mapping) and isinstance(grids, (list, tuple)):
            values["grids"] = [{**shared, **grid} if isinstance(grid, Mapping) else grid for grid in grids]
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in self.metrics:
            _known(metric, name)
        if LEAKAGE not in self.metrics:
            raise ValueError(f"metrics must hold {LEAKAGE}, by which leakage is judged; got {', '.join(self.metrics)}")
        unknown = set(self.weights) | set(self.accuracy)
        for grid in self.grids:
            unknown -= {*grid.models, *(f"{model}-{defence}" for model in grid.models for defence in grid.defences)}
        if unknown:
            raise ValueError(f"weights or accuracy of {', '.join(sorted(unknown))}, which no grid attacks")
        return self

    def experiments(self, *, device: Literal["cpu", "cuda"]) -> list[Experiment]:
        """One experiment per grid, seed, threat model and mask ratio.

        Raises:
            ConfigError: If a combination cannot be run, with its own reason.
        """
        return [
            self._experiment(grid, seed, threat, mask_ratio, device)
            for grid in self.grids
            for seed in self.seeds
            for threat in _single(grid.threats)
            for mask_ratio in grid.mask_ratios
        ]

    def _experiment(
        self, grid: Grid, seed: int, threat: Threat, mask_ratio: float, device: Literal["cpu", "cuda"]
    ) -> Experiment:
        federation = FederationConfig.parse(
            {
                "models": grid.models,
                "defences": grid.defences,
                "mask_ratio": mask_ratio,
                "image_size": self.image_size,
                "patch_size": self.patch_size,
                "classes": self.classes,
                "data": self.data.source,
                "clients": 1,
                "pictures_per_client": min(grid.pictures or self.data.count, self.data.count),
                "batch_size": threat.batch_size[0],
                "inputs": tuple(dict.fromkeys(setting.gradient_of for setting in grid.settings)),
                "update": threat.update,
                "local_steps": threat.local_steps[0],
                "local_learning_rate": threat.local_learning_rate,
                "uploads_per_picture": threat.uploads_per_picture[0],
                "precision": threat.precision,
                "noise": threat.noise,
                "kept": threat.kept,
                "seed": seed,
                "device": device,
            }
        )
        return Experiment.parse(
            {
                "federation": federation,
                "attacks": dict.fromkeys(grid.models, grid.attacks),
                "settings": grid.settings,
                "metrics": self.metrics,
                "protocol": self.protocol,
                "labels_known": threat.labels_known,
                "checkpoints": {arm.label: self._checkpoint(arm) for arm in federation.arms if self._path(arm)},
            }
        )

    def _path(self, arm: ModelConfig) -> str | None:
        return self.weights.get(arm.label, self.weights.get(arm.name))

    def _checkpoint(self, arm: ModelConfig) -> Checkpoint:
        return _checkpoint_of(str(self._path(arm)))


_checkpoint_of = lru_cache(maxsize=32)(Checkpoint.of)


def _single(threats: Iterable[Threat]) -> list[Threat]:
    """One threat model per batch size, number of steps and number of uploads."""
    return [
        threat.model_copy(update={"batch_size": (size,), "local_steps": (steps,), "uploads_per_picture": (uploads,)})
        for threat in threats
        for size in threat.batch_size
        for steps in threat.local_steps
        for uploads in threat.uploads_per_picture
    ]
