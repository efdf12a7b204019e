"""What is published can be traced and made again: commits that exist, trials that verify, nothing that is rendered."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedmjp.attacks.held_out import developed_on
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.study import TRIALS, holds_plan, problems_of_rows, read_study
from fedmjp.benchmarks.report.render import board_in
from fedmjp.benchmarks.running.verify import compare_with_published, verify

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
LARGEST = 25 * 2**20  # of which the weights of the zoo are 15
LOST = "commit_lost"  # key of a manifest that says why nobody can check out what its numbers were made with
RENDERED = {".html", ".tex", ".svg"}
SHOWN = {"uploads.svg", "uploads-per-picture-1.svg", "over_training.svg"}  # figures of a README


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "results"], capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def manifests() -> list[Path]:
    return sorted([*RESULTS.rglob("manifest.json"), *(RESULTS / "performance").glob("*.json")])


def studies() -> list[Path]:
    return sorted(path.parent for path in RESULTS.rglob(TRIALS))


def revisions(value: Any) -> Iterator[tuple[str, bool]]:
    """Commit, and whether the tree was modified, wherever a manifest names them."""
    if isinstance(value, dict):
        if isinstance(value.get("commit"), str):
            yield value["commit"], bool(value.get("modified"))
        for each in value.values():
            yield from revisions(each)
    if isinstance(value, list):
        for each in value:
            yield from revisions(each)


def named(path: Path) -> str:
    return str(path.relative_to(RESULTS))


@pytest.mark.parametrize("manifest", manifests(), ids=named)
def test_a_manifest_names_commits_of_this_history_with_a_clean_tree_or_says_that_they_are_lost(manifest: Path) -> None:
    if subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("this is no git checkout")
    about = json.loads(manifest.read_text(encoding="utf-8"))
    if LOST in about:
        assert len(about[LOST]) > 20, "says why"
        return
    found = set(revisions(about))
    assert found, "names no commit"
    for commit, modified in found:
        assert not modified, f"{commit} was modified"
        ancestor = ["git", "-C", ROOT, "merge-base", "--is-ancestor", commit, "HEAD"]
        assert subprocess.run(ancestor, capture_output=True, check=False).returncode == 0, f"{commit} is not in history"


@pytest.mark.parametrize("folder", studies(), ids=named)
def test_a_study_verifies(folder: Path) -> None:
    if not holds_plan(folder):
        assert problems_of_rows(folder) == []
        return
    ledger, store = read_study(folder)
    found = verify(OutputFolder(folder), ledger, store)
    board = board_in(ledger, store, folder).model_dump(mode="json")
    assert found.problems + compare_with_published(folder, board, rendered=False) == []


@pytest.mark.parametrize("folder", studies(), ids=named)
def test_a_study_has_a_manifest_and_says_what_it_is(folder: Path) -> None:
    assert (folder / "manifest.json").exists()
    assert (folder / "README.md").exists()


@pytest.mark.parametrize("folder", studies(), ids=named)
def test_no_row_is_of_a_picture_that_an_attack_was_developed_on(folder: Path) -> None:
    rows = pd.read_parquet(folder / TRIALS).reindex(columns=["picture", "picture_sha256"]).drop_duplicates()
    pictures = rows.fillna("").itertuples(index=False, name=None)
    assert [name for name, sha256 in pictures if developed_on(name, sha256)] == []


def test_no_figure_of_performance_is_of_a_picture_that_an_attack_was_developed_on() -> None:
    pictures = json.loads((RESULTS / "performance/gradient_matching.json").read_text())["pictures"]
    assert pictures
    assert not [name for name in pictures if developed_on(name)]


def test_results_stay_small_and_hold_nothing_that_is_rendered_on_demand() -> None:
    files = tracked()
    assert sum(path.stat().st_size for path in files) < LARGEST
    rendered = [path.name for path in files if path.suffix in RENDERED and path.name not in SHOWN]
    assert rendered == []
    assert not [path for path in files if path.stem == "leaderboard" and path.parent.name != "performance"]
