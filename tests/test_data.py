"""Sources of pictures: what they convert, what they skip, what they refuse."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedmjp.data.datasets import CROPS
from fedmjp.data.pictures import open_picture, to_rgb
from fedmjp.data.selection import open_source, select, select_for
from fedmjp.errors import DataError
from fedmjp.exchange import prepare_round
from fedmjp.scenario import Scenario
from fedmjp.settings import Picture
from tests.conftest import private_batch


def tiny_scenario(**values: object) -> Scenario:
    model = {"name": "deit_tiny", "image_size": 32, "patch_size": 8}
    return Scenario.parse({"model": model, **values})


def save(path: Path, mode: str = "RGB", size: tuple[int, int] = (80, 60)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3)
    pixels = np.random.RandomState(len(path.name)).randint(0, 256, shape).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "dog" / "rgb.png")
    save(tmp_path / "cat" / "grey.png", "L")
    save(tmp_path / "cat" / "transparent.png", "RGBA")
    save(tmp_path / "cat" / "palette.png", "P")
    return tmp_path


def test_grey_transparent_and_palette_pictures_become_rgb(folder: Path) -> None:
    source = open_source(str(folder), size=32, classes=10)
    for name in source.names():
        picture = source.load(name)
        assert picture.image.shape == (3, 32, 32)
        assert picture.image.dtype == torch.float32
        assert picture.image.min() >= 0
        assert picture.image.max() <= 1
    grey = source.load("cat/grey.png").image
    assert torch.equal(grey[0], grey[1])


def test_sixteen_bit_grey_keeps_its_shades(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65_535, 64 * 64).reshape(64, 64)
    (tmp_path / "c").mkdir()
    Image.fromarray(ramp.astype(np.uint16)).save(tmp_path / "c" / "deep.png")
    Image.fromarray((ramp / 257).round().astype(np.uint8)).save(tmp_path / "c" / "flat.png")
    source = open_source(str(tmp_path), size=32, classes=10)
    assert torch.allclose(source.load("c/deep.png").image, source.load("c/flat.png").image, atol=2 / 255)


@pytest.mark.parametrize("highest", [65_535, 4095, 1023])
@pytest.mark.parametrize("plain", [False, True])
def test_a_deep_pgm_is_read_as_the_png_of_its_shades(tmp_path: Path, highest: int, *, plain: bool) -> None:
    """Of which maximum and form it may be, as scanners and medical converters write it."""
    ramp = np.linspace(0, highest, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    (tmp_path / "c").mkdir()
    header = f"{'P2' if plain else 'P5'}\n64 64\n{highest}\n".encode()
    text = " ".join(map(str, ramp.flatten())).encode()
    (tmp_path / "c" / "deep.pgm").write_bytes(header + (text if plain else ramp.astype(">u2").tobytes()))
    Image.fromarray((ramp.astype(float) * 65_535 / highest).round().astype(np.uint16)).save(tmp_path / "c" / "deep.png")
    source = open_source(str(tmp_path), size=32, classes=10)
    assert torch.equal(source.load("c/deep.pgm").image, source.load("c/deep.png").image)


def test_a_tiff_of_twelve_bits_is_as_bright_as_it_is(tmp_path: Path) -> None:
    first, second = 4095, 0x123
    packed = bytes([first >> 4, (first & 15) << 4 | second >> 8, second & 255]) * 32
    entries = {256: 8, 257: 8, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 8, 279: len(packed)}
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    directory = struct.pack("<H", len(entries)) + tags + bytes(4)
    (tmp_path / "deep.tif").write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(packed)) + packed + directory)
    with open_picture(tmp_path / "deep.tif") as photograph:
        row = np.asarray(to_rgb(photograph))[0, :2, 0].tolist()
    assert row == [255, round(second / 4095 * 255)]


def test_pictures_without_a_fixed_range_are_named(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    Image.fromarray(np.linspace(0, 1, 64 * 64, dtype=np.float32).reshape(64, 64)).save(tmp_path / "c" / "float.tiff")
    with pytest.raises(DataError, match=r"float\.tiff in .* cannot be read as a picture: mode 'F' has no fixed range"):
        open_source(str(tmp_path), size=32, classes=10).load("c/float.tiff")


def test_file_names_that_are_no_text_are_skipped_and_named(folder: Path) -> None:
    strange = os.fsdecode(b"stra\xffnge.png")
    (folder / "dog" / "rgb.png").rename(folder / "dog" / strange)
    with pytest.raises(DataError, match=r"file name 'dog/stra.*nge\.png' is not valid text"):
        open_source(str(folder), size=32, classes=10).load(f"dog/{strange}")


def test_labels_are_ranks_of_class_folders(folder: Path) -> None:
    source = open_source(str(folder), size=32, classes=10)
    assert {name: source.load(name).label for name in ("cat/grey.png", "dog/rgb.png")} == {
        "cat/grey.png": 0,
        "dog/rgb.png": 1,
    }


def test_broken_files_are_skipped_and_named(folder: Path) -> None:
    (folder / "cat" / "broken.jpg").write_bytes(b"no picture")
    whole = folder / "dog" / "rgb.png"
    (folder / "dog" / "truncated.png").write_bytes(whole.read_bytes()[:500])
    selection = select(open_source(str(folder), size=32, classes=10), 4, seed=0)
    assert len(selection.entries) == 4
    everything = select_all(folder)
    assert len(everything) == 2
    assert any("broken.jpg" in reason for reason in everything)
    assert any("truncated.png" in reason for reason in everything)


def select_all(folder: Path) -> list[str]:
    source = open_source(str(folder), size=32, classes=10)
    reasons = []
    for name in source.names():
        try:
            source.load(name)
        except DataError as error:
            reasons.append(str(error))
    return reasons


def test_too_few_readable_pictures_are_counted(folder: Path) -> None:
    (folder / "cat" / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"5 pictures were asked for, but only 4 can be read \(1 damaged"):
        select(open_source(str(folder), size=32, classes=10), 5, seed=0)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        open_source(str(tmp_path / "nowhere"), size=32, classes=10)


def test_folder_without_class_folders_says_what_is_expected(tmp_path: Path) -> None:
    save(tmp_path / "flat.png")
    with pytest.raises(DataError, match="expected FOLDER/CLASS/picture"):
        open_source(str(tmp_path), size=32, classes=10)


def test_more_classes_than_the_model_knows_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"has label 1 \(dog\), but the model knows 1 classes"):
        open_source(str(folder), size=32, classes=1)


def test_bundled_pictures_need_imagenet_classes() -> None:
    with pytest.raises(DataError, match="has label 967"):
        open_source("bundled", size=32, classes=10)


def test_bundled_pictures_are_eight_distinct_square_photographs() -> None:
    source = open_source("bundled", size=64, classes=1000)
    digests = {source.load(name).digest() for name in source.names()}
    assert len(digests) == len(CROPS) == 8


def test_partitions_are_disjoint_complete_and_depend_on_the_seed() -> None:
    scenario = tiny_scenario(clients=2, pictures_per_client=4)
    selection = select_for(scenario)
    first, second = ([p.name for p in selection.partition(client, 2)] for client in range(2))
    assert len(first) == len(second) == 4
    assert set(first) | set(second) == set(CROPS)
    other = select_for(scenario.model_copy(update={"seed": 1}))
    assert [p.name for p in other.entries] != [p.name for p in selection.entries]


def test_the_same_picture_meets_the_same_jigsaw_whatever_goes_into_the_gradient() -> None:
    picture = open_source("bundled", size=64, classes=1000).load("cat")
    batches = [private_batch([picture], grid=8, mask_ratio=0.5, gradient_of=version, seed=0) for version in Picture]
    assert torch.equal(batches[0].mask, batches[1].mask)
    assert torch.equal(batches[0].shuffled, batches[1].shuffled)
    other = private_batch([picture], grid=8, mask_ratio=0.5, gradient_of=Picture.CLEAN, seed=1)
    assert not torch.equal(other.source, batches[0].source)


def test_batches_are_each_clients_pictures_in_turn() -> None:
    scenario = tiny_scenario(defences="jigsaw", clients=2, pictures_per_client=4, batch_size=2)
    selection = select_for(scenario)
    batches = selection.batches(scenario)
    assert [len(batch) for batch in batches] == [2] * 4
    assert [entry for batch in batches[:2] for entry in batch] == list(selection.partition(0, 2))
    made = prepare_round(scenario, selection, client=1, server_round=2)
    assert made.pictures == tuple(entry.name for entry in batches[3])
    alone = private_batch(
        [selection.load(batches[3][1])], grid=4, mask_ratio=0.27, gradient_of=Picture.SHUFFLED, seed=0
    )
    assert torch.equal(made.shuffled[1:], alone.shuffled), "a picture's puzzle does not depend on its batch"


def test_a_picture_that_changed_is_not_taken_for_the_chosen_one(folder: Path) -> None:
    selection = select(open_source(str(folder), size=32, classes=10), 4, seed=0)
    entry = next(entry for entry in selection.entries if entry.name == "dog/rgb.png")
    assert selection.load(entry).digest() == entry.sha256
    Image.new("RGB", (40, 40), "red").save(folder / "dog" / "rgb.png")
    with pytest.raises(DataError, match=r"'dog/rgb\.png' has changed"):
        selection.load(entry)


def test_pictures_can_be_left_out_by_name(folder: Path) -> None:
    source = open_source(str(folder), size=32, classes=10)
    left = select(source, 3, seed=0, leave_out=lambda name: name.startswith("dog/"))
    assert all(entry.name.startswith("cat/") for entry in left.entries)
