"""The server's loop over the rounds of a scenario: single batches that are recorded, or training."""

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedmjp.config import RunConfig
from fedmjp.errors import ConfigError, QuorumError, RecordError
from fedmjp.learning import Training
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.scenario import FEWEST_ROBUST, AnyScenario, TrainingScenario
from fedmjp.server.aggregation import Aggregator
from fedmjp.server.changing import Group, WeightChanges
from fedmjp.server.cohort import UpdatePart, bound_examples, find_long_updates, measure_parts
from fedmjp.server.events import EventFile
from fedmjp.server.journal import Journal
from fedmjp.server.patience import START, Patience
from fedmjp.server.refusals import Refusal, RefusalFile
from fedmjp.server.roster import Roster
from fedmjp.server.screening import LARGEST, refusal, screen
from fedmjp.server.secure_sum import sum_groups
from fedmjp.server.shelf import Shelf, StoredUpdate
from fedmjp.server.site_validation import SiteValidation
from fedmjp.server.tap import UploadTap
from fedmjp.server.uploads import UploadFolder
from fedmjp.server.validation import Validation
from fedmjp.training.history import Value
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.wire import ARRAYS, BUFFERS, EXAMPLES, REPORTED, uploads_folder

UPDATES = ".updates"  # where those of the round that is played wait
OVERFLOW = "the replies are finite, their mean is not; weights stay"


