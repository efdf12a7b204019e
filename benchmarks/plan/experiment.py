"""An experiment's configuration."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import Attack
from fedmjp.attacks.stages import TENSORS, Stage, stage_caveat, stage_refusal, unstaged
from fedmjp.config import Config
from fedmjp.defences.base import Mark
from fedmjp.defences.pipeline import Pipeline
from fedmjp.errors import BadInputError
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Disclosure
from fedmjp.scenario import Scenario
from fedmjp.settings import Picture, Protocol, Setting
from fedmjp.threat import ThreatModel

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
            attack = self.build()
        except BadInputError as error:
            raise ValueError(str(error)) from None  # so that a campaign's file can say where it stands
        if self.then and (refusal := unstaged(attack, self.then)):
            raise ValueError(f"then: {refusal}")
        return self

    def __hash__(self) -> int:
        return hash(self.label)

    @property
    def label(self) -> str:
        """Return name, options and stage, as rows show them: ``patch_embedding reading=zeros then reassembly``."""
        stage = [f"then {self.then}"] if self.then else []
        return " ".join([self.name, *(f"{key}={value}" for key, value in sorted(self.options.items())), *stage])

    @classmethod
    def of_label(cls, label: str) -> Self:
        """Read a label.

        Args:
            label: As ``label`` gives it.

        Raises:
            UnknownNameError: If there is no such attack.
            ConfigError: If it has no such option, or there is no such stage.
        """
        attack, _, then = label.partition(" then ")
        name, *options = attack.split(" ")
        ATTACKS.get(name)
        pairs = (option.partition("=") for option in options)
        values = {key: None if value == "None" else value for key, _, value in pairs}
        return cls.parse({"name": name, "options": values, "then": then or None})

    def build(self) -> Attack[VitClassifier, Disclosure]:
        """Build the attack itself, anew."""
        return ATTACKS.get(self.name)(self.options)

    def refusal(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Say which requirement of the attack or its stage fails; None if both apply.

        Args:
            model: That is attacked.
            threat: What the server sees.
        """
        threat = threat.isolated
        return self.build().refusal(model, threat) or (stage_refusal(model, threat) if self.then else None)

    def adapted(self, pipeline: Pipeline, model: VitClassifier, threat: ThreatModel, setting: Setting) -> bool:
        """Tell whether the attack takes these defences into account, for what it is compared with.

        Args:
            pipeline: The defences.
            model: That is attacked.
            threat: What the server sees.
            setting: What is compared.
        """
        # Who finds the shuffled picture is right in setting b, and in c where its patches are put in order.
        ordered = setting.compared_with is Picture.SHUFFLED or self.then is not None
        besides: frozenset[Mark] = frozenset({"shuffled"}) if ordered else frozenset()
        # What a server isolates is no sum, even where the upload is.
        alone: frozenset[Mark] = threat.marks - threat.isolated.marks
        return self.build().adapted(pipeline, model, threat.isolated, besides=besides | alone)

    def caveat(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Say what a reader must know of the scores; None if nothing.

        Args:
            model: That is attacked.
            threat: What the server sees.
        """
        threat = threat.isolated
        caveats = [self.build().caveat(model, threat), stage_caveat(model) if self.then else None]
        return "; ".join(remark for remark in caveats if remark) or None


def named(value: object) -> object:
    """Read an attack that is given by its name alone.

    Args:
        value: A name, or values of a configuration.
    """
    return {"name": value} if isinstance(value, str) else value


class Experiment(Config):
    """A scenario, what attacks it, and in which settings and how the reconstructions are scored."""

    scenario: Scenario
    attacks: tuple[Annotated[AttackConfig, BeforeValidator(named)], ...] = Field(min_length=1)
    settings: tuple[Setting, ...] = Field(min_length=1)
    metrics: tuple[str, ...] = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
    protocol: Protocol = "float"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        labels = tuple(attack.label for attack in self.attacks)
        for name, values in (("settings", self.settings), ("metrics", self.metrics), ("attacks", labels)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must each be named once, got {', '.join(values)}")
        size = self.scenario.model.image_size
        if size < SMALLEST and {"ssim", "ssim_mjp"} & set(self.metrics):
            raise ValueError(f"image size {size} is less than SSIM's window of {SMALLEST}")
        unfit = [str(setting) for setting in self.settings if setting.gradient_of is not self.scenario.gradient_of]
        if unfit:
            version = self.scenario.gradient_of
            fitting = " or ".join(str(setting) for setting in Setting if setting.gradient_of is version)
            raise ValueError(
                f"settings {', '.join(unfit)} do not fit uploads of the {version} picture: ask for setting {fitting}"
            )
        return self

    def tensors_read(self, model: VitClassifier, *, of_others: bool = False) -> frozenset[str]:
        """Name the tensors that leave clients and that an attack or the server reads.

        Args:
            model: That is attacked.
            of_others: Whether of other uploads of the pictures.
        """
        attacks = [attack for attack in self.attacks if attack.build().reads_others or not of_others]
        read = [name for attack in attacks for name in attack.build().tensors(model)]
        read += TENSORS if any(attack.then for attack in attacks) else ()
        if read and self.scenario.server is not None:
            read += self.scenario.server.build().reads(model, self.scenario.threat)
        return frozenset(read) - self.scenario.pipeline.withheld(model)


def experiments_of(
    scenario: Scenario,
    settings: Sequence[Setting],
    attacks: Sequence[AttackConfig],
    *,
    mask_ratio: float,
    metrics: Sequence[str] = Experiment.model_fields["metrics"].default,
    protocol: Protocol = "float",
) -> list[Experiment]:
    """Build the experiments that say what a scenario leaks in some settings, with their twins.

    Each version of the pictures is a scenario of its own. Every defended one is followed by its twins: the same
    without any defence, and of several defences the same without each of them.

    Args:
        scenario: With the defences in question.
        settings: To compare in.
        attacks: To run; twins are attacked by those that are no references, unless only setting b is asked for:
            then no guess is compared with the clean picture, as a twin's are.
        mask_ratio: Of the jigsaw that settings b and c need where no defence shuffles.
        metrics: As of an experiment.
        protocol: As of an experiment.

    Raises:
        ConfigError: If values contradict each other.
    """
    shared = {"metrics": tuple(metrics), "protocol": protocol}
    ranked = tuple(attack for attack in attacks if attack.build().role == "attack")
    on_twins = ranked if set(settings) != {Setting.B} else attacks
    variants: list[tuple[Scenario, Sequence[Setting], Sequence[AttackConfig]]] = []
    for version in dict.fromkeys(setting.gradient_of for setting in settings):
        of_version = [setting for setting in settings if setting.gradient_of is version]
        defended = scenario.in_setting(of_version[0], mask_ratio)
        variants.append((defended, of_version, attacks))
        twins = defended.twins if ranked else ()
        variants += [(twin, of_version if twin.gradient_of is version else (Setting.A,), on_twins) for twin in twins]
    experiments: dict[tuple[str, ...], Experiment] = {}
    for variant, compared, configs in variants:
        key = (variant.digest(), *(attack.label for attack in configs))
        former = experiments[key].settings if key in experiments else ()
        values = {
            "scenario": variant,
            "attacks": tuple(configs),
            "settings": tuple(dict.fromkeys([*former, *compared])),
        }
        experiments[key] = Experiment.parse({**values, **shared})
    return list(experiments.values())
