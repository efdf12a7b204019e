"""Uploads that are computed in this process when they are asked for, without Flower."""

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from torch import Tensor

from benchmarks.plan.experiment import Experiment, PlannedTrial
from benchmarks.uploads.source import Batch, Recorded, described, tensors_read
from fedmjp.config import FederationConfig, ModelConfig, Turn
from fedmjp.data.batches import batch_of_round
from fedmjp.data.selection import Selection
from fedmjp.errors import ConfigError, FedmjpError
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.names import ORACLE_TOKEN_GRADIENTS
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload, weights_digest
from fedmjp.settings import Picture
from fedmjp.stacked import ENTRANCE, entrance_gradients
from fedmjp.updates import leaving, local_update

PICTURES_PER_PASS = 16
Found = dict[Batch, Recorded | str]


@dataclass
class Memory:
    """Uploads of the pictures that were asked for last.

    Experiments that differ only in the number of uploads per picture share it, so that each upload is
    computed once, as long as they ask for the same pictures one after another.
    """

    first: Found | None = None
    others: dict[int, dict[Batch, Upload | str]] = field(default_factory=dict)
    _of: Hashable = None

    def turn_to(self, pictures: Hashable) -> None:
        """Forget what is of other pictures."""
        if pictures != self._of:
            self._of, self.first, self.others = pictures, None, {}


@dataclass(frozen=True)
class _Asked:
    """Uploads that are wanted: of which arm, version and pictures, with which tensors."""

    arm: ModelConfig
    gradient_of: Picture
    batches: tuple[Batch, ...]
    read: frozenset[str]
    read_of_others: frozenset[str]

    def names(self, number: int) -> frozenset[str]:
        return self.read_of_others if number else self.read


