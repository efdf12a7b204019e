"""A campaign: one question put to many cells, as one file states it."""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fedmjp.arithmetic import Arithmetic, require_arithmetic
from fedmjp.benchmarks.campaign.battery import Battery, read_battery
from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Utility
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment, Keep, experiments_of, named
from fedmjp.config import MAX_CLASSES, MAX_IMAGE_SIZE, MAX_SEED, Checkpoint, Config, MaskRatio
from fedmjp.defences.pipeline import DefenceConfig, Defences, pipeline_of, with_mask_ratio
from fedmjp.errors import BadInputError, ConfigError, suggestion
from fedmjp.metrics import RECOGNISABLE, metric
from fedmjp.models.build import architecture, blueprint
from fedmjp.scenario import SHUFFLED_ALONE, Scenario, make_batch_scenario
from fedmjp.settings import Protocol, Setting
from fedmjp.threat import Server, ThreatModel
from fedmjp.zoo import PREFIX, zoo_model


@contextmanager
def as_value_error() -> Iterator[None]:
    """Let pydantic catch what is wrong, so that a campaign's file can say where it stands."""
    try:
        yield
    except BadInputError as error:
        raise ValueError(str(error)) from None


class DataConfig(Config):
    """Which pictures are attacked, the same in every cell.

    ``source`` is "bundled" or a folder of CLASS/picture files. Either ``ids`` names the pictures, or
    ``pictures`` of them are drawn with ``seed``, from those that no attack was developed on; with ``held_out`` from
    those of them that the prior of natural patches was not made of. ``name`` is what results call the source.
    """

    source: str = "bundled"
    name: str = ""
    pictures: int = Field(8, ge=1)
    held_out: bool = False
    ids: tuple[str, ...] = ()
    seed: int = Field(0, ge=0, le=MAX_SEED)

    @property
    def count(self) -> int:
        """Return the number of pictures."""
        return len(self.ids) or self.pictures

    @property
    def label(self) -> str:
        """Return what results call the source: never a path."""
        return self.name or Path(self.source).name


# What a grid may say of the server's view, in the scenario's words; a list makes several threat models.
THREAT = (
    "update", "batch_size", "local_steps", "local_learning_rate", "local_momentum", "local_batch_size",
    "local_optimiser", "local_weight_decay", "label_smoothing", "mixup", "crop_scale", "arithmetic", "labels_known",
    "uploads_per_picture",
)  # fmt: skip
MOST_CELLS = 100_000  # of a grid; a table of so many is read by nobody
MASK_RATIOS = (0.27,)


def _pipelines(value: object) -> object:
    """Read each entry as a pipeline: a defence, or a list of several in order."""
    return (value,) if isinstance(value, str | Mapping) else value


def _possible(defences: Defences) -> Defences:
    """Require that a client can apply these defences in this order."""
    with as_value_error():
        pipeline_of(defences)
    return defences


Pipelines = Annotated[tuple[Annotated[Defences, AfterValidator(_possible)], ...], BeforeValidator(_pipelines)]


class Rows(Config):
    """Models and defences that the campaign's battery tries, in every view of it."""

    models: tuple[str, ...] = Field(min_length=1)
    defences: Pipelines = Field(min_length=1)
    mask_ratios: tuple[MaskRatio, ...] = Field(MASK_RATIOS, min_length=1)


class Grid(Config):
    """Every combination of what it lists. Attacks that do not apply to a model make refused rows.

    ``models`` are architectures, or ``zoo:NAME`` with weights and patch size of their own.

    ``threats`` are values of scenarios (``THREAT``), of which those that are lists make several. ``mask_ratios`` are
    those of defences that shuffle and do not state their own. ``pictures`` lets attacks that take long have the first
    pictures of the campaign only. A ``server`` that changes weights is for measuring one's own deployment.
    """

    models: tuple[str, ...] = Field(min_length=1)
    defences: Pipelines = Field(((), (DefenceConfig(name="mjp"),)), min_length=1)
    attacks: tuple[Annotated[AttackConfig, BeforeValidator(named)], ...] = Field(min_length=1)
    settings: tuple[Setting, ...] = Field(tuple(Setting), min_length=1)
    mask_ratios: tuple[MaskRatio, ...] = Field(MASK_RATIOS, min_length=1)
    threats: tuple[Mapping[str, Any], ...] = Field(({},), min_length=1)
    pictures: int | None = Field(None, ge=1)
    server: Server = Field(None, description="how the server changes the weights that it sends; by default not at all")

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        with as_value_error():
            for name in self.models:
                zoo_model(name) if name.startswith(PREFIX) else architecture(name)
        for threat in self.threats:
            for key in threat:
                if key not in THREAT:
                    raise ValueError(f"threats: unknown key {key!r}, {suggestion(str(key), THREAT)}")
        views = sum(math.prod(_count(value) for value in threat.values()) for threat in self.threats)
        listed = (self.models, self.defences, self.attacks, self.settings, self.mask_ratios)
        if views * math.prod(map(len, listed)) > MOST_CELLS:
            cells = views * math.prod(map(len, listed))
            raise ValueError(f"makes {cells:,} cells, a grid has at most {MOST_CELLS:,}: take several campaigns")
        for view, defences in itertools.product(self.views, self.defences):
            with as_value_error():
                ThreatModel.parse(view)
                sizes = {
                    "clients": pipeline_of(defences).clients,
                    "pictures_per_client": view.get("batch_size", 1),
                    "server": self.server,
                }
                Scenario.parse({"defences": defences, **sizes, **view})
        return self

    @property
    def views(self) -> list[dict[str, Any]]:
        """List the threat models as values of a scenario."""
        views = []
        for threat in self.threats:
            lists = [value if isinstance(value, list | tuple) else [value] for value in threat.values()]
            views += [dict(zip(threat, values, strict=True)) for values in itertools.product(*lists)]
        return views


