"""From the replies of a round to the next weights, by Flower's strategies."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx, FedTrimmedAvg, Krum, MultiKrum
from torch import Tensor

from fedmjp.scenario import AnyScenario
from fedmjp.server.shelf import StoredUpdate
from fedmjp.tensors import average_updates
from fedmjp.wire import ARRAYS, BUFFERS, EXAMPLES, METRICS

# Every message is sent to the nodes that it is meant for, whatever their number.
EVERYBODY: dict[str, Any] = {
    "fraction_train": 1.0,
    "fraction_evaluate": 0.0,
    "min_train_nodes": 1,
    "min_evaluate_nodes": 0,
    "min_available_nodes": 1,
}
MOMENTS = ("momentum_vector", "m_t", "v_t")  # what FedAvgM and FedAdam carry from round to round
CARRIED = (*MOMENTS, "current_arrays")  # FedAvgM goes on from its own copy of the weights
MOST_VALUES = 2**27  # of all updates together that a strategy is given at once: half a gigabyte
# Those that a minority of hostile clients cannot lead anywhere.
ROBUST: dict[str, type[FedAvg]] = {
    "trimmed_mean": FedTrimmedAvg,
    "median": FedMedian,
    "krum": Krum,
    "multi_krum": MultiKrum,
}


def _strategy(scenario: AnyScenario) -> FedAvg:
    """Build Flower's strategy for a scenario; FedSGD is FedAvg over weights that are one step away."""
    rate, training = scenario.server_rate, scenario.training
    match training and training.strategy:
        case "fedprox" if training:
            return FedProx(**EVERYBODY, proximal_mu=training.proximal_mu)
        case "fedavgm" if training:
            return FedAvgM(**EVERYBODY, server_learning_rate=rate, server_momentum=training.server_momentum)
        case "fedadam":
            return FedAdam(**EVERYBODY, eta=rate)
        case name:
            strategy_class = ROBUST.get(str(name), FedAvg)
            return strategy_class(**EVERYBODY)


