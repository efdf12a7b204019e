"""The one object that everything is asked about: who computes what from which pictures, and what leaves."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from fedmjp.arithmetic import Arithmetic
from fedmjp.config import MAX_COUNT, MAX_SEED, LocalOptimiser, RunConfig, UpdateKind
from fedmjp.defences.base import Plan
from fedmjp.defences.pipeline import DefenceConfig, Defended, Pipeline, named, with_mask_ratio
from fedmjp.errors import ConfigError
from fedmjp.learning import SERVER_RATES, Training
from fedmjp.modifications.config import Server
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture, Setting
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    from fedmjp.data.pictures import LabelledPicture
    from fedmjp.exchange import Exchange
    from fedmjp.models.classifier import Classifier, VitClassifier

SHUFFLE = "shuffle"  # option of defences that move patches
SHUFFLED_ALONE = DefenceConfig(name="jigsaw")  # the control of what shuffling alone achieves
# What is of single batches; of a training run, its recipe says it.
OF_BATCHES = (
    "pictures_per_client", "batch_size", "uploads_per_picture", "update", "local_steps", "local_learning_rate",
    "local_momentum", "local_batch_size", "local_optimiser", "local_weight_decay", "label_smoothing", "mixup",
    "crop_scale", "arithmetic",
)  # fmt: skip
# With others a training run may go on; where the pictures lie says nothing of them, and they are compared themselves.
INCIDENTAL = {
    "data": True,
    "device": True,
    "training": {"checkpoint_every": True, "quorum": True, "round_seconds": True, "recipe": {"workers": True}},
}
FEWEST_ROBUST = 3  # updates of which a hostile one can be told


class Turn(NamedTuple):
    """What a client uploads in a round."""

    batch: int  # which of its batches, from 0
    number: int  # how often it has uploaded this batch before


class Scenario(Defended):
    """Model, data, what clients compute, how they defend themselves, and what the server is told.

    Every client uploads, round after round, the update of one batch of its pictures: the batch's gradient, or the
    weight delta after some steps of SGD or of AdamW on it. With several ``uploads_per_picture`` it goes through its
    pictures so often, every time under masks drawn anew, and by other random crops where it takes any: a crop is then
    the private picture x of its upload. ``defences`` are applied in their order; those that shuffle make the uploads
    those of x~, others those of x. The server takes a step along the mean after every round, unless its
    learning rate is 0.

    With ``training`` clients deal all pictures among them and train together instead.

    Raises:
        ConfigError: If values contradict each other.
    """

    data: str = Field("bundled", description="'bundled' or a folder of CLASS/picture files")
    clients: int = Field(1, ge=1, le=MAX_COUNT)
    pictures_per_client: int = Field(1, ge=1, le=MAX_COUNT)
    batch_size: int = Field(1, ge=1, description="pictures behind one update")
    uploads_per_picture: int = Field(1, ge=1, le=MAX_COUNT, description="under masks drawn independently")
    update: UpdateKind = "gradient"
    local_steps: int = Field(1, ge=1, description="steps behind one weight delta, all on the same batch")
    local_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="of these steps")
    local_momentum: float = Field(0.0, ge=0, lt=1, description="of these steps")
    local_batch_size: int | None = Field(None, ge=1, description="pictures of a step, in turn; by default all")
    local_optimiser: LocalOptimiser = Field("sgd", description="of these steps; its state is new in every round")
    local_weight_decay: float = Field(0.0, ge=0.0, lt=1.0, description="of AdamW's steps")
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0, description="of the loss, as torch's cross-entropy takes it")
    mixup: float = Field(
        0.0, ge=0.0, allow_inf_nan=False, description="alpha; each batch is mixed in pairs, by one share"
    )
    crop_scale: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="smallest share of a picture that a random crop keeps; clients draw one for each upload",
    )
    arithmetic: Arithmetic = Field("float32", description="of the clients' networks; tf32 on CUDA alone")
    labels_known: bool = Field(False, description="the server is told the labels, in no particular order")
    server_learning_rate: float | None = Field(
        None,
        ge=0.0,
        allow_inf_nan=False,
        description="by default 0 for single batches, which keeps the weights; else the strategy's",
    )
    server: Server = Field(None, description="how the server changes the weights that it sends; by default not at all")
    training: Training | None = Field(None, description="clients train together; without, they upload single batches")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="of choice of pictures, masks and noise")
    device: Literal["cpu", "cuda"] = "cpu"

    @model_validator(mode="before")
    @classmethod
    def _one_seed(cls, values: Any) -> Any:
        """Weights are drawn from the scenario's seed unless the model states its own."""
        if not isinstance(values, Mapping) or "seed" not in values:
            return values
        model = named(values.get("model", "deit_small"))
        if isinstance(model, Mapping) and "seed" not in model:
            return {**values, "model": {**model, "seed": values["seed"]}}
        return values

    @model_serializer(mode="wrap")
    def _what_applies(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is of single batches only, or of training only."""
        of_others: tuple[str, ...] = ("training",) if self.training is None else OF_BATCHES
        of_later = ("server", "mixup", "crop_scale", "local_weight_decay")
        left_out = of_others + tuple(name for name in of_later if not getattr(self, name))
        left_out += ("arithmetic",) if self.arithmetic == "float32" else ()
        left_out += ("local_optimiser",) if self.local_optimiser == "sgd" else ()
        return {name: value for name, value in dump(self).items() if name not in left_out}

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        if self.clients % self.pipeline.clients:
            raise ValueError(
                f"{self.clients} clients make no groups of {self.pipeline.clients}, whose updates are summed: set "
                f"clients to a multiple of {self.pipeline.clients}"
            )
        return self._of_batches() if self.training is None else self._of_training(self.training)

    def _of_batches(self) -> Self:
        if self.update == "gradient" and self.local_steps > 1:
            raise ValueError(f"{self.local_steps} local steps make a weight delta: set update to delta")
        if self.batch_size % (self.local_batch_size or 1):
            raise ValueError(
                f"local_batch_size {self.local_batch_size} does not divide {self.batch_size} pictures: "
                "make batch_size a multiple of it"
            )
        if self.update == "gradient" and (self.local_momentum or self.local_batch_size):
            raise ValueError("local_momentum and local_batch_size are of local steps: set update to delta")
        self._require_optimiser()
        if self.mixup:
            self._require_pairs()
        if self.crop_scale and self.local_steps > 1:
            raise ValueError(f"crop_scale is of one step, not of {self.local_steps}: leave one of the two out")
        if self.pictures_per_client % self.batch_size:
            raise ValueError(
                f"batch size {self.batch_size} does not divide the {self.pictures_per_client} pictures per client: "
                "make their number a multiple of it"
            )
        plan = Plan(
            self.rounds, self.rounds * self.local_steps, self.local_steps, self.local_batch_size or self.batch_size
        )
        object.__setattr__(self, "defences", self.pipeline.planned(plan))
        return self

    def _require_optimiser(self) -> None:
        """ValueError, with the reason, if the optimiser contradicts what else is said of the steps."""
        if self.local_optimiser == "sgd":
            if self.local_weight_decay:
                raise ValueError(
                    f"local_weight_decay {self.local_weight_decay:g} is of AdamW's steps: set local_optimiser to adamw"
                )
            return
        if self.update == "gradient":
            raise ValueError("local_optimiser adamw is of local steps: set update to delta")
        if self.local_momentum:
            raise ValueError(f"local_momentum {self.local_momentum:g} is of SGD, AdamW has its own: set it to 0")

    def _require_pairs(self) -> None:
        """ValueError, with the reason, if batches are not mixed as a whole, once, before anything else is done."""
        if self.batch_size % 2:
            raise ValueError(f"mixup mixes pairs, which {self.batch_size} pictures are not: set an even batch_size")
        if self.local_steps > 1:
            raise ValueError(f"mixup is of one step, not of {self.local_steps}: leave one of the two out")
        if self.pipeline.by_example:
            raise ValueError(
                f"{self.pipeline.label} protects single pictures, and mixed ones are of two: set mixup to 0"
            )
        if self.server is not None:
            raise ValueError(f"{self.server.text} isolates single pictures, and mixed ones are of two: set mixup to 0")

    def _of_training(self, training: Training) -> Self:
        for name in OF_BATCHES:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is of single batches: leave it out, training and its recipe say it")
        if self.server_learning_rate == 0:
            raise ValueError("server_learning_rate 0 trains nothing: leave it out, or take a greater one")
        training.require_defences(self.pipeline, self.model.grid, training.epochs)
        updates = len(self.participants(1)) // self.pipeline.clients
        if training.robust and updates < FEWEST_ROBUST:
            raise ValueError(
                f"strategy {training.strategy} takes {FEWEST_ROBUST} updates in a round, and there are {updates}: set "
                "more clients or a greater participation"
            )
        return self

    # Last, so that it is the outermost.
    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Scenarios are written in Python too, where pydantic's error would be told in many lines."""
        try:
            return validate(values)
        except ValidationError as error:
            raise cls.in_one_line(error) from None

    @property
    def folder(self) -> str:
        """Name of the folder of its records."""
        said = "+".join(config.text for config in self.defences) or "none"
        before = "" if self.server is None else f"-before-{self.server.text}"
        return f"{self.model.name}-{said}{before}".translate(str.maketrans(":,/ ", "----"))

    @property
    def gradient_of(self) -> Picture:
        """The version of the pictures that uploads are computed from."""
        return Picture.SHUFFLED if self.pipeline.shuffles else Picture.CLEAN

    @property
    def threat(self) -> ThreatModel:
        """What the server sees of this scenario, and knows."""
        names = (
            "update", "batch_size", "local_steps", "local_learning_rate", "local_momentum", "local_batch_size",
            "local_optimiser", "local_weight_decay", "label_smoothing", "mixup", "crop_scale", "arithmetic",
            "labels_known", "uploads_per_picture",
        )  # fmt: skip
        shared = {name: getattr(self, name) for name in names}
        if self.training is not None:
            recipe = self.training.recipe
            shared |= {"update": self.training.update, "batch_size": recipe.batch_size}
            shared |= {"label_smoothing": recipe.label_smoothing, "mixup": recipe.mixup}
            shared |= {"crop_scale": recipe.smallest_crop, "arithmetic": recipe.precision}
        done = self.pipeline.of_stage("examples", "update", "aggregate")
        return ThreatModel(defences=done.configs, server=self.server, **shared)

    @property
    def server_rate(self) -> float:
        """The server's learning rate."""
        if self.server_learning_rate is not None:
            return self.server_learning_rate
        return 0.0 if self.training is None else SERVER_RATES.get(self.training.strategy, 1.0)

    def participants(self, server_round: int) -> list[int]:
        """The clients of a round (from 1), in order, drawn from the seed; groups that are summed stay whole."""
        together = self.pipeline.clients
        groups = self.clients // together
        share = 1.0 if self.training is None else self.training.participation
        count = max(1, math.floor(share * groups + 0.5))  # halves are rounded up
        generator = torch_generator(self.seed, "participation", server_round)
        drawn = sorted(torch.randperm(groups, generator=generator)[:count].tolist())
        return [group * together + place for group in drawn for place in range(together)]

    def most_uploads(self, rounds: int) -> int:
        """Uploads until after so many rounds, of the client that makes most."""
        if len(self.participants(1)) == self.clients:
            return rounds
        taken = Counter(client for server_round in range(1, rounds + 1) for client in self.participants(server_round))
        return max(taken.values(), default=0)

    def planned(self, steps_per_epoch: int) -> "Scenario":
        """The same for a training run whose largest share makes so many steps: with what follows for its defences."""
        if self.training is None:
            return self
        steps, uploads = self.training.steps_per_upload(steps_per_epoch), self.most_uploads(self.rounds)
        plan = Plan(uploads, uploads * steps, steps, self.training.recipe.batch_size)
        return self.model_copy(update={"defences": self.pipeline.planned(plan)})

    def digest_of_run(self) -> str:
        """The digest without what only says how a run is carried out: with others a training run may go on."""
        return self.digest(exclude=INCIDENTAL)

    @property
    def batches_per_client(self) -> int:
        """Uploads that a client's pictures make, each once."""
        return self.pictures_per_client // self.batch_size

    @property
    def rounds(self) -> int:
        """Of the training; without one, until every client has uploaded each of its pictures as often as asked."""
        if self.training is not None:
            return self.training.rounds
        return self.batches_per_client * (self.probes + self.uploads_per_picture)

    @property
    def probes(self) -> int:
        """Uploads of each batch that come before those that are attacked: the server learns from them what to send."""
        return 0 if self.server is None or self.training is not None else self.server.made().probes

    def require_server(self, model: "Classifier") -> None:
        """ConfigError, with the reason, if a server that changes weights cannot be played with this model."""
        from fedmjp.models.classifier import VitClassifier  # noqa: PLC0415 (timm takes seconds)

        if self.server is None:
            return
        if not isinstance(model, VitClassifier):
            raise ConfigError(f"server {self.server.text} changes vision transformers, {self.model.name} is none")
        if reason := self.server.made().refusal(model, self):
            raise ConfigError(reason)

    def wanted(self, labels: Sequence[int]) -> list[int]:
        """Places of the pictures that the server is after, by the labels of all that are behind one upload."""
        return list(range(len(labels))) if self.server is None else self.server.made().wanted(labels, self.threat)

    @property
    def uploads(self) -> int:
        """Uploads that the server sees: of groups of clients where updates are summed."""
        return self.rounds * self.clients // self.pipeline.clients

    def turn(self, server_round: int) -> Turn:
        """What a client uploads in a round (from 1)."""
        number, batch = divmod(server_round - 1, self.batches_per_client)
        return Turn(batch, number)

    def round_of(self, turn: Turn) -> int:
        """The round of a turn: the inverse of ``turn``."""
        return turn.number * self.batches_per_client + turn.batch + 1

    def without(self, defence: str | None = None) -> "Scenario":
        """The same without a defence, by name; without any where none is named."""
        left = Pipeline() if defence is None else self.pipeline.without(defence)
        return self.model_copy(update={"defences": left.configs})

    @property
    def twins(self) -> "list[Scenario]":
        """What it is held against: the same without any defence, then, of several, without each of them."""
        names = [config.name for config in self.defences]
        without_one = [self.without(name) for name in names] if len(names) > 1 else []
        return [self.without(), *without_one] if names else []

    def in_setting(self, setting: Setting, mask_ratio: float) -> "Scenario":
        """The same where uploads are computed from the version that an evaluation setting asks for.

        In setting a nothing is shuffled: a defence that only shuffles falls away, MJP keeps its masks. In b and c
        something is: where no defence shuffles, a jigsaw of ``mask_ratio`` does, as the control of what shuffling
        alone achieves.
        """
        shuffled = setting.gradient_of is Picture.SHUFFLED
        if shuffled is (self.gradient_of is Picture.SHUFFLED):
            return self
        if shuffled:
            (jigsaw,) = with_mask_ratio((SHUFFLED_ALONE,), mask_ratio)
            return self.model_copy(update={"defences": (jigsaw, *self.defences)})
        kept = [
            DefenceConfig.model_validate({"name": config.name, **config.options, SHUFFLE: False})
            if SHUFFLE in made.options_type.model_fields
            else config
            for config, made in zip(self.defences, self.pipeline.made, strict=True)
            if made.stages != ("pictures",)
        ]
        return self.model_copy(update={"defences": tuple(kept)})

    def exchange(
        self, pictures: "Sequence[LabelledPicture]", *, model: "VitClassifier | None" = None, number: int = 0
    ) -> "Exchange":
        """What a client uploads of these pictures, and what is behind it.

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


def of_single_batches(values: Mapping[str, Any], pictures: int) -> Scenario:
    """A scenario in which every batch of so many pictures is a client of its own; ConfigError if they make no whole."""
    size = int(values.get("batch_size", 1))
    behind = size * ThreatModel.parse({"defences": values.get("defences", ())}).clients
    if pictures % behind:
        raise ConfigError(f"{pictures} pictures make no whole uploads, which are of {behind} each")
    return Scenario.parse({**values, "clients": pictures // size, "pictures_per_client": size})


# What `flwr run .` plays in a clone, without any run-config.
DEFAULT = Scenario(defences=(DefenceConfig(name="mjp"),), clients=2)


def run_config_of(scenarios: Sequence[Scenario], **places: Any) -> RunConfig:
    """What Flower is to carry: scenarios, and where a run leaves files."""
    return RunConfig(scenarios=json.dumps([scenario.model_dump(mode="json") for scenario in scenarios]), **places)


def scenarios_of(run: RunConfig) -> tuple[Scenario, ...]:
    """The scenarios that a run plays, one after another; ConfigError if the text is no JSON list of them."""
    if not run.scenarios:
        return (DEFAULT,)
    try:
        values = json.loads(run.scenarios)
    except ValueError as error:
        raise ConfigError(f"scenarios is no JSON: {error}") from None
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise ConfigError('scenarios must be a JSON list of scenarios, such as [{"model": "deit_tiny"}]')
    return tuple(map(Scenario.parse, values))
