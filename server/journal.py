"""What a training run writes down after every round, and goes on from."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from flwr.app import MetricRecord
from torch import Tensor

from fedmjp.learning import Training
from fedmjp.scenario import TrainingScenario
from fedmjp.server.aggregation import Aggregator
from fedmjp.server.refusals import RefusalFile
from fedmjp.server.screening import plausible
from fedmjp.server.site_validation import SiteValidation
from fedmjp.server.validation import Validation
from fedmjp.training.history import History, Value
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.training.state import load_state, save_checkpoint
from fedmjp.wire import EXAMPLES

WORSE = 2.0  # times the loss of a guess, and of the weights before: where half of Top-1 is lost too, a step spoilt them


class Journal:
    """The history, validation and checkpoints of a training run.

    Args:
        scenario: The run's scenario.
        training: Its settings.
        folder: The run's folder.
        validation: Measures Top-1 of weights.
        uploaded: Number of values in an upload.
    """

    def __init__(
        self,
        scenario: TrainingScenario,
        training: Training,
        folder: TrainingFolder,
        validation: Validation | SiteValidation,
        uploaded: int,
    ) -> None:
        self._scenario, self._training, self._folder, self._uploaded = scenario, training, folder, uploaded
        self._validation = validation
        self._history = History(folder.history, folder.tensorboard)
        self._uploads: Counter[int] = Counter()

    def resume(self, weights: dict[str, Tensor], aggregator: Aggregator) -> tuple[int, dict[str, Tensor]]:
        """Go back to the last checkpoint; return its number of rounds and its weights.

        Args:
            weights: Those to begin with where there is no checkpoint, with 0 rounds.
            aggregator: Gets the strategy's moments back.

        Raises:
            CheckpointError: If it is of another configuration.
        """
        state = load_state(self._folder.state, config=self._scenario.digest_of_run())
        rounds = 0
        if state is not None:
            rounds, weights = int(state["round"]), state["weights"]
            aggregator.load_state(state["strategy"])
        self._history.keep_until(rounds)
        RefusalFile.of_run(self._folder.root).keep_until(rounds)
        for server_round in range(1, rounds + 1):
            self._uploads.update(self._scenario.participants(server_round))
        return rounds, weights

    def seconds(self) -> list[float]:
        """Return the seconds that each former round took."""
        rows = self._history.rows()
        return [float(seconds) for seconds in rows["seconds"]] if len(rows) else []

    def describe_damage(self, weights: Mapping[str, Tensor], weights_before: Mapping[str, Tensor]) -> str | None:
        """Describe how a step spoils the model, in one line; None if it does not.

        Args:
            weights: The state after the step.
            weights_before: The state before it.
        """
        accuracy, guess = self._validation.accuracy(weights), math.log(self._scenario.model.classes)
        if accuracy.undecided:
            return f"the step leaves {accuracy.undecided} validation pictures without finite logits; weights stay"
        if accuracy.loss <= WORSE * guess:
            return None
        former, chance = self._validation.accuracy(weights_before), 1 / self._scenario.model.classes
        if accuracy.loss <= WORSE * former.loss or accuracy.top1 - chance > (former.top1 - chance) / 2:
            return None
        return (
            f"the step takes the validation loss from {former.loss:.3g} to {accuracy.loss:.3g} and Top-1 from "
            f"{former.top1:.1%} to {accuracy.top1:.1%}; weights stay"
        )

    def write(
        self,
        server_round: int,
        metrics: Sequence[MetricRecord],
        refused: int,
        seconds: float,
        weights: Mapping[str, Tensor],
    ) -> Mapping[str, Value]:
        """Add a round to the history and return its row.

        Args:
            server_round: Number of the round, from 1.
            metrics: Reports of the replies that were used.
            refused: Number of replies that were refused.
            seconds: Time that the round took.
            weights: The state after it.
        """
        pipeline = self._scenario.pipeline
        self._uploads.update(self._scenario.participants(server_round))
        spent = pipeline.spent(max(self._uploads.values()))
        accuracy = self._validation.accuracy(weights)
        reported = [_plausible(report) for report in metrics]
        row: dict[str, Value] = {
            "round": server_round,
            "loss": _mean(reported, "loss"),
            "validation_loss": accuracy.loss,
            "top1": accuracy.top1,
            "learning_rate": _mean(reported, "learning-rate"),
            "clients": len(reported) * pipeline.clients,
            "refused": refused,
            "skipped": _sum(reported, "skipped"),
            "pictures": _sum(reported, "pictures"),
            "validation_pictures": accuracy.total,
            "seconds": seconds,
            "images_per_second": _sum(reported, "pictures") / seconds,
            "upload_bytes": self._uploaded * pipeline.bits / 8,
            "upload_seconds": _mean(reported, "upload-seconds"),
            "epsilon": None if spent is None else spent.epsilon,
        }
        self._history.append(row)
        return row

    def keep(self, server_round: int, weights: Mapping[str, Tensor], aggregator: Aggregator) -> None:
        """Write a checkpoint where it is due.

        Args:
            server_round: Number of the finished round, from 1.
            weights: The state after it.
            aggregator: Its strategy's moments are stored as well.
        """
        if server_round % self._training.checkpoint_every and server_round < self._training.rounds:
            return
        about: dict[str, Any] = {"config": self._scenario.digest_of_run(), "round": server_round, "weights": weights}
        save_checkpoint(self._folder, weights, about | {"strategy": aggregator.state()})


def _plausible(metrics: MetricRecord) -> dict[str, float]:
    """Drop the implausible values of a client's report."""
    return {name: cast(float, value) for name, value in metrics.items() if plausible(value)}


def _sum(reported: Sequence[Mapping[str, float]], name: str) -> int:
    """Sum a metric over all clients that report it."""
    return int(sum(metrics.get(name, 0) for metrics in reported))


def _mean(reported: Sequence[Mapping[str, float]], name: str) -> Value:
    """Average a metric over the pictures of all clients that report it; None if none does."""
    pairs = [(metrics[EXAMPLES], metrics[name]) for metrics in reported if name in metrics]
    if not pairs:
        return None
    return math.fsum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)
