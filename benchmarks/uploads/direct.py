"""Uploads that are computed in this process when they are asked for, without Flower."""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.uploads.source import Batch, UploadSource, described
from fedmjp.config import ModelConfig
from fedmjp.data.pictures import PictureEntry
from fedmjp.data.selection import Selection
from fedmjp.errors import ConfigError, Failure, FedmjpError
from fedmjp.exchange import (
    Exchange,
    change_weights,
    compute_update,
    make_upload,
    prepare_private,
    protect,
)
from fedmjp.models.build import build_vit, with_weights
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.names import ORACLE_TOKEN_GRADIENTS
from fedmjp.private import PrivateBatch
from fedmjp.records import weights_digest
from fedmjp.setups import Turn
from fedmjp.stacked import ENTRANCE, entrance_gradients

PICTURES_PER_PASS = 16
ONE_UPLOAD = {"uploads_per_picture": 1}  # scenarios that share their uploads agree in all else
Outcomes = dict[Batch, Exchange | Failure]


@dataclass
class Memory:
    """Uploads of the pictures that were asked for last.

    Experiments that differ only in the number of uploads per picture share it, so that each upload is
    computed once, as long as they ask for the same pictures one after another.
    """

    outcomes: dict[int, Outcomes] = field(default_factory=dict)
    key: Hashable = None  # what was asked for


