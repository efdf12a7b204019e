"""Sites: what they allow, who they are, what they tell of a model, and how pictures are dealt to them."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import MetricRecord
from PIL import Image
from sklearn.metrics import accuracy_score, log_loss

from fedmjp.benchmarks.deployment.creating import create
from fedmjp.benchmarks.deployment.dealing import deal_to_sites
from fedmjp.benchmarks.deployment.layout import DeploymentConfig
from fedmjp.benchmarks.deployment.training import at_sites, class_list, node_keys
from fedmjp.clients.consent import Consent
from fedmjp.config import Checkpoint, RunConfig
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import evaluation_batches
from fedmjp.data.pictures import LabelledDataset
from fedmjp.errors import ConfigError, DataError, FederationError, OutputError
from fedmjp.learning import PartitionConfig, Recipe
from fedmjp.models.build import build
from fedmjp.scenario import TrainingScenario, make_run_config
from fedmjp.server.loop import Federation
from fedmjp.server.roster import Roster, key_of
from fedmjp.server.site_validation import combine_accuracies
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.wire import CORRECT, EXAMPLES, LOSS, UNDECIDED
from tests.federations import PLAIN, InProcess, pictures, scenario_of

CLASSES = [f"class-{label}" for label in range(4)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with 40 training and 20 validation pictures in four classes."""
    root, generator = tmp_path_factory.mktemp("source"), np.random.default_rng(0)
    for split, count in (("train", 40), ("validation", 20)):
        for number in range(count):
            path = root / split / CLASSES[number % 4] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return root


def train(scenario: TrainingScenario, root: Path, own: Mapping[int, str]) -> TrainingFolder:
    folder = TrainingFolder(root)
    folder.root.mkdir(exist_ok=True)
    grid = InProcess(scenario, folder, own=own)
    Federation(grid, scenario, grid.run).play()  # type: ignore[arg-type]
    return folder


def test_sites_measure_top1_on_their_own_pictures_and_the_server_opens_none(source: Path, tmp_path: Path) -> None:
    dealt = deal_to_sites(str(source), tmp_path / "dealt", ["a", "b"], PartitionConfig.parse({"scheme": "iid"}), 0)
    folders = [tmp_path / "dealt" / each.site for each in dealt]
    scenario = scenario_of(rounds=1, validation="sites", data=str(tmp_path / "there is no such folder"))
    run = train(scenario, tmp_path / "run", dict(enumerate(map(str, folders))))
    (row,) = pd.read_csv(run.history).to_dict("records")
    model = build(scenario.network.model_copy(update={"weights": Checkpoint.of(run.weights)})).eval()
    right, losses, share = [], [], Recipe.parse(PLAIN).crop_share
    for folder in folders:
        own = open_dataset(str(folder), "validation", classes=4)
        (batch,) = evaluation_batches(own, np.arange(len(own)), share, size=64, batch_size=99)
        with torch.no_grad():
            logits = model(batch.images).double()
        right.append(accuracy_score(batch.labels, logits.argmax(1), normalize=False))
        losses.append(log_loss(batch.labels, logits.softmax(1), labels=range(4)))
    assert row["validation_pictures"] == 20
    assert row["top1"] == pytest.approx(sum(right) / 20)
    assert row["validation_loss"] == pytest.approx(min(losses), rel=1e-5)


def test_pictures_that_are_trained_on_measure_nothing(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=1, validation="sites")
    with pytest.raises(FederationError, match=r"no site can measure Top-1 .* has one set of pictures alone"):
        train(scenario, tmp_path, {0: pictures(), 1: pictures()})


def told(correct: float, examples: float, loss: float) -> MetricRecord:
    return MetricRecord({CORRECT: correct, EXAMPLES: examples, UNDECIDED: 0, LOSS: loss})


def test_one_site_that_lies_counts_little() -> None:
    honest = {1: told(30, 100, 2.0), 2: told(50, 100, 1.8)}
    assert combine_accuracies(dict(honest)).top1 == 0.4
    lied = combine_accuracies({**honest, 3: told(2**31, 2**31, 1e9)})
    assert (lied.total, lied.correct, lied.loss) == (500, 380, 2.0)


@pytest.mark.parametrize(
    ("node", "named", "own"),
    [
        ({"data": "/site"}, "/server/says", "/site"),
        ({"reads": "/shared"}, "/shared/pictures", None),
        ({}, "bundled", None),
    ],
)
def test_a_node_reads_what_its_config_says(node: dict[str, str], named: str, own: str | None) -> None:
    assert Consent.of(node, named, "") == (own, None)


