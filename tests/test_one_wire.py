"""Direct mode, Flower's clients and training make the same uploads, to the last bit, whoever defends or cheats."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedmjp.benchmarks.federation.round_records import describe_records
from fedmjp.benchmarks.federation.simulation import RunFolder, simulate
from fedmjp.benchmarks.uploads.recorded import Recording
from fedmjp.data.selection import select_for
from fedmjp.defences import DEFENCES
from fedmjp.defences.base import Arranged
from fedmjp.errors import FederationError
from fedmjp.exchange import protect_trained
from fedmjp.models.build import build_vit
from fedmjp.private import PrivateBatch
from fedmjp.randomness import SeededRandomness
from fedmjp.records import Upload, record_name
from fedmjp.scenario import Scenario
from fedmjp.server.refusals import RefusalFile
from fedmjp.tensors import average_updates
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.updates import local_update
from fedmjp.wire import evaluator_folder, uploads_folder
from tests.federations import MICRO, PLAIN, play, scenario_of

OPTIONS = {"secure_sum": ["secure_sum:clients=2"]}
PIPELINES = [
    ["none"],
    *(OPTIONS.get(name, [name]) for name in DEFENCES),
    ["mjp:mask_ratio=0.4", "round:precision=bfloat16"],
    ["dp_sgd", "quantise"],
    ["local_dp", "secure_sum:clients=2"],
    ["pixels", "withhold:roles=head"],
]
SCENARIOS = [
    Scenario.parse(
        {"model": MICRO | {"classes": 1000}, "defences": each, "clients": 2, "pictures_per_client": 2, "batch_size": 2}
    )
    for each in PIPELINES
]
# Flower's clients have the same loss, draw the same crops and mix the same pairs.
SCENARIOS[0] = SCENARIOS[0].model_copy(update={"label_smoothing": 0.2, "mixup": 0.5, "crop_scale": 0.3})
MALICIOUS = [
    Scenario.parse({**SCENARIOS[1].model_dump(), "defences": defences, "server": server})
    for server, defences in (("class_fishing", "mjp"), ("suppression", "secure_sum:clients=2"))
]
IDS = ["+".join(each) for each in PIPELINES]
LOST = Scenario.parse(
    {"model": MICRO | {"name": "deit_tiny"}, "data": "/nowhere", "clients": 2, "pictures_per_client": 2}
)


@dataclass(frozen=True)
class Played:
    """One run of Flower: its records, and what it failed of."""

    folder: RunFolder
    error: FederationError


def same(one: Upload, other: Upload) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    different = [name for name, tensor in one.tensors.items() if not torch.equal(tensor, other.tensors[name])]
    assert different == []


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """All scenarios, played by Flower in one run, after one whose clients fail."""
    folder = RunFolder(tmp_path_factory.mktemp("federated"))
    with pytest.raises(FederationError) as raised:
        simulate([LOST, *SCENARIOS, *MALICIOUS], folder)
    return Played(folder, raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*SCENARIOS, *MALICIOUS], ids=[*IDS, "class_fishing", "suppression"])
def test_flowers_clients_upload_what_direct_mode_computes(federated: Played, scenario: Scenario) -> None:
    selection = select_for(scenario)
    found = federated.folder.index(scenario)
    batches = selection.batches(scenario)
    assert set(found) == {tuple(entry.name for entry in batch) for batch in batches}
    for batch in batches:
        exchange = scenario.exchange([selection.load(entry) for entry in batch])
        *probes, path = found[tuple(entry.name for entry in batch)]
        assert len(probes) == scenario.probes
        private, upload = federated.folder.record(scenario, path)
        same(exchange.upload, upload)
        assert torch.equal(exchange.private.clean, private.clean)
        assert torch.equal(exchange.private.shuffled, private.shuffled)
        assert torch.equal(exchange.private.mask, private.mask)
        assert upload.num_examples == len(batch) == exchange.upload.num_examples
        assert upload.weights == exchange.upload.weights


@pytest.mark.slow
def test_a_failing_client_fails_the_run_with_the_clients_error_after_the_other_scenarios(federated: Played) -> None:
    assert "there is no folder /nowhere" in str(federated.error)
    refused = RefusalFile.of_run(federated.folder.uploads / LOST.folder).read()
    assert [(refusal.round, refusal.client) for refusal in refused] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all("there is no folder" in refusal.reason for refusal in refused)


@pytest.mark.parametrize("defences", PIPELINES, ids=IDS)
def test_a_step_of_training_uploads_what_direct_mode_computes(tmp_path: Path, defences: Sequence[str]) -> None:
    recipe = PLAIN | {"label_smoothing": 0.1, "drop_path": 0}
    asked = scenario_of(
        defences=defences, recipe=recipe, strategy="fedsgd", rounds=2, records=(1,), server_learning_rate=0.1
    )
    _, grid = play(asked, tmp_path)
    (scenario,) = grid.scenarios
    records = TrainingFolder(tmp_path).records
    model, together = build_vit(scenario.network), scenario.pipeline.clients
    made = []
    for client in range(2):
        name = record_name(1, client)
        private = PrivateBatch.load(evaluator_folder(records, 1) / scenario.folder / name)
        step = SeededRandomness(scenario.seed, ("training", "client", client, 0, 0))
        update = local_update(model, private, scenario.threat, randomness=step)
        leaving = SeededRandomness(scenario.seed, ("defences", "client", client, 1))
        entered = Arranged(private.version(private.gradient_of), private.mask, private.source)
        options = {"examples": len(private.pictures), "arranged": [entered], "randomness": leaving}
        made.append(protect_trained(update, model, scenario.threat, **options))
    for first in range(0, 2, together):
        upload = Upload.load(uploads_folder(records, 1) / scenario.folder / record_name(1, first))
        expected = average_updates(made[first : first + together])
        same(Upload(expected, "gradient", 2 * together, 1, first, upload.weights), upload)
        assert upload.num_examples == 2 * together
    (folder,) = describe_records(scenario, records, (4, 4))
    (described,) = Recording.open(folder.root).scenarios
    assert described.defences == scenario.defences
    assert len(folder.index(described)) == 2 // together, "the records are found again"
