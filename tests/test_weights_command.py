"""Published weights: where they are looked for, how they are checked, and what is said where none can be had."""

import hashlib
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from fedmjp.cli import main
from fedmjp.config import ModelConfig
from fedmjp.errors import CheckpointError, UnknownNameError, WeightsMissingError
from fedmjp.models.build import build
from fedmjp.models.known import (
    OF_TIMM,
    OFFICIAL,
    find_checkpoint,
    known_checkpoints,
    list_places,
    open_checkpoint,
    places_in_timm,
)
from fedmjp.zoo import weights_folder

BAD_INPUT, FAILED = 2, 1


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmjp", "weights", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """Empty folders in place of the user's, and a hub that is never asked."""
    found = {name: tmp_path / name for name in ("own", "hub", "torch")}
    monkeypatch.setenv("FEDMJP_WEIGHTS", str(found["own"]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(found["hub"]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TORCH_HOME", str(found["torch"]))
    return found


def put(path: Path, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def cached(hub: Path, repository: str, name: str) -> Path:
    """A file as the hub's client keeps it."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    put(folder / "refs" / "main", b"0" * 40)
    return put(folder / "snapshots" / ("0" * 40) / name)


def test_every_model_is_listed_with_its_source_and_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], places: dict[str, Path]
) -> None:
    assert run(monkeypatch) == 0
    printed = capsys.readouterr().out
    for each in known_checkpoints():
        assert each.find() is None
        assert f"from {each.source}" in printed
    assert printed.count("not here") == len(known_checkpoints())
    assert "timm/deit_small_patch16_224.fb_in1k on the Hugging Face hub" in printed
    assert "deit_small_patch16_224-cd65a155.pth" in printed
    assert all(str(place) in printed for place in places.values())
    assert max(map(len, printed.splitlines()[:-6])) <= 80


def test_a_file_that_is_here_is_told_with_its_digest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], places: dict[str, Path]
) -> None:
    path = put(places["own"] / "mjp_deit_small.pth")
    for arguments in ((), ("fetch", "mjp_deit_small")):
        assert run(monkeypatch, *arguments) == 0
        printed = capsys.readouterr().out
        assert f"file {path}" in printed
        assert hashlib.sha256(b"weights").hexdigest() in printed


def test_the_own_folder_comes_before_the_hubs_cache_and_that_before_torchs(places: dict[str, Path]) -> None:
    deit = find_checkpoint("deit_small")
    release = put(Path(torch.hub.get_dir()) / "checkpoints" / deit.release)
    assert deit.find() == release
    other = cached(places["hub"], deit.repository, "pytorch_model.bin")
    assert deit.find() == other
    preferred = cached(places["hub"], deit.repository, "model.safetensors")
    assert deit.find() == preferred
    own = put(places["own"] / deit.release)
    assert deit.find() == own
    named = put(places["own"] / "deit_small.safetensors")
    assert deit.find() == named == deit.fetch()


def test_what_is_listed_of_timms_models_is_what_timm_says() -> None:
    assert {name: places_in_timm(name) for name in OF_TIMM} == OF_TIMM


@pytest.mark.parametrize("cache", ["", "/caches"])
def test_torchs_cache_is_where_torch_looks(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    monkeypatch.delenv("TORCH_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert list_places()[-1] == f"torch's cache, {torch.hub.get_dir()}/checkpoints"


def test_timms_models_have_the_hubs_weights_of_their_name() -> None:
    assert find_checkpoint("timm:vit_tiny_patch16_224").repository == "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    tagged = find_checkpoint("timm:vit_base_patch16_224.augreg_in21k")
    assert tagged.repository == "timm/vit_base_patch16_224.augreg_in21k"
    assert tagged.saved_as == "vit_base_patch16_224.augreg_in21k"
    with pytest.raises(UnknownNameError, match="Did you mean deit_small"):
        find_checkpoint("deit_smal")
    with pytest.raises(WeightsMissingError, match="timm has no weights of timm:vit_small_patch16_36x1_224"):
        find_checkpoint("timm:vit_small_patch16_36x1_224")


def test_without_a_network_the_error_says_what_to_do_by_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], places: dict[str, Path]
) -> None:
    for name, what in (
        ("deit_small", f"model.safetensors of {find_checkpoint('deit_small').source}"),
        ("mjp_deit_small", f"the model of {OFFICIAL.source}"),
    ):
        assert run(monkeypatch, "fetch", name) == FAILED
        printed = capsys.readouterr().err
        assert f"get {what}, and save it here as {places['own'] / name}." in printed
        assert printed.count("\n") == 1


def test_what_the_hub_sends_is_found_again(monkeypatch: pytest.MonkeyPatch, places: dict[str, Path]) -> None:
    asked: list[tuple[str, str]] = []

    def download(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(cached(places["hub"], repository, name))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    first, second = find_checkpoint("deit_tiny").fetch(), find_checkpoint("deit_tiny").fetch()
    assert first == second
    assert asked == [("timm/deit_tiny_patch16_224.fb_in1k", "model.safetensors")]


def test_a_user_without_a_folder_of_weights_gets_one_among_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDMJP_WEIGHTS")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert weights_folder() == Path("/data/fedmjp/weights")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert weights_folder() == Path("/home/someone/.local/share/fedmjp/weights")


def test_a_release_whose_content_is_not_what_its_name_says_is_damaged(tmp_path: Path) -> None:
    begins = hashlib.sha256(b"weights").hexdigest()[:8]
    assert open_checkpoint(put(tmp_path / f"model-{begins}.pth")).sha256.startswith(begins)
    with pytest.raises(CheckpointError, match=f"begins with {begins}, its name says 00000000; download it again"):
        open_checkpoint(put(tmp_path / "model-00000000.pth"))


SMALL = ("--image-size", "32", "--classes", "10")


def test_a_file_that_fits_is_described(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    timms = timm.create_model("deit_tiny_patch16_224", img_size=32, num_classes=10)
    torch.save({"model": timms.state_dict()}, tmp_path / "deit.pth")
    assert run(monkeypatch, "verify", str(tmp_path / "deit.pth"), "--model", "deit_tiny", *SMALL) == 0
    printed = capsys.readouterr().out
    assert "fits deit_tiny with defence none" in printed
    assert "layout      timm's" in printed
    assert f"{sum(parameter.numel() for parameter in timms.parameters()):,}" in printed
    assert hashlib.sha256((tmp_path / "deit.pth").read_bytes()).hexdigest() in printed


def test_a_model_of_ours_is_described_with_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = {"localisation": "nonlinear", "localisation_layers": 2, "index_embedding": True}
    config = {
        "name": "swin_tiny",
        "unknown_embedding": True,
        "image_size": 32,
        "patch_size": 4,
        "classes": 10,
        **values,
    }
    save_file(build(ModelConfig.parse(config)).state_dict(), tmp_path / "swin.safetensors")
    options = ("--localisation", "nonlinear", "--localisation-layers", "2", "--index-embedding")
    verify = ("verify", str(tmp_path / "swin.safetensors"), "--model", "swin_tiny", *SMALL)
    assert run(monkeypatch, *verify, "--defence", "mjp", *options) == 0
    assert "layout      fedmjp's" in capsys.readouterr().out
    assert run(monkeypatch, *verify, "--defence", "mjp") == BAD_INPUT
    assert "set index-embedding to true" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--model", "deit_tiny", "--defence", "mjp", *SMALL),
            "has no unknown position embedding: it fits a model without one, as under no defence",
        ),
        (("--model", "deit_tiny", "--image-size", "32"), "set classes to 10"),
        (("--model", "deit_tin", *SMALL), "Did you mean deit_tiny"),
        (("--model", "deit_tiny", "--localisation", "linar", *SMALL), "'linar' is not one of 'none', 'pca'"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
) -> None:
    model = build(ModelConfig(name="deit_tiny", image_size=32, patch_size=16, classes=10))
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    assert run(monkeypatch, "verify", str(tmp_path / "own.safetensors"), *options) == BAD_INPUT
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
