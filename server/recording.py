"""What crosses the wire in chosen rounds of a training run, kept as uploads that can be attacked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedmjp.config import UpdateKind
from fedmjp.records import Upload
from fedmjp.training.config import FederatedConfig
from fedmjp.wire import ARRAYS, EXAMPLES, METRICS, uploads_of_round
from server.uploads import UploadFolder


@dataclass(frozen=True)
class RoundRecorder:
    """Keeps the uploads of the rounds that the configuration names.

    Attributes:
        records: Folder of all rounds; None records nothing.
        config: Of the run.
    """

    records: Path | None
    config: FederatedConfig

    @property
    def kind(self) -> UpdateKind:
        """Clients send gradients in FedSGD; of weights, what is kept is their change."""
        return "gradient" if self.config.strategy == "fedsgd" else "delta"

    def keep(self, server_round: int, weights: Mapping[str, Tensor], replies: Mapping[int, Message]) -> None:
        """Record a round.

        Args:
            server_round: Which.
            weights: That the server had sent.
            replies: That were fit to be used, by client.
        """
        if self.records is None or server_round not in self.config.uploads:
            return
        folder = UploadFolder(uploads_of_round(self.records, server_round) / self.config.training.model.label)
        digest = folder.keep_weights(weights)
        for client, reply in replies.items():
            tensors = self._tensors(reply.content.array_records[ARRAYS], weights)
            examples = int(cast(float, reply.content.metric_records[METRICS][EXAMPLES]))
            folder.keep(Upload(tensors, self.kind, examples, server_round, client, digest))

    def _tensors(self, arrays: ArrayRecord, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sent = dict(arrays.to_torch_state_dict())
        return sent if self.kind == "gradient" else {name: value - weights[name] for name, value in sent.items()}
