"""Labelled data sets: every layout gives the pictures and labels that were put in, and damage is named."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from fedmjp.data.datasets import CROPS, open_dataset
from fedmjp.data.pictures import to_image
from fedmjp.data.selection import open_source, select
from fedmjp.errors import DataError

TINY_IMAGENET = Path(__file__).parents[2] / "shared" / "data" / "tiny-imagenet-32"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def coloured(number: int) -> Image.Image:
    return Image.new("RGB", (12, 10), (number, 2 * number, 3 * number))


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def write_folder(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        coloured(number).save(folder / name)


def write_parquet(path: Path, images: list[bytes], labels: list[int | None] | list[str], **columns: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = pa.array(
        [{"bytes": each, "path": None} for each in images], pa.struct({"bytes": "binary", "path": "string"})
    )
    names = {"image": "image", "label": "label"} | columns
    pyarrow.parquet.write_table(pa.table({names["image"]: encoded, names["label"]: pa.array(labels)}), path)


def first_red(picture: Image.Image) -> int:
    return int(np.asarray(picture)[0, 0, 0])


def test_an_image_folder_has_the_names_labels_and_pixels_of_the_campaigns_source(tmp_path: Path) -> None:
    write_folder(tmp_path, ["b/2.png", "a/1.png", "b-b/3.png", "a/0.png"])
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    (tmp_path / "empty").mkdir()
    source = open_source(str(tmp_path), size=8, classes=3)
    for split in ("train", "validation"):
        dataset = open_dataset(str(tmp_path), split, classes=3)
        assert sorted(dataset.keys) == sorted(source.names())
        assert dataset.class_names == ("a", "b", "b-b")
        for index in range(len(dataset)):
            expected = source.load(dataset.key(index))
            assert dataset.labels[index] == expected.label
            assert torch.equal(to_image(dataset.photograph(index), 8), expected.image)


def test_a_label_means_the_same_in_both_splits_even_where_a_class_is_missing(tmp_path: Path) -> None:
    write_folder(tmp_path, ["train/a/0.png", "train/b/1.png", "train/c/2.png", "val/b/3.png", "val/c/4.png"])
    train, validation = (open_dataset(str(tmp_path), split, classes=3) for split in ("train", "validation"))
    assert train.class_names == validation.class_names == ("a", "b", "c")
    assert train.labels.tolist() == [0, 1, 2]
    assert (list(validation.keys), validation.labels.tolist()) == (["val/b/3.png", "val/c/4.png"], [1, 2])
    assert [first_red(validation.photograph(index)) for index in range(2)] == [3, 4]


LEFT_BY_SYSTEMS = [".ipynb_checkpoints/a-checkpoint.png", "@eaDir/t.jpg", "__MACOSX/cat/a.png", "cat/._a.png",
                   "cat/@eaDir/a.png", "dog/.thumbs/b.png", "lost+found/x.png", "$RECYCLE.BIN/y.png"]  # fmt: skip


@pytest.mark.parametrize("split", ["", "train/"])
def test_what_systems_leave_beside_pictures_shifts_no_label(tmp_path: Path, split: str) -> None:
    """Torchvision reads the same classes where nothing of it lies about, folders inside of classes included."""
    pictures = ["cat/a.png", "dog/b.png", "dog/2020/c.png", "owl/images/d.png"]
    write_folder(tmp_path / "clean", pictures)
    write_folder(tmp_path / "used", [split + name for name in (*pictures, *LEFT_BY_SYSTEMS)])
    clean = ImageFolder(str(tmp_path / "clean"))
    expected = {Path(name).relative_to(tmp_path / "clean").as_posix(): label for name, label in clean.samples}
    dataset = open_dataset(str(tmp_path / "used"), "train", classes=3)
    keys = [key.removeprefix(split) for key in dataset.keys]
    assert dict(zip(keys, dataset.labels.tolist(), strict=True)) == expected
    assert list(dataset.class_names) == clean.classes
    assert first_red(dataset.photograph(keys.index("dog/2020/c.png"))) == pictures.index("dog/2020/c.png")


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, ["train/a/0.png"])
    with pytest.raises(DataError, match="has no folder val or validation, only train"):
        open_dataset(str(tmp_path), "validation", classes=3)
    write_parquet(tmp_path / "p" / "train.parquet", [png(coloured(1))], [0])
    with pytest.raises(DataError, match=r"has no validation\.parquet"):
        open_dataset(str(tmp_path / "p"), "validation", classes=3)


def test_a_class_folder_may_be_called_train(tmp_path: Path) -> None:
    write_folder(tmp_path, ["car/0.png", "train/1.png", "train/.ipynb_checkpoints/1-checkpoint.png"])
    assert open_dataset(str(tmp_path), "validation", classes=2).class_names == ("car", "train")


@pytest.mark.parametrize(
    "names", [["train.parquet"], ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]]
)
def test_parquet_files_give_the_pictures_in_their_order(tmp_path: Path, names: list[str]) -> None:
    for shard, name in enumerate(names):
        write_parquet(tmp_path / name, [png(coloured(3 * shard + each)) for each in range(3)], [2, 0, 1])
    dataset = open_dataset(str(tmp_path), "train", classes=3)
    assert dataset.labels.tolist() == [2, 0, 1] * len(names)
    assert [first_red(dataset.photograph(index)) for index in range(len(dataset))] == list(range(3 * len(names)))
    assert [dataset.key(index) for index in (0, -1)] == ["train/00000", f"train/{len(dataset) - 1:05d}"]
    assert dataset.class_names == ("0", "1", "2")


def test_bundled_pictures_are_those_of_the_campaigns() -> None:
    dataset, source = open_dataset("bundled", "train", classes=1000), open_source("bundled", size=32, classes=1000)
    assert tuple(dataset.keys) == tuple(CROPS)
    for index, name in enumerate(dataset.keys):
        assert torch.equal(to_image(dataset.photograph(index), 32, crop_share=1.0), source.load(name).image)
        assert dataset.labels[index] == CROPS[name].label
    assert dataset.class_names[281] == "n02123045", "tabby"


def test_photographs_of_every_mode_are_rgb_and_small_ones_are_decoded_once(tmp_path: Path) -> None:
    write_folder(tmp_path, ["a/0.png"])
    coloured(50).convert("L").save(tmp_path / "a" / "1.png")
    dataset = open_dataset(str(tmp_path), "train", classes=1)
    assert [dataset.photograph(index).mode for index in range(2)] == ["RGB", "RGB"]
    assert dataset.photograph(0) is dataset.photograph(0)


def test_large_data_sets_are_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, ["a/0.png", "a/1.png"])
    monkeypatch.setattr("fedmjp.data.pictures.KEPT_BYTES", 2 * 12 * 10 * 4 - 1)
    dataset = open_dataset(str(tmp_path), "train", classes=1)
    dataset.photograph(0)
    assert not dataset.kept


def test_damaged_pictures_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, ["a/0.png", "a/1.png"])
    (tmp_path / "a" / "0.png").write_bytes(b"no picture")
    dataset = open_dataset(str(tmp_path), "train", classes=1)
    with pytest.raises(DataError, match=r"^a/0\.png in .* cannot be read as a picture"):
        dataset.photograph(0)
    (tmp_path / "a" / "1.png").unlink()
    with pytest.raises(DataError, match=r"^a/1\.png in .* cannot be read as a picture"):
        dataset.photograph(1)
    write_parquet(tmp_path / "p" / "train.parquet", [png(coloured(1))[:40]], [0])
    with pytest.raises(DataError, match=r"^train/00000 in .* cannot be read as a picture"):
        open_dataset(str(tmp_path / "p"), "train", classes=1).photograph(0)


@pytest.mark.parametrize(
    ("labels", "columns", "message"),
    [
        ([0, 7], {}, r"has label 7 \(7\), but the model knows 5 classes; give it at least 8"),
        ([0, -1], {}, "has label -1; expected class numbers from 0"),
        ([0, None], {}, "column 'label' of .* holds 1 empty values"),
        (["cat", "dog"], {}, "column 'label' of .* holds values of type string"),
        ([0, 1], {"label": "class"}, "has no column 'label', only image, class"),
        ([0, 1], {"image": "img"}, "has no column 'image', only img, label"),
    ],
)
def test_unusable_columns_are_named(
    tmp_path: Path, labels: list[int | None], columns: dict[str, str], message: str
) -> None:
    write_parquet(tmp_path / "train.parquet", [png(coloured(each)) for each in range(2)], labels, **columns)
    with pytest.raises(DataError, match=message):
        open_dataset(str(tmp_path), "train", classes=5)


def test_parquet_without_rows_or_damaged_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [], pa.array([], pa.int64()))
    with pytest.raises(DataError, match="holds no picture"):
        open_dataset(str(tmp_path), "train", classes=5)
    whole = tmp_path / "whole.parquet"
    write_parquet(whole, [png(coloured(1))] * 9, [0] * 9)
    (tmp_path / "validation.parquet").write_bytes(whole.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read as parquet files"):
        open_dataset(str(tmp_path), "validation", classes=5)


def test_opening_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_parquet(tmp_path / "train.parquet", [png(coloured(1))], [0])
    (tmp_path / "validation.parquet").write_bytes(b"damaged")
    open_dataset(str(tmp_path), "train", classes=5)
    with pytest.raises(DataError):
        open_dataset(str(tmp_path), "validation", classes=5)
    assert capfd.readouterr() == ("", "")


def test_missing_folder_and_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        open_dataset(str(tmp_path / "nowhere"), "train", classes=5)
    with pytest.raises(DataError, match="expected FOLDER/CLASS/picture"):
        open_dataset(str(tmp_path), "train", classes=5)


def test_the_hub_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"hub:ILSVRC/imagenet-1k cannot be opened: .* set HF_TOKEN") as raised:
        open_dataset("hub:ILSVRC/imagenet-1k", "train", classes=1000)
    assert "\n" not in str(raised.value)


def test_campaigns_read_the_validation_split_of_parquet_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "validation.parquet", [png(coloured(each)) for each in range(4)], [3, 2, 1, 0])
    source = open_source(str(tmp_path), size=8, classes=4)
    selection = select(source, 4, seed=0)
    assert {entry.name for entry in selection.entries} == {f"validation/0000{each}" for each in range(4)}
    for entry in selection.entries:
        number = int(entry.name[-1])
        assert entry.label == 3 - number
        assert torch.equal(selection.load(entry).image, to_image(coloured(number), 8))
    with pytest.raises(DataError, match="there is no picture 'validation/9'"):
        source.load("validation/9")


@pytest.mark.skipif(not TINY_IMAGENET.is_dir(), reason="needs Tiny ImageNet's pictures")
def test_tiny_imagenet_opens() -> None:
    dataset = open_dataset(str(TINY_IMAGENET), "validation", classes=32)
    assert np.bincount(dataset.labels).tolist() == [50] * 32
    assert dataset.class_names[0] == "n01443537"
    assert dataset.photograph(17).size == (64, 64)
