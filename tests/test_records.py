"""Records: strict round trips, and refusal of what is malformed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedmjp.data.selection import Selection
from fedmjp.errors import RecordError
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.settings import Picture
from tests.conftest import batch_of


def upload(**changes: object) -> Upload:
    values = {"kind": "gradient", "num_examples": 1, "server_round": 3, "node": 2**63 + 5, "weights": "abc"}
    return Upload(**{"tensors": {"a": torch.arange(3.0), "b": torch.ones(2, 2)}, **values, **changes})


def test_private_batch_round_trips(tmp_path: Path, pictures: Selection) -> None:
    batch = batch_of(pictures, Picture.SHUFFLED)
    batch.save(tmp_path / "batch")
    loaded = PrivateBatch.load(tmp_path / "batch")
    for name in ("clean", "shuffled", "mask", "source", "labels"):
        assert torch.equal(getattr(loaded, name), getattr(batch, name))
    assert (loaded.pictures, loaded.gradient_of) == (batch.pictures, batch.gradient_of)


def test_upload_round_trips(tmp_path: Path) -> None:
    upload().save(tmp_path / "upload")
    loaded = Upload.load(tmp_path / "upload")
    assert {name: tensor.tolist() for name, tensor in loaded.tensors.items()} == {"a": [0, 1, 2], "b": [[1, 1], [1, 1]]}
    assert (loaded.kind, loaded.num_examples, loaded.server_round) == ("gradient", 1, 3)
    assert (loaded.node, loaded.weights) == (2**63 + 5, "abc")


def test_reconstruction_round_trips(tmp_path: Path) -> None:
    made = Reconstruction(torch.rand(1, 3, 8, 8), {"masked_patches": 3.0})
    made.save(tmp_path / "made")
    loaded = Reconstruction.load(tmp_path / "made")
    assert torch.equal(loaded.images, made.images)
    assert loaded.diagnostics == {"masked_patches": 3.0}


def test_a_record_of_another_kind_is_refused(tmp_path: Path) -> None:
    upload().save(tmp_path / "record")
    with pytest.raises(RecordError, match="holds Upload, not PrivateBatch"):
        PrivateBatch.load(tmp_path / "record")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    "damage", [truncate, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"x" * 99), Path.unlink]
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    path = tmp_path / "record"
    upload().save(path)
    damage(path)
    with pytest.raises(RecordError, match="record is not a readable record"):
        Upload.load(path)


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    upload().save(tmp_path / "record")
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


def test_uploads_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        upload().tensors["a"] = torch.zeros(3)  # type: ignore[index]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_uploads_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(RecordError, match="'a' holds NaN or infinite"):
        upload(tensors={"a": torch.tensor([value])})


def test_pictures_outside_zero_to_one_are_refused(pictures: Selection) -> None:
    batch = batch_of(pictures, Picture.CLEAN)
    with pytest.raises(RecordError, match=r"clean must lie in \[0, 1\]"):
        PrivateBatch(
            batch.clean * 2, batch.shuffled, batch.mask, batch.source, batch.labels, batch.pictures, Picture.CLEAN
        )


def test_tensors_that_share_memory_can_be_stored(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    upload(tensors={"whole": whole, "part": whole[:1]}).save(tmp_path / "upload")
    assert Upload.load(tmp_path / "upload").tensors["part"].tolist() == [[0, 1, 2]]
