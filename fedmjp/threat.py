"""What the attacker sees and knows; whatever is not stated here, it does not know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedmjp.arithmetic import ROUNDING, Arithmetic
from fedmjp.config import DIGEST, Config, LocalOptimiser, UpdateKind
from fedmjp.defences.base import Mark
from fedmjp.defences.pipeline import Defences, Pipeline, pipeline_of
from fedmjp.modifications import SCOPE
from fedmjp.modifications.config import Server

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32 = ROUNDING["float32"]
OPTIMISERS: Mapping[LocalOptimiser, str] = {"sgd": "SGD", "adamw": "AdamW"}  # as sentences have them


class ThreatModel(Config):
    """An honest-but-curious server, and what reaches it: its read-only view of a scenario.

    It follows the protocol, keeps the weights that it sent, and reads each upload. It set the recipe of the local
    training, so it knows steps, learning rate, label smoothing, mixup and that crops are taken, not what is drawn. With
    ``server`` it is malicious in one thing: it changes weights before it sends them. Of ``defences`` it is told what
    each of them states. It never holds a picture of the client, the mask, the permutation, or the evaluator's records.
    """

    name: str = "Honest-but-curious server"
    update: UpdateKind = Field("gradient", description="FedSGD gradient or FedAvg delta")
    batch_size: int = Field(1, ge=1, description="pictures of one client behind one update")
    local_steps: int = Field(1, ge=1, description="optimiser steps behind one update")
    local_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="of these steps")
    local_momentum: float = Field(0.0, ge=0, lt=1, description="of these steps")
    local_batch_size: int | None = Field(None, ge=1, description="pictures of a step, in turn; by default all")
    local_optimiser: LocalOptimiser = Field("sgd", description="of these steps; its state is new in every round")
    local_weight_decay: float = Field(0.0, ge=0.0, lt=1.0, description="of AdamW's steps")
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0, description="of the clients' loss")
    mixup: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="alpha; clients mix pictures in pairs")
    crop_scale: float | None = Field(
        None, gt=0.0, le=1.0, description="smallest share of a picture that a random crop keeps, drawn for each upload"
    )
    labels_known: bool = Field(False, description="is told the labels, in no particular order")
    arithmetic: Arithmetic = Field("float32", description="of the clients' networks")
    uploads_per_picture: int = Field(1, ge=1, description="of the same client, under masks drawn independently")
    defences: Defences = Field((), description="what clients do to updates before they leave")
    server: Server = Field(None, description="how it changes the weights that it sends; by default it does not")

    @model_validator(mode="after")
    def _can_be_done(self) -> ThreatModel:
        self.pipeline  # noqa: B018 (an impossible order is told here)
        return self

    @property
    def pipeline(self) -> Pipeline:
        """The defences themselves, in order."""
        return pipeline_of(self.defences)

    @property
    def marks(self) -> frozenset[Mark]:
        """What was done to uploads, as an attack may take it into account."""
        return self.pipeline.marks

    @property
    def clients(self) -> int:
        """How many clients' updates the server sees as one."""
        return self.pipeline.clients

    @property
    def pictures(self) -> int:
        """How many pictures are behind one upload."""
        return self.batch_size * self.clients

    @property
    def rounding(self) -> float:
        """Largest relative error that is left in a number."""
        return max(ROUNDING[self.arithmetic], self.pipeline.rounding)

    def noise_on(self, uploaded: Tensor) -> float:
        """Standard deviation of the noise on the entries of an uploaded tensor."""
        return self.pipeline.noise_on(uploaded)

    @property
    def gradients_in_delta(self) -> float:
        """How many gradients of a step add up, times the learning rate, to SGD's delta: momentum repeats early ones.

        Of steps on some of the pictures each, it is that of a mean over the steps.
        """
        shares = (self.local_momentum**later for step in range(self.local_steps) for later in range(step + 1))
        return sum(shares)

    @property
    def undefended(self) -> ThreatModel:
        """The same server where clients do nothing to their updates."""
        return self.model_copy(update={"defences": ()})

    @property
    def isolated(self) -> ThreatModel:
        """What an attack is told: of a server that changes weights, about the part of an upload that it isolates."""
        return self if self.server is None else self.server.made().view(self)

    def sentence(self, pipelines: Iterable[Pipeline] = ()) -> str:
        """The threat model in words, to print beside results, with what the server is told of each defence.

        Args:
            pipelines: All defences of the scenarios that it is the view of: of those that act before an update is made,
                the server is told something, too.
        """
        sees = "each client's own" if self.clients == 1 else f"only the sum of {self.clients} clients'"
        kind = "FedSGD gradient"
        if self.update == "delta":
            steps = "step" if self.local_steps == 1 else "steps"
            recipe = f"learning rate {self.local_learning_rate:g}"
            recipe += f", momentum {self.local_momentum:g}" if self.local_momentum else ""
            recipe += f", weight decay {self.local_weight_decay:g}" if self.local_weight_decay else ""
            recipe += f", batches of {self.local_batch_size}" if self.local_batch_size else ""
            kind = f"weight delta after {self.local_steps} {OPTIMISERS[self.local_optimiser]} {steps} ({recipe})"
        kind += f" of {self.batch_size} {'picture' if self.batch_size == 1 else 'pictures'}"
        if self.label_smoothing:
            kind += f" under label smoothing {self.label_smoothing:g}"
        if self.arithmetic != "float32":
            kind += f" computed in {self.arithmetic}"
        if self.mixup:
            kind += f" that the client mixed in pairs (mixup {self.mixup:g})"
        if self.crop_scale:
            share = f"{100 * self.crop_scale:g} % or more of each"
            kind += f", shown in random crops ({share}, flipped or not, drawn anew for each upload)"
        if self.uploads_per_picture > 1:
            kind += f", {self.uploads_per_picture} times under masks drawn independently"
        knowledge = "the labels but no masks" if self.labels_known else "neither labels nor masks"
        if self.crop_scale:
            knowledge += " or crops" if self.labels_known else " nor crops"
        done = f" It is told that uploads underwent {self.pipeline.label}." if self.defences else ""
        known = {defence.name: defence.told for pipeline in (self.pipeline, *pipelines) for defence in pipeline.made}
        of_each = "".join(f" Of {name} it is told {what}." for name, what in known.items())
        sends, scope, name = "nothing malicious", "", self.name
        if self.server is not None:
            sends = f"weights of its own making ({self.server.text}: {self.server.made().summary})"
            scope, name = f" {SCOPE}", "Malicious server"
        return (
            f"{name}: knows the model and its weights, sees {sees} {kind}, is told {knowledge}, sends {sends}."
            f"{done}{of_each}{scope}"
        )

    @model_serializer(mode="wrap")
    def _without_what_is_not_done(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        # Fields of later, where they say nothing: records from before them stay the same.
        for name in ("server", "local_momentum", "local_batch_size", "local_weight_decay", "mixup", "crop_scale"):
            if not getattr(self, name):
                values.pop(name, None)
        if self.arithmetic == "float32":
            values.pop("arithmetic", None)
        if self.local_optimiser == "sgd":
            values.pop("local_optimiser", None)
        if info.context == DIGEST:
            # Only what differs from the plain protocol is in the digest: ids outlive fields of later.
            for name in ("uploads_per_picture", "label_smoothing", "defences"):
                if not values[name] or values[name] == type(self).model_fields[name].default:
                    del values[name]
        return values
