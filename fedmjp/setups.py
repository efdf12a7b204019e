"""The fields of scenarios, and what follows from them: who computes what from which pictures, under which defences."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from fedmjp.config import MAX_COUNT, MAX_SEED
from fedmjp.defences.base import Plan
from fedmjp.defences.pipeline import Defended, read_model
from fedmjp.errors import ConfigError
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture
from fedmjp.step import ClientStep
from fedmjp.threat import Server, ThreatModel

if TYPE_CHECKING:
    from fedmjp.models.classifier import Classifier


class Turn(NamedTuple):
    """A client's upload in one round: which of its batches, and which repetition of it."""

    batch: int  # which of its batches, from 0
    number: int  # how often it has uploaded this batch before


class FederationSetup(Defended):
    """The fields that every scenario has, whether clients upload single batches or train together.

    Raises:
        ConfigError: If values contradict each other.
    """

    data: str = Field("bundled", description="'bundled' or a folder of CLASS/picture files")
    clients: int = Field(1, ge=1, le=MAX_COUNT)
    labels_known: bool = Field(False, description="the server is told the labels, in no particular order")
    server_learning_rate: float | None = Field(
        None,
        ge=0.0,
        allow_inf_nan=False,
        description="by default 0 for single batches, which keeps the weights; else the strategy's",
    )
    server: Server = Field(None, description="how the server changes the weights that it sends; by default not at all")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="of choice of pictures, masks and noise")
    device: Literal["cpu", "cuda"] = "cpu"

    @model_validator(mode="after")
    def _require_possible(self) -> Self:
        if self.clients % self.pipeline.clients:
            raise ValueError(
                f"{self.clients} clients make no groups of {self.pipeline.clients}, whose updates are summed: set "
                f"clients to a multiple of {self.pipeline.clients}"
            )
        self._require_playable()
        return self

    # Last, so that it is the outermost.
    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Draw the weights from the scenario's seed unless the model states its own; explain errors in one line."""
        if isinstance(values, Mapping) and "seed" in values:
            model = read_model(values.get("model", "deit_small"))
            if isinstance(model, Mapping) and "seed" not in model:
                values = {**values, "model": {**model, "seed": values["seed"]}}
        try:
            return validate(values)
        except ValidationError as error:
            raise cls.explain_error(error) from None

    def _require_playable(self) -> None:
        """Refuse what this kind of scenario cannot play, and complete the options of defences.

        Raises:
            ValueError: With the reason and the value to change.
        """
        raise NotImplementedError

    @property
    def step(self) -> ClientStep:
        """Return what a client computes behind one upload."""
        raise NotImplementedError

    @property
    def rounds(self) -> int:
        """Count the rounds until the scenario is played to its end."""
        raise NotImplementedError

    @property
    def server_rate(self) -> float:
        """Return the server's learning rate."""
        return self.server_learning_rate or 0.0

    @property
    def participation(self) -> float:
        """Return the share of the clients that take part in a round."""
        return 1.0

    @property
    def folder(self) -> str:
        """Name the folder of its records."""
        defences = "+".join(config.text for config in self.defences) or "none"
        server = "" if self.server is None else f"-before-{self.server.text}"
        return f"{self.model.name}-{defences}{server}".translate(str.maketrans(":,/ ", "----"))

    @property
    def gradient_of(self) -> Picture:
        """Tell which version of the pictures uploads are computed from."""
        return Picture.SHUFFLED if self.pipeline.shuffles else Picture.CLEAN

    @property
    def threat(self) -> ThreatModel:
        """Return what the server sees of this scenario, and knows."""
        stated = {**vars(self.step), **vars(self)}
        known = {name: stated[name] for name in ThreatModel.model_fields if name in stated}
        return ThreatModel(**{**known, "defences": self.pipeline.of_stage("examples", "update", "aggregate").configs})

    def participants(self, server_round: int) -> list[int]:
        """Draw the clients of a round from the seed, in order; groups that are summed stay whole.

        Args:
            server_round: From 1.
        """
        size = self.pipeline.clients
        groups = self.clients // size
        count = max(1, math.floor(self.participation * groups + 0.5))  # halves are rounded up
        generator = torch_generator(self.seed, "participation", server_round)
        drawn = sorted(torch.randperm(groups, generator=generator)[:count].tolist())
        return [group * size + place for group in drawn for place in range(size)]

    def most_uploads(self, rounds: int) -> int:
        """Count the uploads of the client that makes most of them.

        Args:
            rounds: How many have been played.
        """
        if len(self.participants(1)) == self.clients:
            return rounds
        counts = Counter(client for server_round in range(1, rounds + 1) for client in self.participants(server_round))
        return max(counts.values(), default=0)

    def require_server(self, model: "Classifier") -> None:
        """Refuse a server that changes weights where it cannot be played with this model.

        Args:
            model: The clients' model; it may be without weights.

        Raises:
            ConfigError: With the reason.
        """
        from fedmjp.models.classifier import VitClassifier  # noqa: PLC0415 (timm takes seconds)

        if self.server is None:
            return
        if not isinstance(model, VitClassifier):
            raise ConfigError(f"server {self.server.text} changes vision transformers, {self.model.name} is none")
        trains = not isinstance(self, BatchSetup)
        if reason := self.server.build().refusal(model, self.threat, trains=trains):
            raise ConfigError(reason)


