"""Defences in the order in which a client applies them: ``mjp + round:precision=bfloat16``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from fedmjp.config import Checkpoint, Config, ModelConfig
from fedmjp.defences import DEFENCES
from fedmjp.defences.base import FULL_BITS, Arranged, Client, Defence, Drawn, Mark, Plan, Spent, Stage, unmoved
from fedmjp.errors import ConfigError
from fedmjp.models.roles import roles_of
from fedmjp.named import NamedConfig, format_options
from fedmjp.randomness import Randomness
from fedmjp.zoo import PREFIX, zoo_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedmjp.models.entrance import Entrance

NONE = "none"  # how an empty pipeline is called
# A client changes pictures and network before it computes, gradients of pictures before their mean, and so on.
ORDER: tuple[Stage, ...] = ("pictures", "model", "examples", "update", "aggregate")
# Options that columns of their own tell in every table (the mask ratio, the setting), or that follow from the run.
MASK_RATIO = "mask_ratio"
FOLLOWING = frozenset({MASK_RATIO, *(option.name for option in fields(Plan))})
ELSEWHERE = FOLLOWING | {"shuffle"}


class DefenceConfig(NamedConfig[Defence]):
    """A defence by name, with its options beside the name: ``{name: gaussian, noise: 0.001}``.

    Text is ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``, as the command line takes it.
    """

    registry = DEFENCES
    following = FOLLOWING

    __hash__ = NamedConfig.__hash__

    @property
    def label(self) -> str:
        """Write it as tables show it: without options that have a column of their own."""
        return format_options(self.name, {key: value for key, value in self.options.items() if key not in ELSEWHERE})


def _listed(value: object) -> object:
    """Read a single defence as a pipeline of one, and ``none`` as an empty one."""
    if value in (None, NONE, [NONE], (NONE,)):
        return ()
    if isinstance(value, str | Mapping | DefenceConfig):
        return (value,)
    return tuple(value) if isinstance(value, list) else value  # where JSON is read by the letter, a list is no tuple


Defences = Annotated[tuple[DefenceConfig, ...], BeforeValidator(_listed)]


@dataclass(frozen=True)
class Pipeline:
    """The defences of a client, in the order in which it applies them.

    Args:
        configs: In that order.

    Raises:
        ConfigError: If the order is impossible, with the reason.

    Example:
        >>> pipeline = read_pipeline(["mjp", "round:precision=bfloat16"])
        >>> pipeline.label, sorted(pipeline.marks)
        ('mjp + round:precision=bfloat16', ['masked', 'rounded', 'shuffled'])
    """

    configs: tuple[DefenceConfig, ...] = ()
    defences: tuple[Defence, ...] = field(init=False, compare=False, repr=False)  # they themselves, in order
    label: str = field(init=False, compare=False, repr=False)  # as tables show it
    marks: frozenset[Mark] = field(init=False, compare=False, repr=False)  # what all of them leave on an upload
    shuffles: bool = field(init=False, compare=False, repr=False)  # whether pictures are, before the network
    mask_ratio: float = field(init=False, compare=False, repr=False)  # share of patches that are to be shuffled, or 0
    clients: int = field(init=False, compare=False, repr=False)  # whose updates the server sees as one
    parts: bool = field(init=False, compare=False, repr=False)  # whether a part of an update is protected as the whole
    _arranging: Defence | None = field(init=False, compare=False, repr=False)  # changes pictures before the network
    rounding: float = field(init=False, compare=False, repr=False)  # the largest relative error left in an entry

    def __post_init__(self) -> None:
        defences = tuple(config.build() for config in self.configs)
        marks: frozenset[Mark] = frozenset().union(*(defence.marks for defence in defences))
        shuffles = any(defence.shuffles for defence in defences)
        vars(self).update(
            defences=defences,
            label=" + ".join(config.label for config in self.configs) or NONE,
            marks=marks if shuffles else marks - {"shuffled"},
            shuffles=shuffles,
            mask_ratio=max((defence.mask_ratio for defence in defences), default=0.0),
            clients=max((defence.clients for defence in defences), default=1),
            parts=all(defence.scope == "tensor" for defence in defences),
            _arranging=next((defence for defence in defences if "pictures" in defence.stages), None),
            rounding=max((defence.rounding for defence in defences), default=0.0),
        )
        for place, defence in enumerate(defences):
            self._require_place(defence, defences[:place])

    def _require_place(self, defence: Defence, earlier: Sequence[Defence]) -> None:
        """Refuse a defence that cannot follow those before it."""
        if defence.name in (former.name for former in earlier):
            raise ConfigError(f"defence {defence.name!r} is named twice in {self.label!r}; name it once")
        late = next((former for former in earlier if _first_stage(defence) < _first_stage(former)), None)
        if late is not None:
            unseen = late.stages == ("aggregate",)
            because = " (no client can change the sum, which it does not see)" if unseen else ""
            raise ConfigError(
                f"defences {self.label!r}: {defence.name} acts on {defence.stages[0]}, before {late.name}, which "
                f"acts on the {late.stages[0]}{because}; name {defence.name} first"
            )
        if reason := defence.refusal(earlier):
            raise ConfigError(f"defences {self.label!r}: {reason}")

    def names_of_weights(self, model: str) -> tuple[str, ...]:
        """List the names that trained weights may have, the most telling first.

        A name says the model and the defences of pictures and network that it was trained under.

        Args:
            model: Its name.
        """
        trained, network = self.of_stage("pictures", "model"), self.of_stage("model")
        return f"{model}-{trained.label}", f"{model}-{network.label}", model

    @property
    def draws(self) -> bool:
        """Tell whether two uploads of one picture at the same weights may differ by what any of them drew."""
        return any(defence.draws for defence in self.defences)

    def arrange(self, images: Tensor, grid: int, *, randomness: Sequence[Randomness]) -> Arranged:
        """Change pictures before they go into the network, by the defence that does, if there is one.

        Args:
            images: (batch, 3, size, size) in [0, 1].
            grid: Patches per side.
            randomness: A source for each picture.
        """
        defence = self._arranging
        return unmoved(images, grid) if defence is None else defence.arrange(images, grid, randomness=randomness)

    def ahead(self, grid: int, *, randomness: Sequence[Randomness]) -> Drawn | None:
        """Draw what that defence would for pictures that are not there yet; None if it cannot.

        Args:
            grid: Patches per side.
            randomness: A source for each picture.
        """
        return None if self._arranging is None else self._arranging.ahead(grid, randomness=randomness)

    def shown(self, images: Tensor, drawn: Drawn) -> Arranged:
        """Change pictures before they go into the network, with what was drawn ahead for them.

        Args:
            images: (batch, 3, size, size) in [0, 1].
            drawn: Mask and source of these pictures.
        """
        if self._arranging is None:
            raise ConfigError(f"defences {self.label!r} do not change pictures: nothing can have been drawn for them")
        return self._arranging.shown(images, drawn)

    def noise_on(self, uploaded: Tensor) -> float:
        """Estimate the standard deviation of the noise on the entries of an uploaded tensor.

        Args:
            uploaded: As it arrived, of any shape.
        """
        return float(sum(defence.noise_on(uploaded) ** 2 for defence in self.defences) ** 0.5)

    @property
    def bits(self) -> float:
        """Compute the bits per value of an upload that an encoder needs."""
        bits = FULL_BITS
        for defence in self.defences:
            bits = defence.bits(bits)
        return bits

    def spent(self, uploads: int) -> Spent | None:
        """Compute the privacy that the uploads of one client cost: the best guarantee of those that give one.

        Args:
            uploads: How many, from 0.
        """
        costs = [spent for defence in self.defences if (spent := defence.spent(uploads)) is not None]
        return min(costs, key=lambda spent: spent.epsilon, default=None)

    def of_stage(self, *stages: Stage) -> Pipeline:
        """Select the defences that act at one of some stages.

        Args:
            stages: Which ones.
        """
        pairs = zip(self.configs, self.defences, strict=True)
        return pipeline_of(tuple(config for config, defence in pairs if set(stages) & set(defence.stages)))

    def without(self, name: str) -> Pipeline:
        """Leave out a defence.

        Args:
            name: Of the defence.
        """
        return pipeline_of(tuple(config for config in self.configs if config.name != name))

    def change_model(self, model: ModelConfig) -> ModelConfig:
        """Change the network that a client trains.

        Args:
            model: Without any defence.
        """
        for defence in self.defences:
            model = defence.change_model(model)
        return model

    def withheld(self, model: nn.Module | Entrance) -> frozenset[str]:
        """Name the tensors that never leave the client.

        Args:
            model: That is trained.
        """
        return frozenset().union(*(defence.withheld(roles_of(model)) for defence in self.defences))

    @property
    def by_example(self) -> tuple[Defence, ...]:
        """Select the defences that protect the gradients of single pictures."""
        return self.of_stage("examples").defences

    def combine(self, single: Sequence[Mapping[str, Tensor]], *, randomness: Randomness) -> dict[str, Tensor]:
        """Combine the gradients of a step's pictures, by the defences that protect single ones.

        Args:
            single: By picture, tensors by name.
            randomness: Source of all that is drawn.
        """
        import torch

        gradients = {name: torch.stack([gradient[name] for gradient in single]) for name in single[0]}
        for place, defence in enumerate(self.by_example):
            gradients = defence.protect_examples(gradients, randomness=randomness.of(place))
        return gradients

    def planned(self, plan: Plan) -> tuple[DefenceConfig, ...]:
        """Complete the configurations by what a plan says of options that were not given.

        Args:
            plan: Of the run.
        """
        planned = []
        for config, defence in zip(self.configs, self.defences, strict=True):
            fields = defence.options_type.model_fields
            follows = {key: item for key, item in asdict(plan).items() if key in fields and item != fields[key].default}
            planned.append(DefenceConfig.model_validate({"name": config.name, **follows, **config.options}))
        return tuple(planned)

    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        """Change an update before it leaves a client.

        Args:
            update: Tensors by name, as the client computed them.
            client: What the client knows besides.
            randomness: Source of all that is drawn.

        Raises:
            DefenceError: If a defence cannot protect it; it must not leave then.
        """
        protected = dict(update)
        for place, defence in enumerate(self.defences):
            if "update" in defence.stages:
                protected = defence.protect(protected, client, randomness=randomness.of(place, defence.name))
        return protected


pipeline_of = lru_cache(maxsize=256)(Pipeline)


def read_model(value: object) -> object:
    """Read a model by its name alone, or with trained weights by ``zoo:NAME``."""
    if isinstance(value, str) and value.startswith(PREFIX):
        return {**zoo_model(value).model, "weights": Checkpoint.of(value)}
    return {"name": value} if isinstance(value, str) else value


class Defended(Config):
    """A model, and how those who train it protect themselves."""

    model: Annotated[ModelConfig, BeforeValidator(read_model)] = ModelConfig(name="deit_small")
    defences: Defences = ()

    @property
    def pipeline(self) -> Pipeline:
        """Return the defences themselves, in order."""
        return pipeline_of(self.defences)

    @property
    def network(self) -> ModelConfig:
        """Return the model that is trained, with what defences add to it."""
        return self.pipeline.change_model(self.model)

    @property
    def label(self) -> str:
        """Name it for titles, log lines and weights, such as ``deit_small-mjp``."""
        return f"{self.model.name}-{self.pipeline.label}"


def with_mask_ratio(configs: tuple[DefenceConfig, ...], ratio: float) -> tuple[DefenceConfig, ...]:
    """Set the mask ratio of defences that take one and do not state their own.

    Args:
        configs: Of all defences.
        ratio: In [0, 1].
    """
    return tuple(
        DefenceConfig.model_validate({"name": config.name, MASK_RATIO: ratio, **config.options})
        if MASK_RATIO in DEFENCES.get(config.name).options_type.model_fields
        else config
        for config in configs
    )


def read_pipeline(texts: Sequence[str]) -> Pipeline:
    """Read the pipeline that a command line names.

    Args:
        texts: A ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE`` for each defence.

    Raises:
        ConfigError: If a name or an option is unknown, or the order impossible.
    """
    return pipeline_of(tuple(DefenceConfig.parse(text) for text in texts if text != NONE))


def _first_stage(defence: Defence) -> int:
    return min(ORDER.index(stage) for stage in defence.stages)
