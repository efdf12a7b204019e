"""Clients send gradients or weight deltas, the server takes the step."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedmjp.config import UpdateKind


class OneStep(FedAvg):
    """One step along the mean of the clients' updates, weighted by their number of pictures.

    With gradients this is FedSGD; with weight deltas and a learning rate of 1 it is FedAvg.

    Args:
        update: What clients send: gradients are followed downhill, deltas are added.
        learning_rate: Step size. At 0 the weights stay as they are, so that all uploads of a run
            belong to the same model.
        clients: Number of clients that take part in every round.

    References:
        McMahan et al., "Communication-efficient learning of deep networks", AISTATS 2017, section 2 and algorithm 1.
    """

    def __init__(self, *, update: UpdateKind, learning_rate: float, clients: int) -> None:
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients, min_evaluate_nodes=0
        )
        self._step = learning_rate if update == "delta" else -learning_rate
        self._weights = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the weights to all clients and remember them for the step."""
        self._weights = arrays
        return list(super().configure_train(server_round, arrays, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take one step; the weights stay where the learning rate is 0 or no client answered."""
        if self._step == 0.0:
            return self._weights, None
        updates, metrics = super().aggregate_train(server_round, replies)
        if updates is None:
            return self._weights, metrics
        mean = updates.to_torch_state_dict()
        weights = self._weights.to_torch_state_dict()
        stepped = {name: value + self._step * mean[name] for name, value in weights.items()}
        return ArrayRecord(stepped), metrics
