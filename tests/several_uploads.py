"""An attack that looks at what it is given, and recordings of several uploads per picture."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import Attack
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.clients.app import train
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.scenario import Scenario, make_run_config
from fedmjp.threat import ThreatModel
from fedmjp.wire import ARRAYS


class Witness(Attack):
    """Grey pictures, and how many uploads with how many masks it was given."""

    name = "witness"
    paper = "none"
    summary = "a test of several uploads"
    requires = "nothing"
    exploits = "nothing"
    reads_others = True

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        return [names.POSITION_EMBEDDING]

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        return None

    def reconstruct_stack(
        self,
        uploads: Sequence[Upload],
        model: VitClassifier,
        threat: ThreatModel,
        *,
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        found = []
        for upload, generator in zip(uploads, generators, strict=True):
            given = [upload, *upload.others]
            assert all(each.tensors.keys() == {names.POSITION_EMBEDDING} for each in given)
            assert all(each.node == upload.node for each in given)
            masks = {tuple((each.tensors[names.POSITION_EMBEDDING][0] == 0).all(1).tolist()) for each in given}
            told = {"uploads": len(given), "masks": len(masks), "weights": len({each.weights for each in given})}
            shape = (upload.num_examples, 3, model.image_size, model.image_size)
            found.append(Reconstruction(torch.full(shape, 0.5), {**told, "seed": generator.initial_seed() % 2**31}))
        return found


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name that it can be run by."""
    for targets in (ATTACKS._own, ATTACKS._targets):
        monkeypatch.setitem(targets, Witness.name, f"{__name__}:Witness")
    return Witness.name


_initial = cache(build_vit)


def reply(scenario: Scenario, client: int, server_round: int, evaluator: str = "") -> dict[str, torch.Tensor]:
    """What the real client app sends at the initial weights."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    content = RecordDict(
        {
            ARRAYS: ArrayRecord(_initial(scenario.network).state_dict()),
            "config": ConfigRecord({"server-round": server_round, "scenario": 0}),
        }
    )
    message = Message(content=content, message_type=MessageType.TRAIN, dst_node_id=client)
    message.metadata.__dict__["_message_id"] = "message"
    context: Any = SimpleNamespace(
        run_config=make_run_config([scenario], evaluator_folder=evaluator).flat(),
        node_config={"partition-id": client, "num-partitions": scenario.clients, "reads": "/", "leaves": "/"},
        node_id=client,
    )
    arrays: Any = train(message, context).content[ARRAYS]
    return dict(arrays.to_torch_state_dict())


def record(scenario: Scenario, folder: RunFolder) -> None:
    """Every round, from the real clients; the weights stay."""
    kept = folder.upload_folder(scenario.folder)
    weights = kept.keep_weights(_initial(scenario.network).state_dict())
    for server_round in range(1, scenario.rounds + 1):
        for client in range(scenario.clients):
            sent = reply(scenario, client, server_round, str(folder.evaluator))
            kept.keep(Upload(sent, scenario.update, scenario.batch_size, server_round, client, weights))


def write_manifest(scenario: Scenario, root: Path, pictures: dict[str, str]) -> None:
    """As `fedmjp record` leaves it."""
    from fedmjp.benchmarks.folder.output import write_json

    about = {"scenarios": [scenario.model_dump(mode="json")], "pictures": pictures}
    write_json(root / "manifest.json", about)
