"""Scenarios: the objects that everything is asked about. Who computes what from which pictures, and what leaves."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from fedmjp.config import RunConfig
from fedmjp.defences.base import Plan
from fedmjp.defences.pipeline import DefenceConfig, Pipeline, with_mask_ratio
from fedmjp.errors import ConfigError
from fedmjp.learning import SERVER_RATES, Training
from fedmjp.settings import Picture, Setting
from fedmjp.setups import BatchSetup, FederationSetup
from fedmjp.step import ClientStep
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    from fedmjp.data.pictures import LabelledPicture
    from fedmjp.exchange import Exchange
    from fedmjp.models.classifier import VitClassifier

SHUFFLE = "shuffle"  # option of defences that move patches
SHUFFLED_ALONE = "jigsaw"  # the control of what shuffling alone achieves
# With others a training run may go on; where the pictures lie says nothing of them, and they are compared themselves.
INCIDENTAL = {
    "data": True,
    "device": True,
    "training": {"checkpoint_every": True, "quorum": True, "round_seconds": True, "recipe": {"workers": True}},
}
FEWEST_ROBUST = 3  # updates of which a hostile one can be told


class Scenario(BatchSetup):
    """Model, data, what clients compute, how they defend themselves, and what the server is told.

    Every client uploads, round after round, the update of one batch of its pictures: the batch's gradient, or the
    weight delta after some steps of SGD or of AdamW on it. With several ``uploads_per_picture`` it goes through its
    pictures so often, every time under masks drawn anew, and by other random crops where it takes any: a crop is then
    the private picture x of its upload. ``defences`` are applied in their order; those that shuffle make the uploads
    those of x~, others those of x. The server takes a step along the mean after every round, unless its
    learning rate is 0.

    Where clients train together instead, see ``TrainingScenario``.

    Example:
        >>> scenario = Scenario(model="deit_tiny", defences=["mjp"], batch_size=2, pictures_per_client=4)
        >>> scenario.rounds, scenario.gradient_of.value, [twin.pipeline.label for twin in scenario.twins]
        (2, 'shuffled', ['none'])

    Raises:
        ConfigError: If values contradict each other.
    """

    training: ClassVar[None] = None  # clients do not train together

    @property
    def uploads(self) -> int:
        """Count the uploads that the server sees: one for each group of clients where updates are summed."""
        return self.rounds * self.clients // self.pipeline.clients

    @property
    def twins(self) -> list[Self]:
        """Return the scenarios that it is compared with: undefended and, of several defences, without each of them."""
        names = [config.name for config in self.defences]
        without_each = [self.without(name) for name in names] if len(names) > 1 else []
        return [self.without(), *without_each] if names else []

    def wanted(self, labels: Sequence[int]) -> list[int]:
        """Find the places of the pictures that the server is after.

        Args:
            labels: Of all pictures behind one upload.
        """
        return list(range(len(labels))) if self.server is None else self.server.build().wanted(labels, self.threat)

    def without(self, defence: str | None = None) -> Self:
        """Return the same scenario without a defence.

        Args:
            defence: Its name; None leaves out all of them.
        """
        pipeline = Pipeline() if defence is None else self.pipeline.without(defence)
        return self.model_copy(update={"defences": pipeline.configs})

    def in_setting(self, setting: Setting, mask_ratio: float) -> Self:
        """Return the same scenario with uploads of the version of the pictures that an evaluation setting asks for.

        In setting a nothing is shuffled: a defence that only shuffles falls away, MJP keeps its masks. In b and c
        something is: where no defence shuffles, a jigsaw does, as the control of what shuffling alone achieves.

        Args:
            setting: One of MJP's three.
            mask_ratio: Of that jigsaw, in [0, 1].
        """
        shuffled = setting.gradient_of is Picture.SHUFFLED
        if shuffled is (self.gradient_of is Picture.SHUFFLED):
            return self
        if shuffled:
            (jigsaw,) = with_mask_ratio((DefenceConfig(name=SHUFFLED_ALONE),), mask_ratio)
            return self.model_copy(update={"defences": (jigsaw, *self.defences)})
        unshuffled = [
            DefenceConfig.model_validate({"name": config.name, **config.options, SHUFFLE: False})
            if SHUFFLE in defence.options_type.model_fields
            else config
            for config, defence in zip(self.defences, self.pipeline.defences, strict=True)
            if defence.stages != ("pictures",)
        ]
        return self.model_copy(update={"defences": tuple(unshuffled)})

    def exchange(
        self, pictures: "Sequence[LabelledPicture]", *, model: "VitClassifier | None" = None, number: int = 0
    ) -> "Exchange":
        """Make a client's upload of these pictures; what is behind it is for the evaluator.

        Args:
            pictures: As many as are behind one upload.
            model: With the weights that the server had sent; None draws the initial ones.
            number: How many uploads of them were made before, besides probes.

        Raises:
            BadInputError: If there are more or fewer pictures than one upload is of.
            DefenceError: If a defence cannot protect the update.
        """
        from fedmjp.exchange import exchange  # noqa: PLC0415 (clients compute; who reads a scenario need not)

        return exchange(self, pictures, model=model, number=number)

    @model_validator(mode="before")
    @classmethod
    def _refuse_training(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "training" in values:
            if values["training"] is not None:
                raise ValueError("training is of runs in which clients train together: use fedmjp.TrainingScenario")
            return {name: value for name, value in values.items() if name != "training"}
        return values


OF_BATCHES = Scenario.model_fields.keys() - FederationSetup.model_fields.keys()


class TrainingScenario(FederationSetup):
    """A federation that trains: model, data, recipe and strategy, how clients defend themselves, the server's view.

    Clients deal all pictures among them and train together, as ``training`` says.

    Raises:
        ConfigError: If values contradict each other.
    """

    training: Training = Field(description="what clients and server train, and how")

    @model_validator(mode="before")
    @classmethod
    def _refuse_batches(cls, values: Any) -> Any:
        for name in sorted(OF_BATCHES & values.keys()) if isinstance(values, Mapping) else ():
            raise ValueError(f"{name} is of single batches: leave it out, training and its recipe say it")
        return values

    def _require_playable(self) -> None:
        if self.server_learning_rate == 0:
            raise ValueError("server_learning_rate 0 trains nothing: leave it out, or take a greater one")
        training = self.training
        training.require_defences(self.pipeline, self.model.grid, training.epochs)
        updates = len(self.participants(1)) // self.pipeline.clients
        if training.robust and updates < FEWEST_ROBUST:
            raise ValueError(
                f"strategy {training.strategy} takes {FEWEST_ROBUST} updates in a round, and there are {updates}: set "
                "more clients or a greater participation"
            )

    @property
    def step(self) -> ClientStep:
        """Return what a client computes behind one upload, as far as a step of single batches can say it."""
        return self.training.step

    @property
    def rounds(self) -> int:
        """Count the rounds of the training."""
        return self.training.rounds

    @property
    def participation(self) -> float:
        """Return the share of the clients that take part in a round."""
        return self.training.participation

    @property
    def server_rate(self) -> float:
        """Return the server's learning rate: the strategy's unless one is given."""
        if self.server_learning_rate is not None:
            return self.server_learning_rate
        return SERVER_RATES.get(self.training.strategy, 1.0)

    def planned(self, steps_per_epoch: int) -> Self:
        """Complete the options of defences by what follows from the run.

        Args:
            steps_per_epoch: Of the client with most pictures.
        """
        steps, uploads = self.training.steps_per_upload(steps_per_epoch), self.most_uploads(self.rounds)
        plan = Plan(uploads, uploads * steps, steps, self.training.recipe.batch_size)
        return self.model_copy(update={"defences": self.pipeline.planned(plan)})

    def digest_of_run(self) -> str:
        """Compute the digest without what only says how a run is carried out: with others a run may go on."""
        return self.digest(exclude=INCIDENTAL)


AnyScenario = Scenario | TrainingScenario


def parse_scenario(values: Mapping[str, Any]) -> AnyScenario:
    """Read a scenario of either kind: with ``training`` clients train together, without they upload single batches.

    Args:
        values: By the names of the fields.

    Raises:
        ConfigError: If a key is unknown, a value out of range, or values contradict each other.
    """
    kind: type[AnyScenario] = Scenario if values.get("training") is None else TrainingScenario
    return kind.parse(values)


def make_batch_scenario(values: Mapping[str, Any], pictures: int) -> Scenario:
    """Make the scenario in which every batch of the pictures is a client of its own.

    Args:
        values: By the names of the fields.
        pictures: How many there are in all.

    Raises:
        ConfigError: If they make no whole uploads.
    """
    size = int(values.get("batch_size", 1))
    pictures_per_upload = size * ThreatModel.parse({"defences": values.get("defences", ())}).pipeline.clients
    if pictures % pictures_per_upload:
        raise ConfigError(f"{pictures} pictures make no whole uploads, which are of {pictures_per_upload} each")
    return Scenario.parse({**values, "clients": pictures // size, "pictures_per_client": size})


def make_run_config(scenarios: Sequence[AnyScenario], **places: Any) -> RunConfig:
    """Make what Flower is to carry: scenarios, and where a run leaves files.

    Args:
        scenarios: Played one after another.
        places: Further fields of ``RunConfig``.
    """
    return RunConfig(scenarios=json.dumps([scenario.model_dump(mode="json") for scenario in scenarios]), **places)


def read_scenarios(run: RunConfig) -> tuple[AnyScenario, ...]:
    """Read the scenarios that a run plays, one after another.

    Args:
        run: As Flower carried it.

    Raises:
        ConfigError: If its text is no JSON list of scenarios.
    """
    if not run.scenarios:  # `flwr run .` in a clone
        return (Scenario(defences=(DefenceConfig(name="mjp"),), clients=2),)
    try:
        values = json.loads(run.scenarios)
    except ValueError as error:
        raise ConfigError(f"scenarios is no JSON: {error}") from None
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise ConfigError('scenarios must be a JSON list of scenarios, such as [{"model": "deit_tiny"}]')
    return tuple(map(parse_scenario, values))