@dataclass(frozen=True)
class DirectUploads:
    """Computes uploads and, unless there is a memory, forgets them.

    Only the tensors that some attack reads are computed and kept, and others of an upload only for attacks
    that read others: uploads 1 to R - 1 of its pictures, in this order; the upload itself is number 0. The
    weights stay as they are. An upload does not depend on which others are asked for, to the last bit.

    Attributes:
        experiment: Whose arms' uploads are asked for.
        selection: Its pictures; experiments that differ in their seed may share them.
        memory: Shared with other experiments on the same pictures; None remembers nothing.

    Raises:
        ConfigError: If the weights are to move, which takes a server.
    """

    experiment: Experiment
    selection: Selection
    memory: Memory | None = None

    def __post_init__(self) -> None:
        rate = self.experiment.federation.server_learning_rate
        if rate:
            raise ConfigError(f"direct mode keeps the weights; server-learning-rate is {rate}")

    def prepare(self, planned: Sequence[PlannedTrial], on_rounds: Callable[[int], None]) -> str | None:
        """Nothing to record."""
        del planned, on_rounds
        return None

    def uploads(
        self, arm: ModelConfig, gradient_of: Picture, batches: Sequence[Batch]
    ) -> Mapping[Batch, Recorded | str]:
        """Compute them, in stacks where the attacks read nothing but the model's entrance."""
        try:
            model = _initial_model(arm, self.experiment.federation.device)
        except FedmjpError as error:
            return dict.fromkeys(batches, str(error))
        read, of_others = (tensors_read(self.experiment, arm, model, of_others=others) for others in (False, True))
        asked = _Asked(arm, gradient_of, tuple(batches), read, of_others)
        memory = self.memory or Memory()
        memory.turn_to((asked, self.experiment.labels_known, one_upload(self.experiment.federation)))
        if memory.first is None:
            memory.first = self._numbered(model, asked, 0)
        numbers = range(1, self.experiment.federation.uploads_per_picture) if of_others else ()
        for number in numbers:
            if number not in memory.others:
                memory.others[number] = self._told(self._numbered(model, asked, number))
        return {
            batch: _together(memory.first[batch], [memory.others[number][batch] for number in numbers])
            for batch in batches
        }

    def model(self, arm: ModelConfig, weights: str) -> VitClassifier:
        """The initial model: a copy, so that nothing an attack does to it reaches the clients."""
        del weights
        return _attackers_model(arm, self.experiment.federation.device)

    def stale(self) -> None:
        """Nothing is kept."""

    def finish(self) -> None:
        """Nothing is kept."""

    def _told(self, found: Found) -> dict[Batch, Upload | str]:
        """The uploads as the server has them, without what is private."""
        known = self.experiment.labels_known
        return {
            batch: each if isinstance(each, str) else each.for_attack(labels_known=known)
            for batch, each in found.items()
        }

    def _numbered(self, model: VitClassifier, asked: _Asked, number: int) -> Found:
        """One upload of each batch."""
        names = asked.names(number)
        gradients = self.experiment.federation.update == "gradient" and model.has_positions
        stacked = gradients and names and names <= ENTRANCE
        found: Found = {}
        for stack in self._stacks(asked.batches) if stacked else [[batch] for batch in asked.batches]:
            found |= self._computed(model, asked, stack, number)
        return {batch: found[batch] for batch in asked.batches}

    def _stacks(self, batches: Sequence[Batch]) -> list[list[Batch]]:
        """Whole passes that the batches are in: how many are in a pass shows in the last bit of its gradients."""
        size = max(1, PICTURES_PER_PASS // self.experiment.federation.batch_size)
        passes = dict.fromkeys(self._places[batch] // size for batch in batches)
        every = list(self._places)
        return [every[index * size : (index + 1) * size] for index in passes]

    def _computed(self, model: VitClassifier, asked: _Asked, stack: Sequence[Batch], number: int) -> Found:
        """Uploads of one pass, or of one batch alone."""
        federation = self.experiment.federation
        found: Found = {}
        turns = {batch: self._turn(batch, asked.gradient_of, number) for batch in stack}
        private: dict[Batch, PrivateBatch] = {}
        for batch, turn in turns.items():
            try:
                private[batch] = batch_of_round(federation, self.selection, *turn)
            except FedmjpError as error:
                found[batch] = str(error)
        try:
            updates = _updates(model, list(private.values()), federation, asked.names(number))
            digest = _initial_digest(asked.arm, federation.device)
            for (batch, made), update in zip(private.items(), updates, strict=True):
                client, server_round = turns[batch]
                sent = leaving(update, made, federation, number)
                upload = Upload(sent, federation.update, len(batch), server_round, client, digest)
                found[batch] = Recorded(made, upload)
        except Exception as error:  # noqa: BLE001 (whatever a client breaks down with is a result)
            for batch in private:
                found.setdefault(batch, f"the client's update of {', '.join(batch)} failed: {described(error)}")
        return found

    def _turn(self, batch: Batch, gradient_of: Picture, number: int) -> tuple[int, int]:
        """Client and round of a batch, as in a federated run."""
        federation = self.experiment.federation
        client, place = divmod(self._places[batch], federation.batches_per_client)
        return client, federation.round_of(Turn(place, gradient_of, number))

    @cached_property
    def _places(self) -> dict[Batch, int]:
        batches = self.selection.batches(self.experiment.federation)
        return {tuple(entry.name for entry in batch): place for place, batch in enumerate(batches)}


def one_upload(federation: FederationConfig) -> FederationConfig:
    """The same with a single upload per picture: what federations that share their uploads agree in."""
    return federation.model_copy(update={"uploads_per_picture": 1})


def _together(first: Recorded | str, others: Sequence[Upload | str]) -> Recorded | str:
    failures = [each for each in (first, *others) if isinstance(each, str)]
    if isinstance(first, str) or failures:
        return failures[0]
    kept = tuple(each for each in others if isinstance(each, Upload))
    return replace(first, upload=replace(first.upload, others=kept)) if kept else first


def _updates(
    model: VitClassifier, private: Sequence[PrivateBatch], federation: FederationConfig, names: Collection[str]
) -> list[dict[str, Tensor]]:
    if len(private) > 1:
        return entrance_gradients(model, private, names)
    return [_update(model, batch, federation, names) for batch in private]


def _update(
    model: VitClassifier, batch: PrivateBatch, federation: FederationConfig, names: Collection[str]
) -> dict[str, Tensor]:
    whole = local_update(model, batch, federation)
    if ORACLE_TOKEN_GRADIENTS in names:
        whole |= entrance_gradients(model, [batch], [ORACLE_TOKEN_GRADIENTS])[0]
    # A floor reads nothing, but an upload is never empty.
    return {name: tensor for name, tensor in whole.items() if name in names or not names}


# Jobs come in the order of their weights; one arm more, for jobs that are tried again.
@lru_cache(maxsize=2)
def _initial_model(arm: ModelConfig, device: str) -> VitClassifier:
    return build_vit(arm).to(device)


@lru_cache(maxsize=2)
def _attackers_model(arm: ModelConfig, device: str) -> VitClassifier:
    return copy.deepcopy(_initial_model(arm, device))


@lru_cache(maxsize=64)
def _initial_digest(arm: ModelConfig, device: str) -> str:
    return weights_digest(_initial_model(arm, device).state_dict())
