"""`fedmjp quickstart` as a newcomer runs it: full-size DeiT-S through Flower."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from fedmjp import provenance

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from fedmjp.cli import main; main()", "quickstart", "--device", "cpu"]


@dataclass(frozen=True)
class Run:
    """One run of the command."""

    folder: Path
    printed: str


def run(folder: Path, *arguments: str) -> Run:
    done = subprocess.run(
        [*COMMAND, "--output", folder, *arguments], cwd=folder.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(folder, done.stdout)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("quickstart") / "results")


@pytest.fixture(scope="module")
def board(first: Run) -> pd.DataFrame:
    frame = pd.read_csv(first.folder / "leaderboard.csv")
    return frame.set_index(["model", "defence", "attack", "setting"])


def test_it_writes_what_it_promises(first: Run) -> None:
    names = {path.name for path in first.folder.iterdir()}
    promised = {
        "trials.sqlite",
        "leaderboard.csv",
        "leaderboard.html",
        "leaderboard.json",
        "leaderboard.md",
        "leaderboard.tex",
        "plan.csv",
        "plan.json",
        "plots",
        "reconstructions.png",
        "manifest.json",
        "pictures",
        ".fedmjp",
    }
    assert names == promised
    assert {path.name for path in first.folder.parent.iterdir()} == {"results"}, "nothing outside the output folder"
    with Image.open(first.folder / "reconstructions.png") as figure:
        assert min(figure.size) > 500


def test_every_cell_is_complete(board: pd.DataFrame) -> None:
    assert len(board) == 24
    assert (board["n"] == 8).all()
    assert (board["failures"] == 0).all()
    for name in ("mse", "psnr", "ssim", "fft2d"):
        assert board[[column for column in board.columns if column.startswith(f"{name}_")]].notna().all(axis=None)


def test_patch_embedding_leaks_undefended_and_fails_naively_on_masked_uploads(board: pd.DataFrame) -> None:
    psnr = board["psnr_mean"]
    for defence, setting in (("none", "a"), ("jigsaw", "b")):
        assert psnr["deit_small", defence, "patch_embedding", setting] > 60
    for setting in ("a", "b", "c"):
        assert psnr["deit_small", "mjp", "patch_embedding", setting] < 14


def test_april_recovers_more_than_the_floor_only_without_mjp(board: pd.DataFrame) -> None:
    psnr = board["psnr_mean"]
    grey = psnr["deit_small_april", "none", "grey", "a"]
    assert psnr["deit_small_april", "none", "april", "a"] > grey + 10
    assert psnr["deit_small_april", "mjp", "april", "a"] < grey + 2


def test_the_manifest_tells_where_the_numbers_come_from(first: Run) -> None:
    manifest = json.loads((first.folder / "manifest.json").read_text())
    assert manifest["trials"] | {"first": None, "last": None} == {
        "planned": 192,
        "ok": 192,
        "failed": 0,
        "refused_cells": 0,
        "first": None,
        "last": None,
    }
    assert len(manifest["pictures"]) == 8
    assert len(set(manifest["weights"].values())) == 4
    scenarios = [each["scenario"] for each in manifest["config"]["experiments"]]
    assert {each["data"] for each in scenarios} == {"bundled"}
    ratios = {defence.get("mask_ratio", 0.27) for each in scenarios for defence in each["defences"]}
    assert ratios == {0.27}
    (environment,) = manifest["environments"]
    assert {"torch", "timm", "flwr"} <= environment["versions"].keys()
    assert environment["hardware"] == provenance.hardware()


def test_a_second_run_only_renders(first: Run) -> None:
    table = (first.folder / "leaderboard.csv").read_bytes()
    second = run(first.folder)
    assert "192 of 192 trials are finished" in second.printed
    assert "Federated rounds" not in second.printed
    assert (first.folder / "leaderboard.csv").read_bytes() == table
