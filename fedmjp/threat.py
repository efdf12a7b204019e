"""What the attacker sees and knows; whatever is not stated here, it does not know."""

from typing import Any

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer

from fedmjp.config import DIGEST, Config, Precision, UpdateKind

ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place
# Of what clients do, only what differs from the plain protocol is in the digest: ids outlive protocols of later.
PROTOCOL = ("uploads_per_picture", "precision", "noise", "kept")


class ThreatModel(Config):
    """An honest-but-curious server, and what reaches it.

    It follows the protocol, keeps the weights that it sent, and reads each client's update. It set
    the recipe of the local training, so it knows steps and learning rate, and how updates are degraded
    before they leave. It never holds a picture of the client, the mask, the permutation, or the
    evaluator's records.
    """

    name: str = "Honest-but-curious server"
    update: UpdateKind = Field("gradient", description="FedSGD gradient or FedAvg delta")
    individual_updates: bool = Field(True, description="sees each client's update, not only their sum")
    batch_size: int = Field(1, ge=1, description="pictures behind one update")
    local_steps: int = Field(1, ge=1, description="optimiser steps behind one update")
    local_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="of plain SGD, for deltas")
    labels_known: bool = Field(False, description="is told the labels, in no particular order")
    uploads_per_picture: int = Field(1, ge=1, description="of the same client, under masks drawn independently")
    precision: Precision = Field("float32", description="that uploads were rounded to")
    noise: float = Field(0.0, ge=0, allow_inf_nan=False, description="added to uploads, relative to each tensor's RMS")
    kept: float = Field(1.0, gt=0, le=1, description="share of each tensor that pruning by magnitude left")

    @property
    def rounding(self) -> float:
        """Largest relative error that the precision of uploads leaves in a number."""
        return ROUNDING[self.precision]

    @property
    def degradation(self) -> str:
        """What was done to uploads before they left, in words; empty if nothing was."""
        done = (
            (self.kept < 1, f"the largest {100 * self.kept:.3g} % of each tensor kept"),
            (self.noise > 0, f"noise of {self.noise:.3g} RMS added"),
            (self.precision != "float32", f"rounded to {self.precision}"),
        )
        return ", ".join(what for holds, what in done if holds)

    def sentence(self) -> str:
        """The threat model in one sentence, to print beside results."""
        sees = "each client's own" if self.individual_updates else "only the sum of the clients'"
        kind = "FedSGD gradient"
        if self.update == "delta":
            steps = "step" if self.local_steps == 1 else "steps"
            kind = f"weight delta after {self.local_steps} SGD {steps} (learning rate {self.local_learning_rate:g})"
        kind += f" of {self.batch_size} {'picture' if self.batch_size == 1 else 'pictures'}"
        if self.uploads_per_picture > 1:
            kind += f", {self.uploads_per_picture} times under masks drawn independently"
        if self.degradation:
            kind += f" ({self.degradation})"
        told = "the labels but no masks" if self.labels_known else "neither labels nor masks"
        return (
            f"{self.name}: knows the model and its weights, sees {sees} {kind}, "
            f"is told {told}, sends nothing malicious."
        )

    @model_serializer(mode="wrap")
    def _without_what_is_not_done(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        if info.context == DIGEST:
            for name in PROTOCOL:
                if values[name] == type(self).model_fields[name].default:
                    del values[name]
        return values