@pytest.mark.parametrize(
    ("node", "private", "reason"),
    [
        ({}, "", r"names pictures on this machine, /etc, .* data=FOLDER .* or reads=FOLDER"),
        ({"reads": "/et"}, "", "names pictures on this machine"),
        ({"reads": "/etc/../home"}, "", "names pictures on this machine"),
        ({"data": "/site"}, "/left", r"private pictures to be left in /left, .* leaves=FOLDER"),
        ({"data": "/site", "leaves": "/other"}, "/other/../left", "private pictures to be left"),
    ],
)
def test_a_node_allows_nothing_else(node: dict[str, str], private: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Consent.of(node, "/etc", private)


def test_a_node_may_allow_private_pictures_to_be_left() -> None:
    assert Consent.of({"data": "/site", "leaves": "/left"}, "x", "/left/run").private == Path("/left/run")


class Keyed:
    """A Grid of nodes with keys."""

    def __init__(self, **keys: bytes) -> None:
        self.infos = [SimpleNamespace(node_id=int(name[1:]), public_key=key) for name, key in keys.items()]

    def get_nodes(self) -> list[Any]:
        return self.infos

    def get_node_ids(self) -> list[int]:
        return [info.node_id for info in self.infos]


def test_a_node_is_the_site_whose_key_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmjp.server.roster.POLL_SECONDS", 0.0)
    grid = Keyed(n7=b"south", n8=b"stranger", n9=b"north")
    roster = Roster(grid, 2, [key_of(b"north"), key_of(b"south")])  # type: ignore[arg-type]
    roster.wait(0.0)
    assert roster.nodes(1.0) == ({0: 9, 1: 7}, ["node 8 has a key that is none of this run's sites"])
    grid.infos = grid.infos[:1]
    assert roster.nodes(1.0) == ({1: 7}, [])
    roster.wait(0.0, 1)  # the other one may come late
    with pytest.raises(FederationError, match="1 of 2 clients came"):
        roster.wait(0.0)


def test_a_deployments_keys_are_in_its_runs(tmp_path: Path) -> None:
    config = DeploymentConfig.parse({"sites": ["north", "south"], "state": str(tmp_path / "state")})
    keys = node_keys(create(tmp_path / "hospital", config))
    assert len({*keys}) == 2
    assert RunConfig.read(make_run_config([scenario_of()], node_keys=keys).flat()).node_keys == keys


def pixels_of(*datasets: LabelledDataset) -> list[bytes]:
    return sorted(np.asarray(one.decode(index)).tobytes() for one in datasets for index in range(len(one)))


def test_a_data_set_is_dealt_once_and_validation_like_training(source: Path, tmp_path: Path) -> None:
    sites, config = ["a", "b", "c"], PartitionConfig.parse({"scheme": "dirichlet", "alpha": 0.5})
    dealt = deal_to_sites(str(source), tmp_path / "dealt", sites, config, 1)
    assert dealt == deal_to_sites(str(source), tmp_path / "again", sites, config, 1)
    assert (sum(each.training for each in dealt), sum(each.validation for each in dealt)) == (40, 20)
    counts = {}
    for split in ("train", "validation"):
        opened = [open_dataset(str(tmp_path / "dealt" / site), split, classes=4) for site in sites]
        counts[split] = np.array([np.bincount(own.labels, minlength=4) for own in opened])
        assert pixels_of(*opened) == pixels_of(open_dataset(str(source), split, classes=4))
    assert np.abs(counts["train"] / 2 - counts["validation"]).max() <= 1
    with pytest.raises(OutputError, match="is not empty"):
        deal_to_sites(str(source), tmp_path / "dealt", sites, config, 1)
    shutil.rmtree(tmp_path / "again")
    with pytest.raises(DataError, match="one set of pictures alone"):
        deal_to_sites(pictures(), tmp_path / "again", sites, config, 1)


@pytest.mark.parametrize("text", ["benign", "benign,benign", "benign,", ","])
def test_classes_are_named_each_once(text: str) -> None:
    with pytest.raises(ConfigError, match="expected two or more names"):
        class_list(text)
    assert class_list("benign, malignant") == ["benign", "malignant"]


def test_sites_that_evaluate_need_to_know_the_classes() -> None:
    with pytest.raises(ConfigError, match="--classes benign,malignant"):
        at_sites(scenario_of(validation="sites"), 2)
    with pytest.raises(ConfigError, match=r"model\.classes=4, but --classes names 2"):
        at_sites(scenario_of(validation="sites"), 2, ["a", "b"])
    assert at_sites(scenario_of(validation="sites"), 2, CLASSES).training is not None
