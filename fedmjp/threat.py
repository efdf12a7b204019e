"""What the attacker sees and knows; whatever is not stated here, it does not know."""

from typing import Literal

from pydantic import Field

from fedmjp.config import Config


class ThreatModel(Config):
    """An honest-but-curious server, and what reaches it.

    It follows the protocol, keeps the weights that it sent, and reads each client's update. It
    never holds a picture of the client, the mask, the permutation, or the evaluator's records.
    """

    name: str = "Honest-but-curious server"
    update: Literal["gradient", "delta"] = Field("gradient", description="FedSGD gradient or FedAvg delta")
    individual_updates: bool = Field(True, description="sees each client's update, not only their sum")
    batch_size: int = Field(1, ge=1, description="pictures behind one update")
    local_steps: int = Field(1, ge=1, description="optimiser steps behind one update")
    labels_known: bool = Field(False, description="is told the labels")
    mask_known: bool = Field(False, description="is told which patches were shuffled")

    def sentence(self) -> str:
        """The threat model in one sentence, to print beside results."""
        sees = "each client's own" if self.individual_updates else "only the sum of the clients'"
        kind = "FedSGD gradient" if self.update == "gradient" else f"weight delta after {self.local_steps} steps"
        plural = "picture" if self.batch_size == 1 else "pictures"
        told = [what for what, known in (("labels", self.labels_known), ("masks", self.mask_known)) if known]
        return (
            f"{self.name}: knows the model and its weights, sees {sees} {kind} of {self.batch_size} {plural}, "
            f"is told {' and '.join(told) if told else 'neither labels nor masks'}, sends nothing malicious."
        )
