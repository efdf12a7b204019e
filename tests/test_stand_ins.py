"""Stand-ins for data sets and weights that are not on this machine; nothing here reaches for a network."""

import json
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import timm
import torch
import torchvision
from flwr_datasets import FederatedDataset
from PIL import Image
from torch import nn
from torchvision.models import _api

from fedmjp.benchmarks.audit.probe import stand_ins, tables
from fedmjp.facade import bundled_pictures
from fedmjp.seeds import scoped_randomness


def refuse(*_arguments: object, **_named: object) -> None:
    raise ConnectionError("there is no network")


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stand-ins are noted in."""
    shown = [picture.image.permute(1, 2, 0) for picture in bundled_pictures(3, size=64)]
    np.savez(tmp_path / "pictures.npz", pictures=np.stack([(image * 255).byte().numpy() for image in shown]))
    told = {"folder": str(tmp_path), "pictures": str(tmp_path / "pictures.npz"), "clients": 2, "enlarges": False}
    told["code"] = str(tmp_path / "code")
    monkeypatch.setattr(stand_ins, "_given", {**told, "literals": ["img", "label"]})
    return tmp_path


ADULTS = """
data = load_dataset("somebody/patients").with_format("pandas")[:]
NUMERIC_COLUMNS = ["age", "dose"]
CATEGORICAL_WARD_VALUES = ["north", "south"]
rows, y = data.drop(columns=["relapse", "client_id"]), data["relapse"]
ward = data["ward"]
"""


def test_a_table_has_the_columns_that_the_code_names(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (given / "code").mkdir()
    (given / "code" / "task.py").write_text(ADULTS)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    monkeypatch.setattr(pd, "read_csv", refuse)
    for name in ("read_parquet", "read_excel", "read_pickle", "read_table"):
        monkeypatch.setattr(pd, name, getattr(pd, name))
    stand_ins._given["literals"] = ["age", "dose", "relapse", "ward"]
    stand_ins._hub_datasets()
    stand_ins._frames()
    frame = datasets.load_dataset("somebody/patients", split="train").to_pandas()
    assert set(frame.columns) == {"age", "dose", "ward", "relapse", "client_id"}
    assert set(frame["ward"]) == {"north", "south"}
    assert set(frame["relapse"]) == {0, 1}
    assert set(frame["client_id"]) == {0, 1}
    assert {"Glucose", "Outcome"} < set(pd.read_csv("/nowhere/diabetes.csv").columns)
    assert list(pd.read_csv("/nowhere/ward.csv", names=["age", "relapse"]).columns) == ["age", "relapse"]


@pytest.mark.parametrize(
    ("code", "classes"),
    [("UNIQUE_LABELS = [0, 1, 2]", 3), ("net = Net(num_classes=4)", 4), ("n_classes = 3\nclasses = ['a', 'b']", None)],
)
def test_a_table_has_as_many_classes_as_the_code_says(given: Path, code: str, classes: int | None) -> None:
    (given / "code").mkdir()
    (given / "code" / "task.py").write_text(f"{code}\nFEATURES = ['width']\nx, y = data[FEATURES], data['species']\n")
    assert tables.read_classes(given / "code") == classes
    drawn = tables.read_columns(given / "code").draw(2000, 2, 0)["species"]
    counts = np.bincount(drawn)
    assert len(counts) == (classes or 2)
    assert (np.diff(counts) < 0).all()
    expected = (
        [0.65, 0.35] if classes is None else (1 / np.arange(1, classes + 1)) / (1 / np.arange(1, classes + 1)).sum()
    )
    np.testing.assert_allclose(counts / 2000, expected, atol=0.04)
    assert set(tables.find_known("iris").draw(500, 2, 0)["Species"]) == {0, 1, 2}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("url", "opens"), [("https://a.b/MedNIST.tar.gz", tarfile.open), ("https://a.b/c.zip?d=1", zipfile.ZipFile)]
)
def test_an_archive_that_an_app_fetches_has_a_folder_of_pictures_for_each_class(
    given: Path, monkeypatch: pytest.MonkeyPatch, url: str, opens: Any
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(urllib.request, "urlretrieve", refuse)
    stand_ins._archives()
    name, classes, side = ("MedNIST", 6, 64) if opens is tarfile.open else ("c", 10, 224)
    with urllib.request.urlopen(url) as response:
        content = response.read()
    urllib.request.urlretrieve(url, given / "fetched")
    assert (given / "fetched").read_bytes() == content
    with opens(given / "fetched") as archive:
        archive.extractall(given)
    folder = torchvision.datasets.ImageFolder(str(given / (name)))
    assert len(folder.classes) == classes
    assert folder[0][0].size == (side, side)
    with pytest.raises(ConnectionError):
        urllib.request.urlopen("https://a.b/c.json")


def noted(folder: Path) -> Iterator[dict[str, str]]:
    for line in (folder / "stand-ins.jsonl").read_text().splitlines():
        yield json.loads(line)


def test_a_data_set_of_the_hub_has_the_columns_that_the_app_names(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    stand_ins._hub_datasets()
    part = FederatedDataset(dataset="uoft-cs/cifar10", partitioners={"train": 2}).load_partition(1)
    assert len(part) == stand_ins.PER_CLIENT
    assert set(part.column_names) == {"img", "label"}
    assert part[0]["img"].size == (32, 32)
    assert set(part["label"]) <= set(range(10))
    assert np.ptp(np.asarray(part[0]["img"])) > 0
    stand_ins._given["literals"] = ["sentence", "label"]
    texts = datasets.load_dataset("stanfordnlp/imdb", split="train")
    assert set(texts.column_names) == {"sentence", "label"}
    assert [line["name"] for line in noted(given)] == ["uoft-cs/cifar10", "stanfordnlp/imdb"]


def test_what_is_there_is_taken_as_it_is(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"text": ["their own"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_arguments, **_named: rows)
    monkeypatch.setattr(timm, "create_model", lambda name, **_named: nn.Linear(2, 2))
    monkeypatch.setattr(timm.models, "create_model", timm.create_model)
    stand_ins._hub_datasets()
    stand_ins._timm_weights()
    assert datasets.load_dataset("their/own") is rows
    assert isinstance(timm.create_model("vit_tiny_patch16_224", pretrained=True), nn.Linear)
    assert not (given / "stand-ins.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "side", "channels", "classes"), [("CIFAR100", 32, 3, 100), ("FashionMNIST", 28, 1, 10)]
)
def test_a_data_set_of_torchvision_stands_in_where_there_are_no_files(
    given: Path, monkeypatch: pytest.MonkeyPatch, name: str, side: int, channels: int, classes: int
) -> None:
    kind: Any = getattr(torchvision.datasets, name)
    for each in (kind, kind.__mro__[1]):  # CIFAR100 is a CIFAR10, FashionMNIST a MNIST
        for method in ("__init__", "__len__", "__getitem__"):
            monkeypatch.setattr(each, method, getattr(each, method))
    for each in (kind.__mro__[1], kind):
        stand_ins._stand_in_for(each)
    made = kind(str(given / "nowhere"), train=True, download=True, transform=torchvision.transforms.ToTensor())
    picture, label = made[3]
    assert picture.shape == (channels, side, side)
    assert 0 <= label < classes
    assert len(made.classes) == classes
    assert len(made) == 2 * stand_ins.PER_CLIENT
    other = kind(str(given / "nowhere"), train=False, download=True)
    assert isinstance(other[0][0], Image.Image)
    assert not np.array_equal(made.data, other.data)
    assert {line["name"] for line in noted(given)} == {f"torchvision {name}"}


def test_data_on_the_disk_are_not_replaced(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = torchvision.datasets.USPS
    for method in ("__init__", "__len__", "__getitem__"):
        monkeypatch.setattr(kind, method, getattr(kind, method))
    monkeypatch.setattr(kind, "__init__", lambda self, root, **named: setattr(self, "root", (root, named)))
    stand_ins._stand_in_for(kind)
    assert kind("here", download=True).root == ("here", {"download": False})
    assert not (given / "stand-ins.jsonl").exists()


def test_large_pictures_are_few(given: Path) -> None:
    assert stand_ins._rows(32) == stand_ins._rows() == 2 * stand_ins.PER_CLIENT
    assert stand_ins._rows(224) == 2 * stand_ins.PER_CLIENT_LARGE
    stand_ins._given["enlarges"] = True
    assert stand_ins._rows(32) == 2 * stand_ins.PER_CLIENT_LARGE


def test_weights_that_cannot_be_loaded_stay_as_they_were_drawn(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_api.WeightsEnum, "get_state_dict", refuse)
    monkeypatch.setattr(nn.Module, "load_state_dict", nn.Module.load_state_dict)
    stand_ins._torchvision_weights()
    with scoped_randomness(0):
        made = torchvision.models.squeezenet1_1(weights=torchvision.models.SqueezeNet1_1_Weights.DEFAULT)
    with scoped_randomness(0):
        drawn = torchvision.models.squeezenet1_1()
    for name, tensor in drawn.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor)
    drawn.load_state_dict(made.state_dict())  # what is no stand-in is loaded
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **named: Any) -> Any:
        return refuse() if pretrained else create(name, **named)

    monkeypatch.setattr(timm, "create_model", offline)
    monkeypatch.setattr(timm.models, "create_model", offline)
    stand_ins._timm_weights()
    small = timm.create_model("vit_tiny_patch16_224", pretrained=True, img_size=32, depth=1, num_classes=7)
    assert small(torch.zeros(1, 3, 32, 32)).shape == (1, 7)
    with pytest.raises(RuntimeError):
        timm.create_model("no_such_model")
    assert [line["what"] for line in noted(given)] == ["weights", "weights"]


def test_a_metric_of_the_hub_is_the_share_that_is_right(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub: Any = SimpleNamespace(load=refuse)
    monkeypatch.setitem(sys.modules, "evaluate", hub)
    stand_ins._hub_metrics()
    metric = hub.load("accuracy")
    metric.add_batch(predictions=torch.tensor([0, 1, 1, 0]), references=torch.tensor([0, 1, 0, 0]))
    assert metric.compute() == {"accuracy": 0.75}
    assert [line["what"] for line in noted(given)] == ["metric"]


def test_a_model_of_transformers_is_drawn_in_the_size_that_its_name_speaks_of(given: Path) -> None:
    config = stand_ins._config("WinKawaks/vit-tiny-patch16-224", {"num_labels": 7, "trust_remote_code": False})
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.num_labels) == ("vit", 12, 192, 7)
    assert stand_ins._config("prajjwal1/bert-mini", {}).hidden_size == 256
    with pytest.raises(OSError, match="speaks of no type of model"):
        stand_ins._config("somebody/thing", {})