class BatchSetup(FederationSetup, ClientStep):
    """The fields of a scenario in which every client uploads the updates of single batches of its pictures."""

    pictures_per_client: int = Field(1, ge=1, le=MAX_COUNT)
    uploads_per_picture: int = Field(1, ge=1, le=MAX_COUNT, description="under masks drawn independently")

    def _require_playable(self) -> None:
        self.require_consistent()
        if self.mixup:
            self._require_mixable()
        if self.pictures_per_client % self.batch_size:
            raise ValueError(
                f"batch size {self.batch_size} does not divide the {self.pictures_per_client} pictures per client: "
                "make their number a multiple of it"
            )
        if self.defences:
            rounds, pictures = self.rounds, self.local_batch_size or self.batch_size
            plan = Plan(rounds, rounds * self.local_steps, self.local_steps, pictures)
            object.__setattr__(self, "defences", self.pipeline.planned(plan))

    def _require_mixable(self) -> None:
        """Refuse mixed pictures where a defence or the server is about single ones."""
        if self.pipeline.by_example:
            raise ValueError(
                f"{self.pipeline.label} protects single pictures, and mixed ones are of two: set mixup to 0"
            )
        if self.server is not None:
            raise ValueError(f"{self.server.text} isolates single pictures, and mixed ones are of two: set mixup to 0")

    @property
    def step(self) -> ClientStep:
        """Return what a client computes behind one upload: these fields themselves."""
        return self

    @property
    def batches_per_client(self) -> int:
        """Count the batches that a client's pictures make."""
        return self.pictures_per_client // self.batch_size

    @property
    def probes(self) -> int:
        """Count the uploads of each batch from which the server learns what to send before it attacks."""
        return 0 if self.server is None else self.server.build().probes

    @property
    def rounds(self) -> int:
        """Count the rounds until every client has uploaded each of its batches as often as it is to."""
        return self.batches_per_client * (self.probes + self.uploads_per_picture)

    def turn(self, server_round: int) -> Turn:
        """Tell what a client uploads in a round.

        Args:
            server_round: From 1.
        """
        number, batch = divmod(server_round - 1, self.batches_per_client)
        return Turn(batch, number)

    def round_of(self, turn: Turn) -> int:
        """Find the round of a turn, from 1: the inverse of ``turn``.

        Args:
            turn: What a client uploads.
        """
        return turn.number * self.batches_per_client + turn.batch + 1
