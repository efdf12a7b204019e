"""What hostile clients send: ten kinds, each a function of what is before it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from fedmjp.wire import ARRAYS, EXAMPLES, METRICS

SCALE = 1e4
WITHIN_BOUND = 5.0  # times its length, that a flipped update is sent at: half of what max_norm lets pass
LARGEST = 3e38  # that float32 holds, nearly
DEVIATIONS = 1.5  # of honest updates, that "little is enough" stays away from their mean
CLAIMED = 2**31  # pictures that nobody has
Update = Mapping[str, Tensor]


@dataclass(frozen=True)
class Situation:
    """What a hostile client may use in a round: what it and all others would send honestly, and what it sent first."""

    client: int
    honest: Callable[[int], RecordDict]  # what a client would send in this round
    flipped: Callable[[int], RecordDict]  # the same if it took each label for its opposite
    clients: int
    first: RecordDict  # what this client would have sent in the first round

    @property
    def own(self) -> RecordDict:
        """What it would send honestly."""
        return self.honest(self.client)

    def changed(self, change: Callable[[Tensor], Tensor], examples: int | None = None) -> RecordDict:
        """Its honest answer with every tensor changed, and another number of pictures if one is given."""
        update = {name: change(tensor) for name, tensor in update_of(self.own).items()}
        return answer_of(self.own, update, examples)


Kind = Callable[[Situation], RecordDict | None]


def update_of(answer: RecordDict) -> Update:
    """The tensors of an answer."""
    return answer.array_records[ARRAYS].to_torch_state_dict()


def answer_of(answer: RecordDict, update: Update, examples: int | None = None) -> RecordDict:
    """The answer with another update, and another number of pictures if one is given; with metrics of its own."""
    metrics = dict(answer.metric_records[METRICS])
    if examples is not None:
        metrics[EXAMPLES] = examples
    return RecordDict({ARRAYS: ArrayRecord(dict(update)), METRICS: MetricRecord(metrics)})


def send_honestly(situation: Situation) -> RecordDict:
    """What an honest client sends; hostile is when it arrives."""
    return situation.own


def stay_away(situation: Situation) -> RecordDict:
    """Little is enough: the mean of all honest updates less some deviations (Baruch et al., NeurIPS 2019)."""
    updates = [update_of(situation.honest(client)) for client in range(situation.clients)]
    stacked = {name: torch.stack([update[name] for update in updates]) for name in updates[0]}
    update = {name: values.mean(dim=0) - DEVIATIONS * values.std(dim=0) for name, values in stacked.items()}
    return answer_of(situation.own, update)


def repeat(situation: Situation) -> RecordDict:
    """What it sent in the first round, in every round."""
    return situation.first


LATE = "late"  # an honest answer, a round too late
KINDS: dict[str, Kind] = {
    "scaling": lambda situation: situation.changed(lambda tensor: SCALE * tensor),
    "sign flip": lambda situation: situation.changed(lambda tensor: -WITHIN_BOUND * tensor),
    "label flip": lambda situation: situation.flipped(situation.client),
    "little is enough": stay_away,
    "NaN": lambda situation: situation.changed(lambda tensor: tensor * float("nan")),
    "wrong counts": lambda situation: situation.changed(lambda tensor: -tensor, CLAIMED),
    "replay": repeat,
    LATE: send_honestly,
    "huge": lambda situation: situation.changed(lambda tensor: torch.full_like(tensor, LARGEST)),
    "silent": lambda _situation: None,
}