class Federation:
    """Plays the rounds of one of a run's scenarios; a training run goes on after the last checkpoint of its folder.

    Args:
        grid: Reaches the clients.
        scenario: What is played.
        run: Where it leaves files.
        index: Of the scenario in the run.
        validation: Measures the weights of a training run; None opens the validation split.

    Raises:
        ConfigError: If a training run has no folder.
        DataError: If there is no validation split that fits the model.
        CheckpointError: If the folder's state is of another configuration.
    """

    def __init__(
        self,
        grid: Grid,
        scenario: AnyScenario,
        run: RunConfig,
        index: int = 0,
        *,
        validation: Validation | None = None,
    ) -> None:
        self._grid, self._scenario, self._run, self._index = grid, scenario, run, index
        self._events = EventFile.of_run(run)
        model = build(scenario.network)
        self._weights: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
        self._changes = WeightChanges(scenario, model)
        withheld = scenario.pipeline.withheld(model)
        self._aggregator = Aggregator(scenario, [name for name, _ in model.named_parameters()], withheld)
        self._roster = Roster(grid, scenario.clients, run.node_keys)
        self._patience = Patience(None if scenario.training is None else scenario.training.round_seconds)
        self._refused: list[Refusal] = []
        self._done, self._journal, folder = 0, None, self._uploads
        if isinstance(scenario, TrainingScenario):
            if not run.output_folder:
                raise ConfigError("output-folder is empty; name the folder that history and weights go to")
            folder = Path(run.output_folder)
            sent = sum(value.numel() for name, value in model.named_parameters() if name not in withheld)
            measured = validation or self._validation(model, scenario.training)
            self._journal = Journal(scenario, scenario.training, TrainingFolder(folder), measured, sent)
            self._done, self._weights = self._journal.resume(self._weights, self._aggregator)
            for seconds in self._journal.seconds():
                self._patience.learn(seconds)
        self._refusals = None if folder is None else RefusalFile.of_run(folder)
        self._shelf = Shelf(None if folder is None else folder / UPDATES)
        # Updates that lead nowhere, and tell a server nothing, need not wait on the disk.
        self._read_again = (ARRAYS, BUFFERS) if self._aggregator.moves or scenario.server is not None else ()

    def play(self) -> list[Refusal]:
        """Play the remaining rounds and return the refusals in them."""
        training = self._scenario.training
        self._roster.wait(START, None if training is None else math.ceil(training.quorum * self._scenario.clients))
        gc.freeze()  # what is there by now stays: to look through it after every few updates would take long
        try:
            for server_round in range(self._done + 1, self._scenario.rounds + 1):
                self._events.add("round begun", scenario=self._scenario.label, round=server_round)
                self._round(server_round)
                log(INFO, "[ROUND %s/%s] done", server_round, self._scenario.rounds)
        finally:
            gc.unfreeze()
            self._shelf.clear()
        return self._refused

    def _validation(self, model: Classifier, training: Training) -> Validation | SiteValidation:
        if training.validation == "sites":
            return SiteValidation(self._grid, self._roster, self._aggregator.records, self._index, self._patience)
        classes, tell = self._run.classes, lambda reason: self._events.add("picture skipped", reason=reason)
        return Validation(model, self._scenario, training.recipe, classes, tell)

    def _round(self, server_round: int) -> None:
        started = time.perf_counter()
        updates, refused = self._exchange(server_round)
        self._require_quorum(server_round, len(updates), refused)
        # Updates of weights that nobody trains lead nowhere.
        self._step(server_round, [] if self._changes.in_round(server_round) else updates)
        self._shelf.clear()
        seconds = time.perf_counter() - started
        self._patience.learn(seconds)
        clients = len(updates) * self._scenario.pipeline.clients
        figures: Mapping[str, Value] = {"clients": clients, "refused": refused, "seconds": seconds}
        if self._journal is not None:
            metrics = [update.metrics for update in updates]
            figures = self._journal.write(server_round, metrics, refused, seconds, self._weights)
            self._journal.keep(server_round, self._weights, self._aggregator)
        self._events.add("round done", **{"scenario": self._scenario.label, "round": server_round, **figures})

    def _step(self, server_round: int, updates: Sequence[StoredUpdate]) -> None:
        """Take the step that updates lead to, unless it spoils the model: then the last good weights stay."""
        stepped = self._aggregator.aggregate(server_round, self._weights, updates)
        if stepped is None:
            self._refuse([Refusal(server_round, None, OVERFLOW)])
        elif self._journal is not None and (reason := self._journal.describe_damage(stepped, self._weights)):
            self._aggregator.undo()
            self._refuse([Refusal(server_round, None, reason)])
        else:
            self._weights = stepped

    def _exchange(self, server_round: int) -> tuple[list[StoredUpdate], int]:
        """Send the weights to clients; return the usable updates and the number of refused ones.

        For groups whose updates are summed, the first client stands for all.
        """
        nodes, left_out = self._roster.nodes(self._patience.seconds)
        self._refuse([Refusal(server_round, None, reason) for reason in left_out])
        sent = self._aggregator.records(self._weights)
        size, participants = self._scenario.pipeline.clients, self._scenario.participants(server_round)
        groups = [tuple(participants[first : first + size]) for first in range(0, len(participants), size)]
        present = [group for group in groups if all(client in nodes for client in group)]
        client_of = {nodes[client]: client for group in present for client in group}
        messages = self._aggregator.messages(server_round, sent, list(client_of), scenario=self._index)
        self._changes.change(server_round, self._weights, messages, present)
        reasons = {group: self._patience.refusal if group in present else "is not connected" for group in groups}
        first_of = {group[0]: group for group in present}
        updates: dict[Group, StoredUpdate] = {}
        parts: dict[Group, list[UpdatePart]] = {}
        for client, reply in self._replies(server_round, messages, sent, client_of):
            group = first_of[client]
            if reply.has_error():
                reasons[group] = reply.error.reason or "no reason given"
                continue
            del reasons[group]
            updates[group] = self._shelf.keep(reply, self._read_again)
            if self._scenario.training is not None:
                parts[group] = measure_parts(reply, sent)
        in_order = {group: updates[group] for group in groups if group in updates}
        reasons |= self._compare(server_round, in_order, parts)
        for (client, *_), reason in reasons.items():
            log(INFO, "round %s: client %s refused: %s", server_round, client, reason)
        self._refuse([Refusal(server_round, group[0], reason) for group, reason in sorted(reasons.items())])
        used = {group: update for group, update in in_order.items() if group not in reasons}
        self._changes.learn(server_round, self._weights, used)
        return list(used.values()), len(reasons)

    def _compare(
        self, server_round: int, updates: Mapping[Group, StoredUpdate], parts: Mapping[Group, Sequence[UpdatePart]]
    ) -> dict[Group, str]:
        """Find the updates of a training round that are out of proportion; bound the numbers of pictures as well."""
        training = self._scenario.training
        if training is None or self._changes.in_round(server_round):
            return {}
        if training.update == "delta" and not self._run.share_sizes:
            for group, count in bound_examples({group: update.metrics for group, update in updates.items()}).items():
                log(INFO, "round %s: client %s said %s pictures, which count less", server_round, group[0], count)
        return find_long_updates({group: parts[group] for group in updates}, training.max_norm)

    def _require_quorum(self, server_round: int, used: int, refused: int) -> None:
        """Raise QuorumError where too few updates of a training round can be used: it would count for nothing."""
        training = self._scenario.training
        if training is None:
            return
        if used < training.quorum * (used + refused):
            demand = f"quorum={training.quorum:g} asks for more"
        elif training.robust and used < FEWEST_ROBUST:
            # Of fewer nobody is outvoted, whatever the quorum: the step could be a hostile client's own.
            demand = f"strategy {training.strategy} takes {FEWEST_ROBUST}"
        else:
            return
        reasons = [refusal.reason for refusal in self._refused if refusal.round == server_round]
        raise QuorumError(
            f"in round {server_round} {used} of {used + refused} clients gave an update that can be used, and "
            f"{demand}; the last one: {reasons[-1]}"
        )

    def _replies(
        self,
        server_round: int,
        messages: Sequence[Message],
        sent: Mapping[str, ArrayRecord],
        client_of: Mapping[int, int],
    ) -> Iterator[tuple[int, Message]]:
        """Yield clients and their answers as they come, after screening, the sum and the tap.

        Nothing else of the server sees them earlier. A client's first answer counts.
        """
        expected = self._aggregator.expected(sent)
        reported = (EXAMPLES,) if self._journal is None else REPORTED

        def check(node: int, reply: Message) -> str | None:
            return refusal(reply, expected, self._most_examples(client_of[node]), reported)

        number, folder = client_of.__getitem__, self._folder(server_round)
        screened = screen(messages, self._grid.send_and_receive(messages, timeout=self._patience.seconds), check)
        replies = sum_groups(messages, screened, self._scenario.pipeline.clients, number)
        tap = UploadTap(self._grid, folder, self._scenario.threat.update, rounds=server_round - 1, number=number)
        tap.record_sent(messages)
        clients = {message.metadata.message_id: client_of[message.metadata.dst_node_id] for message in messages}
        for reply in replies:
            if not reply.has_error():
                tap.record_replies([reply])
            client = clients.pop(reply.metadata.reply_to_message_id, None)
            if client is not None:
                yield client, reply
        if tap.failures:
            raise RecordError("; ".join(tap.failures))

    def _refuse(self, refused: Sequence[Refusal]) -> None:
        self._refused += refused
        for entry in refused:
            self._events.add("update refused", **entry._asdict())
        if self._refusals is not None:
            self._refusals.add(list(refused))

    def _most_examples(self, client: int) -> int:
        """Return the largest number of pictures that can be behind a client's reply."""
        scenario = self._scenario
        if scenario.training is None or scenario.training.update == "gradient":
            return scenario.threat.batch_size
        return self._run.share_sizes[client] if self._run.share_sizes else LARGEST

    @property
    def _uploads(self) -> Path | None:
        """Return the folder for uploads of single batches; None where they are not recorded."""
        return Path(self._run.uploads_folder) / self._scenario.folder if self._run.uploads_folder else None

    def _folder(self, server_round: int) -> UploadFolder | None:
        """Return the folder for the uploads of a round; None where they are not recorded."""
        training, folder = self._scenario.training, self._uploads
        if folder is None or (training is not None and server_round not in training.records):
            return None
        if training is not None:
            folder = uploads_folder(Path(self._run.uploads_folder), server_round) / self._scenario.folder
        return UploadFolder(folder, frozenset(self._run.upload_tensors))