@dataclass(frozen=True)
class DirectUploads(UploadSource):
    """Computes uploads and, unless there is a memory, forgets them.

    Where a part of an update is protected as the whole is, only the tensors that some attack reads are computed.
    Others of an upload are computed only for attacks that read others: uploads 1 to R - 1 of its pictures, in this
    order; the upload itself is number 0. The weights stay as they are. An upload does not depend on which others are
    asked for, to the last bit. Experiments on the same pictures may share a memory.

    Raises:
        ConfigError: If the weights are to move, which takes a server.
    """

    experiment: Experiment
    selection: Selection
    memory: Memory | None = None
    # What a server that changes weights had sent in place of the model's own, by the digest of all weights.
    _sent: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rate = self.experiment.scenario.server_learning_rate
        if rate:
            raise ConfigError(f"direct mode keeps the weights; server-learning-rate is {rate}")

    def uploads(self, batches: Sequence[Batch]) -> Mapping[Batch, Exchange | Failure]:
        """Compute uploads, in stacks where the attacks read nothing but the model's entrance.

        Args:
            batches: Names of the pictures behind each.
        """
        scenario = self.experiment.scenario
        try:
            model = initial_model(scenario.network, scenario.device)
        except FedmjpError as error:
            return dict.fromkeys(batches, Failure(str(error)))
        read, of_others = (self.experiment.tensors_read(model, of_others=is_further) for is_further in (False, True))
        memory = self.memory or Memory()
        key = (scenario.model_copy(update=ONE_UPLOAD), tuple(batches), read, of_others)
        if key != memory.key:
            memory.key, memory.outcomes = key, {}
        first = scenario.probes
        numbers = range(first, first + (scenario.uploads_per_picture if of_others else 1))
        for number in numbers:
            if number not in memory.outcomes:
                tensors = of_others if number > first else read
                memory.outcomes[number] = self._numbered(model, batches, tensors, number, memory)
        exchanges = memory.outcomes[first]
        if len(numbers) > 1:
            several = {batch: [memory.outcomes[number][batch] for number in numbers] for batch in batches}
            exchanges = {batch: _join_uploads(outcomes) for batch, outcomes in several.items()}
        computed = [outcome for outcome in exchanges.values() if isinstance(outcome, Exchange) and outcome.changed]
        self._sent.update((exchange.upload.weights, exchange.changed[0]) for exchange in computed)
        return exchanges

    def model(self, weights: str) -> VitClassifier:
        """Copy the model as it was sent, so that nothing an attack does to it reaches the clients.

        Args:
            weights: Digest of the weights.
        """
        initial = _attackers_model(self.experiment.scenario.network, self.experiment.scenario.device)
        changed = self._sent.get(weights)
        return with_weights(initial, changed) if changed else initial

    def private(self) -> Iterator[PrivateBatch]:
        """Load what is behind the first upload of each batch."""
        scenario = self.experiment.scenario
        for _, batch in self._batches.values():
            yield prepare_private(scenario, [self.selection.load(entry) for entry in batch], scenario.probes)

    def _numbered(
        self, model: VitClassifier, batches: Sequence[Batch], names: frozenset[str], number: int, memory: Memory
    ) -> Outcomes:
        """Compute one upload of each batch."""
        scenario = self.experiment.scenario
        parts = scenario.pipeline.parts and scenario.pipeline.clients == 1
        gradients = scenario.update == "gradient" and model.has_positions
        stacked = parts and gradients and scenario.server is None and names and names <= ENTRANCE
        exchanges: Outcomes = {}
        stacks = [[batch] for batch in batches]
        if stacked:  # whole passes that the batches are in: their sizes show in the last bit of gradients
            size, planned = max(1, PICTURES_PER_PASS // scenario.batch_size), list(self._batches)
            firsts = dict.fromkeys(self._batches[batch][0] // size * size for batch in batches)
            stacks = [planned[first : first + size] for first in firsts]
        for stack in stacks:
            exchanges |= self._computed(model, stack, names, number, memory)
        return {batch: exchanges[batch] for batch in batches}

    def _computed(
        self, model: VitClassifier, stack: Sequence[Batch], names: frozenset[str], number: int, memory: Memory
    ) -> Outcomes:
        """Compute the uploads of one pass, or of one batch alone."""
        scenario = self.experiment.scenario
        exchanges: Outcomes = {}
        private: dict[Batch, PrivateBatch] = {}
        changed: dict[Batch, tuple[Mapping[str, Tensor], ...]] = {}
        for batch in stack:
            try:
                pictures = [self.selection.load(entry) for entry in self._batches[batch][1]]
                private[batch] = prepare_private(scenario, pictures, number)
                honest = scenario.server is None
                changed[batch] = () if honest else _changed(memory, batch) or change_weights(scenario, model, pictures)
            except FedmjpError as error:
                exchanges[batch] = Failure(str(error))
        try:
            updates = self._updates(model, list(private.values()), list(changed.values()), names, number)
            for (batch, batch_private), sent in zip(private.items(), updates, strict=True):
                client, place = divmod(self._batches[batch][0], scenario.batches_per_client)
                turn = scenario.round_of(Turn(place, number))
                digest = _initial_digest(scenario.network, scenario.device)
                if any(changed[batch]):  # the first client behind an upload stands for all
                    digest = weights_digest({**model.state_dict(), **changed[batch][0]})
                upload = make_upload(scenario, sent, batch_private, server_round=turn, node=client, weights=digest)
                exchanges[batch] = Exchange(batch_private, upload, changed[batch])
        except Exception as error:  # noqa: BLE001 (whatever a client breaks down with is a result)
            for batch in private:
                reason = f"the client's update of {', '.join(batch)} failed: {described(error)}"
                exchanges.setdefault(batch, Failure(reason))
        return exchanges

    def _updates(
        self,
        model: VitClassifier,
        batches: Sequence[PrivateBatch],
        changed: Sequence[Sequence[Mapping[str, Tensor]]],
        names: frozenset[str],
        number: int,
    ) -> list[dict[str, Tensor]]:
        """Compute what leaves the clients, one update per batch; what only bounds see passes no defence."""
        scenario = self.experiment.scenario
        for_bounds = names & {ORACLE_TOKEN_GRADIENTS}
        options: dict[str, Any] = {"label_smoothing": scenario.label_smoothing, "arithmetic": scenario.arithmetic}
        if len(batches) > 1:
            updates = []
            stacked = entrance_gradients(model, batches, names, **options)
            for update, batch in zip(stacked, batches, strict=True):
                for_bounds_alone = {name: update.pop(name) for name in for_bounds}
                updates.append(protect(scenario, update, batch, model, number) | for_bounds_alone)
            return updates
        updates = []
        for batch, weights in zip(batches, changed, strict=True):
            sent = compute_update(scenario, model, batch, number, weights)
            if for_bounds:
                sent |= entrance_gradients(model, [batch], for_bounds, **options)[0]
            # A floor reads nothing, but an upload is never empty.
            updates.append({name: tensor for name, tensor in sent.items() if name in names or not names})
        return updates

    @cached_property
    def _batches(self) -> dict[Batch, tuple[int, tuple[PictureEntry, ...]]]:
        """Place and pictures of each batch, by the pictures' names."""
        batches = self.selection.batches(self.experiment.scenario)
        return {tuple(entry.name for entry in batch): (place, batch) for place, batch in enumerate(batches)}


def _changed(memory: Memory, batch: Batch) -> tuple[Mapping[str, Tensor], ...]:
    """Find the weights that a server sent for a former upload of these pictures; nothing if there was none."""
    former = (exchanges.get(batch) for exchanges in memory.outcomes.values())
    return next((outcome.changed for outcome in former if isinstance(outcome, Exchange)), ())


def _join_uploads(outcomes: Sequence[Exchange | Failure]) -> Exchange | Failure:
    """Put later uploads of the same pictures into the first exchange; one failure is that of all."""
    exchanges = [outcome for outcome in outcomes if isinstance(outcome, Exchange)]
    if len(exchanges) < len(outcomes):
        return next(outcome for outcome in outcomes if isinstance(outcome, Failure))
    first, *later = exchanges
    return replace(first, upload=replace(first.upload, others=tuple(exchange.upload for exchange in later)))


# Jobs come in the order of their weights; one arm more, for jobs that are tried again.
@lru_cache(maxsize=2)
def initial_model(arm: ModelConfig, device: str) -> VitClassifier:
    """Build the model that clients begin with; the last two are kept.

    Args:
        arm: The network.
        device: cpu or cuda.
    """
    return build_vit(arm).to(device)


@lru_cache(maxsize=2)
def _attackers_model(arm: ModelConfig, device: str) -> VitClassifier:
    return copy.deepcopy(initial_model(arm, device))


@lru_cache(maxsize=64)
def _initial_digest(arm: ModelConfig, device: str) -> str:
    return weights_digest(initial_model(arm, device).state_dict())
