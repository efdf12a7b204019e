"""`fedmjp quickstart`: DeiT-Ti at 64 pixels through Flower, on two of eight pictures, shown up to four times of eight.

The whole, of DeiT-S at 224 pixels, takes minutes: benchmarks/performance/run.py quickstart runs it, and
results/quickstart-reference shows it.
"""

import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from fedmjp import provenance

pytestmark = pytest.mark.slow

PICTURES = 2
PROGRAM = """
from fedmjp.benchmarks.campaign import quickstart
from fedmjp.cli import main
from fedmjp.config import ModelConfig
quickstart.PICTURES_PER_CLIENT = 1
quickstart.TRIED = {
    (ModelConfig(name=name.replace("small", "tiny"), image_size=64, patch_size=8), uploads): attacks
    for (name, uploads), attacks in quickstart.TRIED.items()
    if uploads < 8
}
main()
"""
COMMAND = [sys.executable, "-c", PROGRAM, "quickstart", "--device", "cpu"]
CELLS = 14
TRIALS = CELLS * PICTURES


@dataclass(frozen=True)
class Run:
    """One run of the command."""

    folder: Path
    printed: str
    silence: float  # the longest, in seconds


def run(folder: Path, *arguments: str) -> Run:
    began = time.monotonic()
    lines, moments = [], [began]
    with subprocess.Popen(
        [*COMMAND, "--output", folder, *arguments],
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            moments.append(time.monotonic())
    printed = "".join(lines)
    assert process.returncode == 0, printed
    return Run(folder, printed, max(after - before for before, after in itertools.pairwise(moments)))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("quickstart") / "results")


@pytest.fixture(scope="module")
def board(first: Run) -> pd.DataFrame:
    frame = pd.read_csv(first.folder / "leaderboard.csv")
    return frame.set_index(["model", "defence", "attack", "threat_uploads_per_picture"]).sort_index()


def test_it_ends_with_a_short_table_and_sentences_that_answer(first: Run, board: pd.DataFrame) -> None:
    lines = first.printed.splitlines()
    rows = [line for line in lines if re.search(rf" \d of {PICTURES} +\d+\.\d *$", line)]
    assert len(rows) == 7
    sentences = " ".join(first.printed.split())
    assert "before a server that sees a picture once" in sentences
    assert "Before a server that sees the picture again under other masks, mjp_intersection recovers" in sentences
    printed = {tuple(row.split()[:4]): float(row.split()[-1]) for row in rows}
    for (model, defence, attack, uploads), median in printed.items():
        exact = board.loc[model, defence, attack, int(uploads)]["psnr_median"]
        assert median == pytest.approx(float(exact), abs=0.051), attack


def test_it_is_never_silent_for_long(first: Run) -> None:
    assert first.silence < 20, "ten seconds on an idle machine"
    assert re.search(r"Federated rounds: \d+ of 7, about \d+ s to go in this phase", first.printed)


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
        "reconstructions.jpg",
        "manifest.json",
        "pictures",
        "pictures.jsonl",
        ".fedmjp",
    }
    assert names == promised
    assert {path.name for path in first.folder.parent.iterdir()} == {"results"}, "nothing outside the output folder"
    with Image.open(first.folder / "reconstructions.jpg") as figure:
        assert min(figure.size) > 300


def test_every_cell_is_complete(board: pd.DataFrame) -> None:
    assert len(board) == CELLS
    assert (board["n"] == PICTURES).all()
    assert (board["failures"] == 0).all()
    for name in ("mse", "psnr", "ssim", "fft2d"):
        assert board[[column for column in board.columns if column.startswith(f"{name}_")]].notna().all(axis=None)


def test_the_same_federation_is_exact_without_a_defence_and_comes_apart_when_it_shows_pictures_again(
    board: pd.DataFrame,
) -> None:
    psnr, grey = board["psnr_median"], board["psnr_median"]["deit_tiny", "mjp", "grey", 1]
    assert psnr["deit_tiny", "none", "patch_embedding", 1] > 60
    tried = (("mjp_prior", 1), *(("mjp_intersection", uploads) for uploads in (2, 4)))
    once, twice, four = (psnr["deit_tiny", "mjp", attack, uploads] for attack, uploads in tried)
    assert grey + 3 < once < twice < four
    assert psnr["deit_tiny", "mjp", "patch_embedding", 1] < min(once, grey + 4), "it does not know MJP"
    assert psnr["deit_tiny", "none", "mjp_intersection", 4] > 60


def test_april_recovers_more_than_the_floor_only_without_mjp(board: pd.DataFrame) -> None:
    psnr = board["psnr_mean"]
    grey = psnr["deit_tiny_april", "mjp", "grey", 1]
    assert psnr["deit_tiny_april", "none", "april", 1] > grey + 10
    assert psnr["deit_tiny_april", "mjp", "april", 1] < grey + 2


def test_the_manifest_tells_where_the_numbers_come_from(first: Run) -> None:
    manifest = json.loads((first.folder / "manifest.json").read_text())
    assert manifest["trials"] | {"first": None, "last": None} == {
        "planned": TRIALS,
        "ok": TRIALS,
        "failed": 0,
        "refused_cells": 0,
        "first": None,
        "last": None,
    }
    assert len(manifest["pictures"]) == PICTURES
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
    assert f"{TRIALS} of {TRIALS} trials are finished" in second.printed
    assert "Federated rounds" not in second.printed
    assert (first.folder / "leaderboard.csv").read_bytes() == table
