"""What the attacker sees and knows; whatever is not stated here, it does not know."""

from pydantic import Field

from fedmjp.config import Config, UpdateKind


class ThreatModel(Config):
    """An honest-but-curious server, and what reaches it.

    It follows the protocol, keeps the weights that it sent, and reads each client's update. It set
    the recipe of the local training, so it knows steps and learning rate. It never holds a picture
    of the client, the mask, the permutation, or the evaluator's records.
    """

    name: str = "Honest-but-curious server"
    update: UpdateKind = Field("gradient", description="FedSGD gradient or FedAvg delta")
    individual_updates: bool = Field(True, description="sees each client's update, not only their sum")
    batch_size: int = Field(1, ge=1, description="pictures behind one update")
    local_steps: int = Field(1, ge=1, description="optimiser steps behind one update")
    local_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="of plain SGD, for deltas")
    labels_known: bool = Field(False, description="is told the labels, in no particular order")

    def sentence(self) -> str:
        """The threat model in one sentence, to print beside results."""
        sees = "each client's own" if self.individual_updates else "only the sum of the clients'"
        kind = "FedSGD gradient"
        if self.update == "delta":
            steps = "step" if self.local_steps == 1 else "steps"
            kind = f"weight delta after {self.local_steps} SGD {steps} (learning rate {self.local_learning_rate:g})"
        plural = "picture" if self.batch_size == 1 else "pictures"
        told = "the labels but no masks" if self.labels_known else "neither labels nor masks"
        return (
            f"{self.name}: knows the model and its weights, sees {sees} {kind} of {self.batch_size} {plural}, "
            f"is told {told}, sends nothing malicious."
        )
