"""Defences in the order in which a client applies them: ``mjp + round:precision=bfloat16``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from fedmjp.config import Checkpoint, Config, ModelConfig
from fedmjp.defences import DEFENCES
from fedmjp.defences.base import FULL_BITS, Arranged, Client, Defence, Drawn, Mark, Plan, Spent, Stage
from fedmjp.errors import ConfigError
from fedmjp.named import NamedConfig, text_of
from fedmjp.randomness import Randomness
from fedmjp.torch_later import torch
from fedmjp.zoo import PREFIX, zoo_model

if TYPE_CHECKING:
    from torch import Tensor

NONE = "none"  # how an empty pipeline is called
# A client changes pictures and network before it computes, gradients of pictures before their mean, and so on.
ORDER: tuple[Stage, ...] = ("pictures", "model", "examples", "update", "aggregate")
# Options that columns of their own tell in every table (the mask ratio, the setting), or that follow from the run.
MASK_RATIO = "mask_ratio"
FOLLOWING = frozenset({MASK_RATIO, *(field.name for field in fields(Plan))})
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
        """As tables show it: without options that have a column of their own."""
        return text_of(self.name, {key: value for key, value in self.options.items() if key not in ELSEWHERE})


def _listed(value: object) -> object:
    """A single defence as a pipeline of one; ``none`` as one of none."""
    if value in (None, NONE, [NONE], (NONE,)):
        return ()
    if isinstance(value, str | Mapping | DefenceConfig):
        return (value,)
    return tuple(value) if isinstance(value, list) else value  # where JSON is read by the letter, a list is no tuple


Defences = Annotated[tuple[DefenceConfig, ...], BeforeValidator(_listed)]


@dataclass(frozen=True)
class Pipeline:
    """What a client does to protect itself, in order; ConfigError, with the reason, if the order is impossible."""

    configs: tuple[DefenceConfig, ...] = ()

    def __post_init__(self) -> None:
        names = [config.name for config in self.configs]
        for place, defence in enumerate(self.defences):
            before = self.defences[:place]
            if defence.name in names[:place]:
                raise ConfigError(f"defence {defence.name!r} is named twice in {self.label!r}; name it once")
            late = next((other for other in before if _first(defence) < _first(other)), None)
            if late is not None:
                unseen = late.stages == ("aggregate",)
                because = " (no client can change the sum, which it does not see)" if unseen else ""
                raise ConfigError(
                    f"defences {self.label!r}: {defence.name} acts on {defence.stages[0]}, before {late.name}, which "
                    f"acts on the {late.stages[0]}{because}; name {defence.name} first"
                )
            if reason := defence.refusal(before):
                raise ConfigError(f"defences {self.label!r}: {reason}")

    @cached_property
    def defences(self) -> tuple[Defence, ...]:
        """The defences themselves."""
        return tuple(config.build() for config in self.configs)

    @property
    def label(self) -> str:
        """How tables call it."""
        return " + ".join(config.label for config in self.configs) or NONE

    def names_of_weights(self, model: str) -> tuple[str, ...]:
        """What trained weights may be called, the most telling first: a model, and what it was trained with.

        What is done to updates afterwards does not count, and what only shuffles leaves the network as it is.
        """
        trained, network = self.of_stage("pictures", "model"), self.of_stage("model")
        return f"{model}-{trained.label}", f"{model}-{network.label}", model

    @property
    def marks(self) -> frozenset[Mark]:
        """What all of them leave on an upload."""
        marks: frozenset[Mark] = frozenset().union(*(defence.marks for defence in self.defences))
        return marks if self.shuffles else marks - {"shuffled"}

    @property
    def draws(self) -> bool:
        """Whether two uploads of one picture at the same weights may differ by what any of them drew."""
        return any(defence.draws for defence in self.defences)

    @property
    def mask_ratio(self) -> float:
        """Wanted share of shuffled patches; 0 if nothing shuffles."""
        return max((defence.mask_ratio for defence in self.defences), default=0.0)

    @property
    def shuffles(self) -> bool:
        """Whether pictures are shuffled before they go into the network."""
        return any(defence.shuffles for defence in self.defences)

    @property
    def clients(self) -> int:
        """How many clients' updates the server sees as one."""
        return max((defence.clients for defence in self.defences), default=1)

    def arrange(self, images: Tensor, grid: int, *, randomness: Sequence[Randomness]) -> Arranged:
        """Pictures as they go into the network, by the defence that changes them, if there is one."""
        return self._arranging.arrange(images, grid, randomness=randomness)

    def ahead(self, grid: int, *, randomness: Sequence[Randomness]) -> Drawn | None:
        """What that defence would draw for pictures that are not there yet; None if it cannot."""
        return self._arranging.ahead(grid, randomness=randomness)

    def shown(self, images: Tensor, drawn: Drawn) -> Arranged:
        """Pictures as they go into the network, with what was drawn ahead for them."""
        return self._arranging.shown(images, drawn)

    @property
    def _arranging(self) -> Defence:
        return next((defence for defence in self.defences if "pictures" in defence.stages), Defence())

    @property
    def parts(self) -> bool:
        """Whether a part of an update is protected as the whole is."""
        return all(defence.scope == "tensor" for defence in self.defences)

    @property
    def rounding(self) -> float:
        """Largest relative error that is left in an entry."""
        return max((defence.rounding for defence in self.defences), default=0.0)

    def noise_on(self, uploaded: Tensor) -> float:
        """Standard deviation of the noise on the entries of an uploaded tensor."""
        return float(sum(defence.noise_on(uploaded) ** 2 for defence in self.defences) ** 0.5)

    @property
    def bits(self) -> float:
        """Bits per value of an upload that an encoder needs."""
        bits = FULL_BITS
        for defence in self.defences:
            bits = defence.bits(bits)
        return bits

    def spent(self, uploads: int) -> Spent | None:
        """Privacy that so many uploads of one client cost: the best guarantee of those that give one."""
        costs = [spent for defence in self.defences if (spent := defence.spent(uploads)) is not None]
        return min(costs, key=lambda spent: spent.epsilon, default=None)

    def of_stage(self, *stages: Stage) -> Pipeline:
        """Those that act at one of these stages."""
        kept = (
            config for config, made in zip(self.configs, self.defences, strict=True) if set(stages) & set(made.stages)
        )
        return pipeline_of(tuple(kept))

    def without(self, name: str) -> Pipeline:
        """All others."""
        return pipeline_of(tuple(config for config in self.configs if config.name != name))

    def change_model(self, model: ModelConfig) -> ModelConfig:
        """The network that a client trains in place of ``model``."""
        for defence in self.defences:
            model = defence.change_model(model)
        return model

    def withheld(self, roles: Mapping[str, frozenset[str]]) -> frozenset[str]:
        """Names of tensors that never leave."""
        return frozenset().union(*(defence.withheld(roles) for defence in self.defences))

    @property
    def by_example(self) -> tuple[Defence, ...]:
        """Those that protect the gradients of single pictures."""
        return self.of_stage("examples").defences

    def combine(self, single: Sequence[Mapping[str, Tensor]], *, randomness: Randomness) -> dict[str, Tensor]:
        """The gradient of a step from those of its pictures, by the defences that protect these."""
        gradients = {name: torch.stack([gradient[name] for gradient in single]) for name in single[0]}
        for place, defence in enumerate(self.by_example):
            gradients = defence.protect_examples(gradients, randomness=randomness.of(place))
        return gradients

    def planned(self, plan: Plan) -> tuple[DefenceConfig, ...]:
        """Their configurations with what the plan says of options that were not given."""
        planned = []
        for config, made in zip(self.configs, self.defences, strict=True):
            known = made.options_type.model_fields
            follows = {key: item for key, item in asdict(plan).items() if key in known and item != known[key].default}
            planned.append(DefenceConfig.model_validate({"name": config.name, **follows, **config.options}))
        return tuple(planned)

    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        """An update as it leaves a client; DefenceError if a defence cannot protect it, which must not leave then."""
        protected = dict(update)
        for place, defence in enumerate(self.defences):
            if "update" in defence.stages:
                protected = defence.protect(protected, client, randomness=randomness.of(place, defence.name))
        return protected


