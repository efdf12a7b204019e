"""Top-1 of weights as sites measure it, each on validation pictures of its own: the server opens none."""

from collections.abc import Callable, Mapping
from functools import cache
from logging import INFO
from statistics import median_low
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedmjp.errors import FederationError
from fedmjp.server.cohort import bound_examples
from fedmjp.server.patience import Patience
from fedmjp.server.roster import Roster
from fedmjp.server.screening import last_line, plausible
from fedmjp.training.accuracy import Accuracy
from fedmjp.wire import CORRECT, EXAMPLES, LOSS, METRICS, UNDECIDED

REPORTED = {EXAMPLES, CORRECT, UNDECIDED, LOSS}


class SiteValidation:
    """Sends weights to all sites that are there and combines what they answer.

    Nobody can check an answer. So no site counts for more than a few medians of the sites' numbers of pictures, and the
    loss is the median of the sites', which a hostile minority moves nowhere.

    Args:
        grid: Reaches the sites.
        roster: Which node is which site.
        records: The records of weights.
        scenario: Index of the scenario in the run.
        patience: How long answers may take.
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        records: Callable[[Mapping[str, Tensor]], dict[str, ArrayRecord]],
        scenario: int,
        patience: Patience,
    ) -> None:
        self._grid, self._roster, self._records, self._patience = grid, roster, records, patience
        self._config = ConfigRecord({"scenario": scenario})
        self._tell = cache(lambda line: log(INFO, "%s", line))  # each reason once
        self._measured: tuple[Mapping[str, Tensor], Accuracy] | None = None

    def accuracy(self, weights: Mapping[str, Tensor]) -> Accuracy:
        """Measure the Top-1 accuracy of weights; those of the last call are not measured again.

        Args:
            weights: The model's state by name.

        Raises:
            FederationError: If no site can measure it.
        """
        if self._measured is None or self._measured[0] is not weights:
            self._measured = weights, self._ask(weights)
        return self._measured[1]

    def _ask(self, weights: Mapping[str, Tensor]) -> Accuracy:
        nodes, _ = self._roster.nodes(self._patience.seconds)
        content = RecordDict({**self._records(weights), "config": self._config})
        messages = [Message(content, dst_node_id=node, message_type=MessageType.EVALUATE) for node in nodes.values()]
        answers: dict[int, MetricRecord] = {}
        reason = "no site is there"
        for reply in self._grid.send_and_receive(messages, timeout=self._patience.seconds) if messages else ():
            if problem := _problem(reply):
                reason = f"node {reply.metadata.src_node_id} does not evaluate: {problem}"
                self._tell(reason)
            else:
                answers[reply.metadata.src_node_id] = reply.content.metric_records[METRICS]
        if not answers:
            raise FederationError(f"no site can measure Top-1 on pictures of its own: {reason}")
        return combine_accuracies(answers)


def combine_accuracies(answers: Mapping[int, MetricRecord]) -> Accuracy:
    """Combine the accuracy of several sites: Top-1 weighted by numbers of pictures, and the median loss.

    Args:
        answers: Metrics by site; their numbers of pictures are bounded in place.
    """
    claimed = {site: _value(metrics, EXAMPLES) for site, metrics in answers.items()}
    bound_examples(answers)
    counts = {site: _value(metrics, EXAMPLES) for site, metrics in answers.items()}

    def scale(name: str) -> int:
        return round(sum(counts[site] / claimed[site] * _value(metrics, name) for site, metrics in answers.items()))

    loss = median_low(_value(metrics, LOSS) for metrics in answers.values())
    return Accuracy(scale(CORRECT), round(sum(counts.values())), loss, scale(UNDECIDED))


def _problem(reply: Message) -> str | None:
    """Return the reason why an answer cannot be used, in one line; None if it can."""
    if reply.has_error():
        return last_line(reply.error.reason or "")
    metrics = reply.content.metric_records.get(METRICS)
    if set(reply.content) != {METRICS} or metrics is None or set(metrics) != REPORTED:
        return "its answer is no evaluation"
    if not all(plausible(value) for value in metrics.values()):
        return "it reports numbers that cannot be"
    if _value(metrics, EXAMPLES) < 1 or _value(metrics, CORRECT) + _value(metrics, UNDECIDED) > _value(
        metrics, EXAMPLES
    ):
        return "it counts more pictures than it has"
    return None


def _value(metrics: MetricRecord, name: str) -> float:
    return float(cast(float, metrics[name]))
