"""Federated training: the server's loop over rounds, from weights to better weights."""

import math
import time
from collections.abc import Mapping, Sequence
from logging import INFO
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedmjp.models.build import build
from fedmjp.seeds import torch_generator
from fedmjp.training.config import FederatedConfig
from fedmjp.training.history import History, Value
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.training.state import load_state, save_state, save_weights
from fedmjp.wire import EXAMPLES, METRICS
from server.aggregation import Aggregator
from server.recording import RoundRecorder
from server.refusals import Refusal, RefusalFile
from server.roster import Roster
from server.screening import LARGEST, plausible, refusal
from server.validation import Validation


def participants(config: FederatedConfig, server_round: int) -> list[int]:
    """The clients of a round (from 1), in order: drawn from the seed, the same in every run; halves are rounded up."""
    clients = config.partition.clients
    count = max(1, math.floor(config.participation * clients + 0.5))
    generator = torch_generator(config.training.seed, "participation", server_round)
    return sorted(torch.randperm(clients, generator=generator)[:count].tolist())


class FederatedTraining:
    """Plays rounds; goes on after the last checkpoint of the folder.

    Args:
        grid: Flower's way to the clients.
        config: What to train, and how.
        folder: Of the run; history, weights and state go there.
        records: Where uploads of the rounds that ``config`` names go; None records nothing.
        shares: How many pictures each client has; empty where the server cannot know.

    Raises:
        DataError: If there is no validation split that fits the model.
        CheckpointError: If the folder's state is of another configuration.
    """

    def __init__(
        self,
        grid: Grid,
        config: FederatedConfig,
        folder: TrainingFolder,
        records: Path | None,
        *,
        shares: Sequence[int] = (),
    ) -> None:
        self._grid, self._config, self._folder, self._shares = grid, config, folder, shares
        model = build(config.training.model)
        self._weights: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
        self._aggregator = Aggregator(config, [name for name, _ in model.named_parameters()])
        self._validation = Validation(model, config.training, lambda reason: log(INFO, "[SKIPPED] %s", reason))
        self._roster = Roster(grid, config.partition.clients, config.round_seconds)
        self._recorder = RoundRecorder(records, config)
        self._history = History(folder.history, folder.tensorboard)
        self._refusals = RefusalFile.of_run(folder.root)
        self._done = self._resume()

    def run(self) -> None:
        """Play the rounds that are left."""
        self._roster.wait()
        for server_round in range(self._done + 1, self._config.rounds + 1):
            self._round(server_round)
            if server_round % self._config.training.checkpoint_every == 0 or server_round == self._config.rounds:
                self._keep(server_round)
            log(INFO, "[ROUND %s/%s] done", server_round, self._config.rounds)

    def _round(self, server_round: int) -> None:
        started = time.perf_counter()
        accepted, refused = self._exchange(server_round, participants(self._config, server_round))
        self._recorder.keep(server_round, self._weights, accepted)
        self._refusals.add(refused)
        reported = [_metrics(reply) for reply in accepted.values()]
        stepped = self._aggregator.aggregate(server_round, self._weights, list(accepted.values()))
        if stepped is None:
            self._refusals.add([Refusal(server_round, None, "the replies are finite, their mean is not; weights stay")])
        else:
            self._weights = stepped
        seconds = time.perf_counter() - started
        accuracy = self._validation.accuracy(self._weights)
        self._history.append(
            {
                "round": server_round,
                "loss": _mean(reported, "loss"),
                "validation_loss": accuracy.loss,
                "top1": accuracy.top1,
                "learning_rate": _mean(reported, "learning-rate"),
                "clients": len(accepted),
                "refused": len(refused),
                "skipped": _sum(reported, "skipped"),
                "pictures": _sum(reported, "pictures"),
                "validation_pictures": accuracy.total,
                "seconds": seconds,
                "images_per_second": _sum(reported, "pictures") / seconds,
            }
        )

    def _exchange(self, server_round: int, chosen: Sequence[int]) -> tuple[dict[int, Message], list[Refusal]]:
        """Send the weights to clients; their replies that can be used, by client, and why others cannot."""
        nodes, left_out = self._roster.nodes()
        self._refusals.add([Refusal(server_round, None, reason) for reason in left_out])
        sent = self._aggregator.records(self._weights)
        present = {nodes[client]: client for client in chosen if client in nodes}
        messages = self._aggregator.messages(server_round, sent, list(present))
        replies = list(self._grid.send_and_receive(messages, timeout=self._config.round_seconds))
        # Flower's own error replies come from another node than the message went to.
        clients = {each.metadata.message_id: present[each.metadata.dst_node_id] for each in messages}
        answers = {clients.get(reply.metadata.reply_to_message_id, -1): reply for reply in replies}
        accepted: dict[int, Message] = {}
        refused = []
        for client in chosen:
            reason = self._reason(client, answers.get(client), sent) if client in nodes else "is not connected"
            if reason is None:
                accepted[client] = answers[client]
            else:
                log(INFO, "round %s: client %s refused: %s", server_round, client, reason)
                refused.append(Refusal(server_round, client, reason))
        return accepted, refused

    def _reason(self, client: int, reply: Message | None, sent: Mapping[str, ArrayRecord]) -> str | None:
        if reply is None:
            return f"no answer within {self._config.round_seconds:g} seconds"
        return refusal(reply, sent, self._most_examples(client))

    def _most_examples(self, client: int) -> int:
        """How many pictures can be behind a client's reply."""
        if self._config.strategy == "fedsgd":
            return self._config.training.recipe.batch_size
        return self._shares[client] if self._shares else LARGEST

    def _resume(self) -> int:
        """Go back to the last checkpoint; how many rounds it had done."""
        state = load_state(self._folder.state, config=self._config.digest())
        done = 0
        if state is not None:
            done, self._weights = int(state["round"]), state["weights"]
            self._aggregator.load_state(state["strategy"])
        self._history.keep_until(done)
        self._refusals.keep_until(done)
        return done

    def _keep(self, server_round: int) -> None:
        save_weights(self._folder.weights, self._weights)
        state: dict[str, Any] = {"config": self._config.digest(), "round": server_round, "weights": self._weights}
        save_state(self._folder.state, state | {"strategy": self._aggregator.state()})


def _metrics(reply: Message) -> dict[str, float]:
    """What a client reports, without what cannot be."""
    reported = reply.content.metric_records[METRICS]
    return {name: cast(float, value) for name, value in reported.items() if plausible(value)}


def _sum(reported: Sequence[Mapping[str, float]], name: str) -> int:
    """Of all clients that report it."""
    return int(sum(each.get(name, 0) for each in reported))


def _mean(reported: Sequence[Mapping[str, float]], name: str) -> Value:
    """Over the pictures of all clients that report it; None if none does."""
    pairs = [(each[EXAMPLES], each[name]) for each in reported if name in each]
    if not pairs:
        return None
    return math.fsum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)