def _count(value: object) -> int:
    return len(value) if isinstance(value, list | tuple) else 1


class Budget(Config):
    """How much a run may take; what is left over waits for the next run."""

    hours: float | None = Field(None, gt=0, allow_inf_nan=False)


class Campaign(Config):
    """Everything that determines a campaign's trials, and how they are summarised.

    ``shared`` holds keys of grids that every grid has unless it says otherwise. ``rows`` are tried with the named
    ``battery``, in each of its views (``fedmjp.benchmarks.campaign.battery``). ``weights`` gives
    checkpoints by model (``deit_small``) or by model and defence (``deit_small-mjp``), ``accuracy``
    likewise the top-1 accuracy where it is known.

    Raises:
        ConfigError: If values contradict each other.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100)
    title: str = ""
    question: str = ""
    data: DataConfig = DataConfig()
    grids: tuple[Grid, ...] = ()
    battery: str = ""
    rows: tuple[Rows, ...] = ()
    seeds: tuple[Annotated[int, Field(ge=0, le=MAX_SEED)], ...] = Field((0,), min_length=1)
    metrics: tuple[str, ...] = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
    protocol: Protocol = "float"
    image_size: int = Field(224, ge=1, le=MAX_IMAGE_SIZE)
    patch_size: int = Field(16, ge=1, le=MAX_IMAGE_SIZE)
    classes: int = Field(1000, ge=2, le=MAX_CLASSES)
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
        if not isinstance(shared, Mapping):
            raise ValueError(f"shared = {shared!r} is no group of keys; write keys of grids below it, indented")
        if isinstance(shared, Mapping) and isinstance(grids, (list, tuple)):
            values["grids"] = [{**shared, **grid} if isinstance(grid, Mapping) else grid for grid in grids]
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        with as_value_error():
            for name in self.metrics:
                metric(name)
        if LEAKAGE not in self.metrics:
            raise ValueError(f"metrics must hold {LEAKAGE}, by which leakage is judged; got {', '.join(self.metrics)}")
        if not self.grids and not self.rows:
            raise ValueError("grids (or a battery and its rows) say what is attacked: name one at least")
        if bool(self.battery) is not bool(self.rows):
            raise ValueError("battery names what is tried, rows the models and defences: give both or neither")
        unknown = set(self.weights) | set(self.accuracy)
        for grid in self.tried:
            pipelines = map(pipeline_of, ((), (DefenceConfig(name=SHUFFLED_ALONE),), *grid.defences))
            for pipeline, model in itertools.product(pipelines, grid.models):
                unknown.difference_update(pipeline.names_of_weights(model))
        if unknown:
            raise ValueError(f"weights or accuracy of {', '.join(sorted(unknown))}, which no grid attacks")
        return self

    @cached_property
    def tried(self) -> tuple[Grid, ...]:
        """List all grids: those of the file, then those that the battery makes of the rows."""
        return (*self.grids, *self._of_battery[0])

    @cached_property
    def not_run(self) -> tuple[str, ...]:
        """List what of the battery cannot be run with which rows, and why."""
        return self._of_battery[1]

    @cached_property
    def battery_label(self) -> str:
        """Return name and version of the battery; empty without one."""
        return self._battery.label if self.battery else ""

    @cached_property
    def _battery(self) -> Battery:
        with as_value_error():
            return read_battery(self.battery)

    @cached_property
    def _of_battery(self) -> tuple[tuple[Grid, ...], tuple[str, ...]]:
        grids, reasons = [], []
        for rows in self.rows:
            for defences, view in itertools.product(rows.defences, self._battery.views):
                where, blind = f"{view.name}, {pipeline_of(defences).label}", []
                if view.repeats(defences):
                    reasons.append(f"{where}: a picture's uploads would be the same: what one says holds")
                    continue
                try:
                    values = view.grids(rows.models, defences, self._battery.searched)
                    first, *searches = [Grid.parse({**grid, "mask_ratios": rows.mask_ratios}) for grid in values]
                    self._asked(first, rows.models[0], first.defences[0], first.views[0])
                    grids.append(first)
                    for grid in searches:
                        if self._is_blind(grid):
                            blind.append(grid.attacks[0].label)
                        else:
                            grids.append(grid)
                except BadInputError as error:
                    reasons.append(f"{where}: {error}")
                if blind:
                    blindly = "take long, and do not apply or do not know the defence"
                    reasons.append(f"{where}: {', '.join(blind)}: {blindly}")
        return tuple(grids), tuple(reasons)

    def _is_blind(self, grid: Grid) -> bool:
        """Tell whether a grid's attack applies to no model, or knows the defences on none."""
        (attack,), (defences,), (setting,) = grid.attacks, grid.defences, grid.settings
        pipeline = pipeline_of(defences)
        scenarios = [self._asked(grid, model, defences, grid.views[0]) for model in grid.models]
        drawn = [(scenario.threat, blueprint(scenario.network)) for scenario in scenarios]
        adapts = any(attack.adapted(pipeline, model, threat, setting) for threat, model in drawn)
        return bool(pipeline.defences) and not adapts

    def experiments(self, *, device: Literal["cpu", "cuda"], arithmetic: Arithmetic = "float32") -> list[Experiment]:
        """Build what the grids ask for, each with its twins; nothing twice.

        Clients compute in the arithmetic where a grid states none.

        Args:
            device: Where attacks run.
            arithmetic: Of clients, where a grid states none.

        Raises:
            ConfigError: If a combination cannot be run, with its own reason.
        """
        experiments: dict[str, Experiment] = {}
        for grid in self.tried:
            combinations = itertools.product(self.seeds, grid.views, grid.mask_ratios, grid.models, grid.defences)
            for seed, view, mask_ratio, model, defences in combinations:
                values = {"arithmetic": arithmetic, **view, "seed": seed}
                scenario = self._asked(grid, model, with_mask_ratio(defences, mask_ratio), values)
                require_arithmetic(scenario.arithmetic, device)
                scenario = scenario.model_copy(update={"device": device})
                for experiment in experiments_of(
                    scenario,
                    grid.settings,
                    grid.attacks,
                    mask_ratio=mask_ratio,
                    metrics=self.metrics,
                    protocol=self.protocol,
                ):
                    weighted = self._with_weights(experiment)
                    experiments.setdefault(weighted.digest(), weighted)
        return list(experiments.values())

    def _asked(self, grid: Grid, model: str, defences: Defences, view: Mapping[str, Any]) -> Scenario:
        pictures = min(grid.pictures or self.data.count, self.data.count)
        values = {"model": self._network(model), "defences": defences, "data": self.data.source, **view}
        values["server"] = grid.server
        return make_batch_scenario(values, pictures)

    def _network(self, model: str) -> dict[str, Any]:
        """Return sizes and, of the zoo, weights; ConfigError if the zoo's model takes other pictures."""
        sizes = {"image_size": self.image_size, "patch_size": self.patch_size, "classes": self.classes}
        if not model.startswith(PREFIX):
            return {"name": model, **sizes}
        zoo = zoo_model(model)
        stated = {name: value for name, value in zoo.model.items() if name != "localisation"}
        for name in ("image_size", "classes"):
            if stated[name] != sizes[name]:
                raise ConfigError(f"{name} is {sizes[name]}, but {model} has {stated[name]}: set {name} to that")
        return {**stated, "unknown_embedding": zoo.defence == "mjp", "weights": _checkpoint_of(model)}

    def _with_weights(self, experiment: Experiment) -> Experiment:
        scenario = experiment.scenario
        names = scenario.pipeline.names_of_weights(scenario.model.name)
        path = next((self.weights[name] for name in names if name in self.weights), None)
        if path is None:
            return experiment
        model = scenario.model.model_copy(update={"weights": _checkpoint_of(path)})
        return experiment.model_copy(update={"scenario": scenario.model_copy(update={"model": model})})


_checkpoint_of = lru_cache(maxsize=32)(Checkpoint.of)