pipeline_of = lru_cache(maxsize=256)(Pipeline)


def named(value: object) -> object:
    """A model by its name alone; with trained weights by ``zoo:NAME``."""
    if isinstance(value, str) and value.startswith(PREFIX):
        return {**zoo_model(value).model, "weights": Checkpoint.of(value)}
    return {"name": value} if isinstance(value, str) else value


class Defended(Config):
    """A model, and how those who train it protect themselves."""

    model: Annotated[ModelConfig, BeforeValidator(named)] = ModelConfig(name="deit_small")
    defences: Defences = ()

    @property
    def pipeline(self) -> Pipeline:
        """The defences themselves, in order."""
        return pipeline_of(self.defences)

    @property
    def network(self) -> ModelConfig:
        """The model that is trained: with what defences add to it."""
        return self.pipeline.change_model(self.model)

    @property
    def label(self) -> str:
        """Name for titles, log lines and weights, such as ``deit_small-mjp``."""
        return f"{self.model.name}-{self.pipeline.label}"


def with_mask_ratio(configs: tuple[DefenceConfig, ...], ratio: float) -> tuple[DefenceConfig, ...]:
    """The same defences, with this mask ratio where one takes a mask ratio and does not state its own."""
    return tuple(
        DefenceConfig.model_validate({"name": config.name, MASK_RATIO: ratio, **config.options})
        if MASK_RATIO in DEFENCES.get(config.name).options_type.model_fields
        else config
        for config in configs
    )


def read_pipeline(texts: Sequence[str]) -> Pipeline:
    """The pipeline that a command line names, one ``NAME:KEY=VALUE,KEY=VALUE`` each."""
    return pipeline_of(tuple(DefenceConfig.parse(text) for text in texts if text != NONE))


def _first(defence: Defence) -> int:
    return min(ORDER.index(stage) for stage in defence.stages)
