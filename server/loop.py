"""The server's loop over the rounds of a scenario: single batches that are recorded, or training."""

import time
from collections.abc import Mapping, Sequence
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from fedmjp.config import RunConfig
from fedmjp.errors import ConfigError, QuorumError, RecordError
from fedmjp.models.build import build
from fedmjp.models.roles import roles_of
from fedmjp.scenario import Scenario
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.wire import EXAMPLES, REPORTED, uploads_of_round
from server.aggregation import Aggregator
from server.changing import Group, WeightChanges
from server.cohort import bound_examples, too_long
from server.journal import Journal
from server.patience import START, Patience
from server.refusals import Refusal, RefusalFile
from server.roster import Roster
from server.screening import LARGEST, refusal, screen
from server.secure_sum import sum_groups
from server.tap import UploadTap
from server.uploads import UploadFolder
from server.validation import Validation

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
        scenario: Scenario,
        run: RunConfig,
        index: int = 0,
        *,
        validation: Validation | None = None,
    ) -> None:
        self._grid, self._scenario, self._run, self._index = grid, scenario, run, index
        model = build(scenario.network)
        self._weights: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
        self._changes = WeightChanges(scenario, model)
        withheld = scenario.pipeline.withheld(roles_of(model))
        self._aggregator = Aggregator(scenario, [name for name, _ in model.named_parameters()], withheld)
        training = scenario.training
        self._patience = Patience(None)
        self._refused: list[Refusal] = []
        self._done, self._journal, folder = 0, None, self._uploads
        if training is not None:
            if not run.output_folder:
                raise ConfigError("output-folder is empty; name the folder that history and weights go to")
            folder = Path(run.output_folder)
            sent = sum(value.numel() for name, value in model.named_parameters() if name not in withheld)
            measured = validation or Validation(model, scenario, training.recipe, run.classes)
            self._journal = Journal(scenario, training, TrainingFolder(folder), measured, sent)
            self._done, self._weights = self._journal.resume(self._weights, self._aggregator)
            self._patience = Patience(training.round_seconds, self._journal.seconds())
        self._roster = Roster(grid, scenario.clients)
        self._refusals = None if folder is None else RefusalFile.of_run(folder)

    def play(self) -> list[Refusal]:
        """Play the rounds that are left; what was refused in them."""
        self._roster.wait(START)
        for server_round in range(self._done + 1, self._scenario.rounds + 1):
            self._round(server_round)
            log(INFO, "[ROUND %s/%s] done", server_round, self._scenario.rounds)
        return self._refused

    def _round(self, server_round: int) -> None:
        started = time.perf_counter()
        replies, refused = self._exchange(server_round)
        self._require_quorum(server_round, len(replies), refused)
        # Updates of weights that nobody trains lead nowhere.
        self._step(server_round, [] if self._changes.in_round(server_round) else replies)
        seconds = time.perf_counter() - started
        self._patience.learn(seconds)
        if self._journal is not None:
            self._journal.write(server_round, replies, refused, seconds, self._weights)
            self._journal.keep(server_round, self._weights, self._aggregator)

    def _step(self, server_round: int, replies: Sequence[Message]) -> None:
        """Take the step that replies lead to, unless it spoils the model: then the last good weights stay."""
        stepped = self._aggregator.aggregate(server_round, self._weights, replies)
        if stepped is None:
            self._refuse([Refusal(server_round, None, OVERFLOW)])
        elif self._journal is not None and (reason := self._journal.spoilt(stepped, self._weights)):
            self._aggregator.undo()
            self._refuse([Refusal(server_round, None, reason)])
        else:
            self._weights = stepped

    def _exchange(self, server_round: int) -> tuple[list[Message], int]:
        """Send the weights to clients; their replies that can be used, and how many cannot.

        Of groups whose updates are summed, the first client stands for all.
        """
        nodes, left_out = self._roster.nodes(self._patience.seconds)
        self._refuse([Refusal(server_round, None, reason) for reason in left_out])
        sent = self._aggregator.records(self._weights)
        size, chosen = self._scenario.pipeline.clients, self._scenario.participants(server_round)
        groups = [chosen[first : first + size] for first in range(0, len(chosen), size)]
        present = [group for group in groups if all(client in nodes for client in group)]
        asked = {nodes[client]: client for group in present for client in group}
        messages = self._aggregator.messages(server_round, sent, list(asked), scenario=self._index)
        self._changes.change(server_round, self._weights, messages, [tuple(group) for group in present])
        replies = self._replies(server_round, messages, sent, asked)
        clients = {message.metadata.message_id: asked[message.metadata.dst_node_id] for message in messages}
        answers = {clients.get(reply.metadata.reply_to_message_id, -1): reply for reply in replies}
        accepted: dict[tuple[int, ...], Message] = {}
        reasons: dict[int, str] = {}
        for first, *others in groups:
            reason = self._reason(answers.get(first)) if [first, *others] in present else "is not connected"
            if reason is None:
                accepted[(first, *others)] = answers[first]
            else:
                reasons[first] = reason
        for group, reason in self._compare(server_round, accepted, sent).items():
            del accepted[group]
            reasons[group[0]] = reason
        for first, reason in reasons.items():
            log(INFO, "round %s: client %s refused: %s", server_round, first, reason)
        self._refuse([Refusal(server_round, first, reason) for first, reason in sorted(reasons.items())])
        self._changes.learn(server_round, self._weights, accepted)
        return list(accepted.values()), len(reasons)

    def _compare(
        self, server_round: int, accepted: Mapping[Group, Message], sent: Mapping[str, ArrayRecord]
    ) -> dict[Group, str]:
        """Which updates of a training round are out of all proportion to the others; these bound counts as well."""
        training = self._scenario.training
        if training is None or self._changes.in_round(server_round):
            return {}
        if training.update == "delta" and not self._run.share_sizes:
            for group, count in bound_examples(accepted).items():
                log(INFO, "round %s: client %s said %s pictures, which count less", server_round, group[0], count)
        return too_long(accepted, sent, training.max_norm)

    def _require_quorum(self, server_round: int, used: int, refused: int) -> None:
        """QuorumError where too few updates of a training round can be used: it would count for nothing."""
        training = self._scenario.training
        if training is None or used >= training.quorum * (used + refused):
            return
        reasons = [refusal.reason for refusal in self._refused if refusal.round == server_round]
        raise QuorumError(
            f"in round {server_round} {used} of {used + refused} clients gave an update that can be used, and "
            f"quorum={training.quorum:g} asks for more; the last one: {reasons[-1]}"
        )

    def _replies(
        self,
        server_round: int,
        messages: Sequence[Message],
        sent: Mapping[str, ArrayRecord],
        asked: Mapping[int, int],
    ) -> list[Message]:
        """What clients answer after screening, the sum and the tap: nothing else of the server sees it before."""
        expected = self._aggregator.expected(sent)
        reported = (EXAMPLES,) if self._journal is None else REPORTED

        def check(node: int, reply: Message) -> str | None:
            return refusal(reply, expected, self._most_examples(asked[node]), reported)

        number, folder = asked.__getitem__, self._folder(server_round)
        screened = screen(messages, self._grid.send_and_receive(messages, timeout=self._patience.seconds), check)
        replies = sum_groups(messages, screened, self._scenario.pipeline.clients, number)
        tap = UploadTap(self._grid, folder, self._scenario.threat.update, done=server_round - 1, number=number)
        tap.record_sent(messages)
        tap.record_replies(reply for reply in replies if not reply.has_error())
        if tap.failures:
            raise RecordError("; ".join(tap.failures))
        return replies

    def _reason(self, reply: Message | None) -> str | None:
        if reply is None:
            return self._patience.refusal
        return (reply.error.reason or "no reason given") if reply.has_error() else None

    def _refuse(self, refused: Sequence[Refusal]) -> None:
        self._refused += refused
        if self._refusals is not None:
            self._refusals.add(list(refused))

    def _most_examples(self, client: int) -> int:
        """How many pictures can be behind a client's reply."""
        scenario = self._scenario
        if scenario.training is None or scenario.training.update == "gradient":
            return scenario.threat.batch_size
        return self._run.share_sizes[client] if self._run.share_sizes else LARGEST

    @property
    def _uploads(self) -> Path | None:
        """Where the uploads of single batches go."""
        return Path(self._run.uploads_folder) / self._scenario.folder if self._run.uploads_folder else None

    def _folder(self, server_round: int) -> UploadFolder | None:
        """Where the uploads of a round go; None where they are not recorded."""
        training, folder = self._scenario.training, self._uploads
        if folder is None or (training is not None and server_round not in training.records):
            return None
        if training is not None:
            folder = uploads_of_round(Path(self._run.uploads_folder), server_round) / self._scenario.folder
        return UploadFolder(folder, frozenset(self._run.upload_tensors))