def _suspect(strategy: FedAvg, updates: int, share: float) -> None:
    """Tell a strategy how many of so many updates may be hostile, given their share; at most what it can stand."""
    count = math.ceil(share * updates - 1e-9)  # what rounding adds is no client
    match strategy:
        case FedTrimmedAvg():
            # It rounds the product of share and number down.
            strategy.beta = (min(count, (updates - 1) // 2) + 0.1) / updates
        case Krum():
            strategy.num_malicious_nodes = min(count, max(updates - 3, 0) // 2)
        case MultiKrum():
            strategy.num_malicious_nodes = min(count, max(updates - 3, 0) // 2)
            strategy.num_nodes_to_select = updates - count
        case _:
            return


def _step_along(scenario: AnyScenario) -> float:
    """Return the factor of an update in the weights that a strategy is given; negative for a gradient."""
    if scenario.threat.update == "gradient":
        return -scenario.server_rate
    return scenario.server_rate if scenario.training is None else 1.0


class Aggregator:
    """A strategy that sees the weights that clients' updates lead to; what is withheld keeps its values.

    Buffers are averaged beside it: a strategy would treat the running statistics of a batch norm as weights, and
    Adam's step makes variances negative. Robust strategies see the updates themselves, which differ by more than
    weights do, beside their length, and take the median of buffers.

    Args:
        scenario: Names the strategy.
        parameters: Names of the model's parameters; what else its state holds are buffers.
        withheld: Those that clients do not send.
    """

    def __init__(
        self, scenario: AnyScenario, parameters: Iterable[str], withheld: frozenset[str] = frozenset()
    ) -> None:
        self._strategy, self._step = _strategy(scenario), _step_along(scenario)
        self._robust = isinstance(self._strategy, tuple(ROBUST.values()))
        self._hostile = 0.0 if scenario.training is None else scenario.training.hostile
        self._before: dict[str, Any] = {}  # what the strategy carried before its last step
        self._parameters, self._withheld = frozenset(parameters), withheld

    @property
    def moves(self) -> bool:
        """Tell whether updates change the weights; single batches do so only with a server learning rate."""
        return bool(self._step)

    def records(self, weights: Mapping[str, Tensor]) -> dict[str, ArrayRecord]:
        """Pack a model's state into the records that cross the wire.

        Args:
            weights: The state by name, parameters and buffers.
        """
        buffers = {name: value for name, value in weights.items() if name not in self._parameters}
        records = {ARRAYS: ArrayRecord({name: value for name, value in weights.items() if name in self._parameters})}
        return records | ({BUFFERS: ArrayRecord(buffers)} if buffers else {})

    def expected(self, sent: Mapping[str, ArrayRecord]) -> dict[str, ArrayRecord]:
        """Return the records that clients must answer with: those sent, without the withheld tensors.

        Args:
            sent: The records of the weights, by record name.
        """
        arrays = {name: array for name, array in sent[ARRAYS].items() if name not in self._withheld}
        return {**sent, ARRAYS: ArrayRecord(arrays)}

    def messages(
        self, server_round: int, sent: Mapping[str, ArrayRecord], nodes: Sequence[int], *, scenario: int = 0
    ) -> list[Message]:
        """Build the messages of a round with the records of the weights, in the order of the nodes.

        Args:
            server_round: Number of the round, from 1.
            sent: The records of the weights, by record name.
            nodes: Flower's numbers of the receivers.
            scenario: Index of the scenario in the run.
        """
        if not nodes:
            return []
        grid: Any = SimpleNamespace(get_node_ids=lambda: nodes)  # as much of one as a strategy asks for
        config, arrays = ConfigRecord({"scenario": scenario}), self.expected(sent)[ARRAYS]
        messages = list(self._strategy.configure_train(server_round, arrays, config, grid))
        for message in messages:
            for name, record in sent.items():
                message.content[name] = record
        return sorted(messages, key=lambda message: nodes.index(message.metadata.dst_node_id))  # strategies shuffle

    def aggregate(
        self, server_round: int, weights: Mapping[str, Tensor], updates: Sequence[StoredUpdate]
    ) -> dict[str, Tensor] | None:
        """Compute the next weights; the same ones if there is no update, None if they would not be finite.

        Finite updates may overflow together; the strategy then forgets them.

        Args:
            server_round: Number of the round, from 1.
            weights: The state that was sent, by name.
            updates: Screened, in an order that does not depend on who was faster: sums of floats do.
        """
        if not updates or not self.moves:
            return dict(weights)
        self._before = {name: getattr(self._strategy, name) for name in CARRIED if hasattr(self._strategy, name)}
        averaged = self._combine_buffers(updates)
        learnt = {name: value for name, value in weights.items() if name in self._parameters - self._withheld}
        averaged |= (self._outvote if self._robust else self._average)(server_round, learnt, updates)
        # Strategies compute in other types: FedAdam in float64.
        stepped = {name: averaged.get(name, value).to(value.dtype) for name, value in weights.items()}
        # FedAdam's second moment overflows long before its weights do, and would never move them again.
        if _all_finite(stepped) and _all_finite(self.state()):
            return stepped
        self.undo()
        return None

    def _average(
        self, server_round: int, learnt: Mapping[str, Tensor], updates: Sequence[StoredUpdate]
    ) -> dict[str, Tensor]:
        """Take a strategy's step along the mean update; one update after another is read."""
        counts = [_examples(update) for update in updates]
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in learnt.items()}
        for update, count in zip(updates, counts, strict=True):
            for name, tensor in update.tensors(names=list(total)).items():
                total[name].add_(tensor, alpha=count / sum(counts))
        ahead = {name: (value + self._step * total[name]).to(value.dtype) for name, value in learnt.items()}
        return self._taken(server_round, [_reply(updates[0], ahead)])

    def _outvote(
        self, server_round: int, learnt: Mapping[str, Tensor], updates: Sequence[StoredUpdate]
    ) -> dict[str, Tensor]:
        """Take a robust strategy's step: on whole updates where it compares them, else some values at a time."""
        _suspect(self._strategy, len(updates), self._hostile)
        at_once = MOST_VALUES // len(updates) if isinstance(self._strategy, FedTrimmedAvg | FedMedian) else None
        stepped = {name: value.flatten().clone() for name, value in learnt.items()}
        for pieces in _pieces({name: value.numel() for name, value in learnt.items()}, at_once):
            replies = []
            for update in updates:
                tensors = update.tensors(names=list(pieces))
                parts = {name: self._step * tensors[name].flatten()[piece] for name, piece in pieces.items()}
                replies.append(_reply(update, parts))
            for name, moved in self._taken(server_round, replies).items():
                stepped[name][pieces[name]] += moved
        return {name: value.view_as(learnt[name]) for name, value in stepped.items()}

    def _taken(self, server_round: int, replies: Sequence[Message]) -> dict[str, Tensor]:
        arrays, _ = self._strategy.aggregate_train(server_round, replies)
        return {} if arrays is None else dict(arrays.to_torch_state_dict())

    def undo(self) -> None:
        """Have the strategy forget its last step."""
        for name, value in self._before.items():
            setattr(self._strategy, name, value)

    def state(self) -> dict[str, Any]:
        """Return the moments that the strategy carries from round to round, as tensors."""
        moments = {name: getattr(self._strategy, name, None) for name in MOMENTS}
        values = {name: value for name, value in moments.items() if value is not None}
        return {name: _each(lambda array: torch.from_numpy(np.asarray(array)), value) for name, value in values.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from the moments that ``state`` returned.

        Args:
            state: The moments by name.
        """
        for name, value in state.items():
            setattr(self._strategy, name, _each(Tensor.numpy, value))

    def _combine_buffers(self, updates: Sequence[StoredUpdate]) -> dict[str, Tensor]:
        sent = [update.tensors(BUFFERS) for update in updates]
        if self._robust:
            return {name: torch.stack([buffers[name] for buffers in sent]).median(dim=0).values for name in sent[0]}
        return average_updates(sent, [_examples(update) for update in updates])


def _pieces(sizes: Mapping[str, int], at_once: int | None) -> Iterator[dict[str, slice]]:
    """Cut tensors into batches of slices that hold ``at_once`` values at most; None puts all into a single batch."""
    room = at_once or sum(sizes.values())
    batch: dict[str, slice] = {}
    free = room
    for name, size in sizes.items():
        first = 0
        while first < size:
            batch[name] = slice(first, min(size, first + free))
            free -= batch[name].stop - first
            first = batch[name].stop
            if not free:
                yield batch
                batch, free = {}, room
    if batch:
        yield batch


def _examples(update: StoredUpdate) -> float:
    return float(cast(float, update.metrics[EXAMPLES]))


def _reply(update: StoredUpdate, arrays: Mapping[str, Tensor]) -> Message:
    """Build a reply as strategies take it, in the model's order, since FedAvgM goes by places."""
    message = copy(update.reply)
    # A strategy averages all metrics, whatever they are; history has its own way.
    metrics = MetricRecord({EXAMPLES: update.metrics[EXAMPLES]})
    message.content = RecordDict({ARRAYS: ArrayRecord(dict(arrays)), METRICS: metrics})
    return message


def _all_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    return all(_all_finite(part) for part in (value.values() if isinstance(value, dict) else value))


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a change to every array in nested dictionaries and lists."""
    if isinstance(value, dict):
        return {name: _each(change, inner) for name, inner in value.items()}
    return [_each(change, inner) for inner in value] if isinstance(value, list) else change(value)
