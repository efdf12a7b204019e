"""Messages with weights of the server's own making, where a scenario says so: for measuring one's own deployment."""

from collections.abc import Mapping, Sequence
from typing import cast

from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor

from fedmjp.models.classifier import Classifier, VitClassifier
from fedmjp.records import Upload
from fedmjp.scenario import AnyScenario, TrainingScenario
from fedmjp.server.shelf import StoredUpdate
from fedmjp.threat import Modification
from fedmjp.wire import ARRAYS, EXAMPLES

Group = tuple[int, ...]  # clients whose updates the server sees as one, in their order


class WeightChanges:
    """The changes that a scenario's server makes to the weights of a round; an honest server makes none.

    In a training run it acts in the rounds that are recorded. What it learns from probes, it keeps.

    Raises:
        ConfigError: If the server cannot be played in this scenario.
    """

    def __init__(self, scenario: AnyScenario, model: Classifier) -> None:
        self._scenario = scenario
        self._server: Modification | None = None
        self._findings: dict[tuple[Group, int], object] = {}
        if scenario.server is None:
            return
        scenario.require_server(model)
        self._model, self._server = cast(VitClassifier, model), scenario.server.build()

    def in_round(self, server_round: int) -> bool:
        """Tell whether the weights of a round are changed.

        Args:
            server_round: Number of the round, from 1.
        """
        if self._server is None:
            return False
        training = self._scenario.training
        return training is None or server_round in training.records

    def change(
        self, server_round: int, weights: Mapping[str, Tensor], messages: Sequence[Message], groups: Sequence[Group]
    ) -> None:
        """Replace the honest weights in the messages of a round by changed ones.

        Args:
            server_round: Number of the round, from 1.
            weights: The honest state by name.
            messages: Those of the round, a message per client.
            groups: The clients in the order of the messages.
        """
        if self._server is None or not self.in_round(server_round):
            return
        self._model.load_state_dict(weights)
        waiting = iter(messages)
        for group in groups:
            records: dict[int, ArrayRecord] = {}  # clients that get the same share it
            for changed, _ in zip(self._weights(group, server_round), group, strict=True):
                message = next(waiting)
                if id(changed) not in records:
                    sent = message.content.array_records[ARRAYS].to_torch_state_dict()
                    records[id(changed)] = ArrayRecord({**sent, **changed})
                message.content = RecordDict({**message.content, ARRAYS: records[id(changed)]})

    def learn(self, server_round: int, weights: Mapping[str, Tensor], answers: Mapping[Group, StoredUpdate]) -> None:
        """Read the answers to a probe.

        Args:
            server_round: Number of the round, from 1; others than probing rounds are passed over.
            weights: The honest state by name.
            answers: Updates by group.
        """
        if self._server is None or not self._probes(server_round):
            return
        self._model.load_state_dict(weights)
        for group, answer in answers.items():
            upload = Upload(
                tensors=answer.tensors(),
                kind=self._scenario.step.update,
                num_examples=int(float(str(answer.metrics[EXAMPLES]))),
                server_round=server_round,
                node=group[0],
                weights="",
            )
            key = (group, self._batch(server_round))
            self._findings[key] = self._server.learn(upload, self._model, self._scenario.threat)

    def _weights(self, group: Group, server_round: int) -> Sequence[Mapping[str, Tensor]]:
        if self._server is None:
            return ()
        if self._probes(server_round):
            return [self._server.probe(self._model, self._scenario.threat)] * len(group)
        findings = self._findings.get((group, self._batch(server_round)))
        return self._server.weights(self._model, self._scenario.threat, findings)

    def _probes(self, server_round: int) -> bool:
        scenario = self._scenario
        return not isinstance(scenario, TrainingScenario) and scenario.turn(server_round).number < scenario.probes

    def _batch(self, server_round: int) -> int:
        """Return the index of the batch that a client shows; -1 in training, where nobody knows it."""
        return -1 if isinstance(self._scenario, TrainingScenario) else self._scenario.turn(server_round).batch
