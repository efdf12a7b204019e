"""Attacks that reveal features and labels, from the campaign to the page, and the rules that judge them."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console

from fedmjp import facade
from fedmjp.attacks.adversary import Adversary
from fedmjp.benchmarks.campaign.prepare import Prepared, prepare
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.leaderboard.admission import admit
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.consistency import AdmissionError
from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.plausible import impossible_figures
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment
from fedmjp.benchmarks.report.front import disclosed_answer
from fedmjp.benchmarks.report.publish import publish
from fedmjp.benchmarks.report.render import render
from fedmjp.benchmarks.running.engine import Engine
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import Recorder, run_experiment
from fedmjp.benchmarks.running.verify import verify
from fedmjp.benchmarks.uploads.direct import DirectUploads
from fedmjp.benchmarks.uploads.source import RecordedUploads
from fedmjp.data.selection import Selection, select_for
from fedmjp.errors import AttackNotApplicableError, BadInputError, ConfigError
from fedmjp.metrics import DISCLOSED
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel
from tests.boards import ENVIRONMENTS, Row, attack_board, board, cell, ledger_of, near
from tests.conftest import small_model, small_scenario
from tests.experiments import record_directly
from tests.test_admission import changed, consistent, submission, write
from tests.test_attack_command import attack

METRICS = ["psnr", "mse", *DISCLOSED]
MANY = 64


def telling(reveals: str, shares: Sequence[float], defence: object = "none", setting: str = "a", **row: Any) -> Row:
    """A cell of an attack that reveals this; the share that is right of each picture."""
    made = cell(f"tells_{reveals}", defence, setting, reveals=reveals)
    return Row(
        made, shares, scores={"feature_error": 0.5, "label_accuracy": 1.0} if reveals == "features" else {}, **row
    )


def chance(count: int, defence: object = "none", setting: str = "a") -> Row:
    guess = cell("chance", defence, setting, reveals="features", role="floor")
    return Row(guess, [0.0] * count, scores={"feature_error": 2.0, "label_accuracy": 0.0})


def judged(*rows: Row) -> BoardEntry:
    return board(*rows, metrics=METRICS).entries[0]


def test_who_finds_every_picture_leaks_and_is_told_without_decibels() -> None:
    entry = judged(telling("features", [1.0] * MANY), chance(MANY))
    assert entry.verdict == "leaks"
    assert entry.reason == (
        "0 of 64 features exactly, 100 % of the pictures found among all; mean 100.0 percentage points over chance "
        "(100.0 to 100.0)"
    )


def test_one_exact_feature_is_a_leak_and_one_right_answer_is_none() -> None:
    exact = telling("features", [0.0] * 8)
    exact.scores["feature_error"] = 1e-4  # type: ignore[index]
    assert judged(exact, chance(8)).verdict == "leaks"
    assert judged(exact, chance(8)).exact.share == 1
    lucky = judged(telling("labels", [1.0] + [0.0] * 7), chance(8))
    assert lucky.verdict == "inconclusive"
    assert "does not exclude 5 percentage points" in lucky.reason


def test_what_a_defence_leaves_of_the_features_decides_between_its_verdicts() -> None:
    plain, floors = telling("features", [1.0] * MANY), (chance(MANY), chance(MANY, "mjp", "c"))

    def with_mjp(shares: Sequence[float], *, adapted: bool = True) -> BoardEntry:
        return judged(telling("features", shares, "mjp", "c", adapted=adapted), plain, *floors)

    some = with_mjp([1.0, 0.0] * (MANY // 2))
    assert (some.verdict, some.n) == ("reduced", MANY)
    assert "a mean difference of -50.0 percentage points" in some.reason
    assert "dB" not in some.reason
    assert with_mjp([0.0] * MANY).verdict == "withstood"
    assert with_mjp([0.0] * MANY, adapted=False).verdict == "naive attack failed"
    few = judged(telling("features", [0.0] * 8, "mjp", "c", adapted=True), plain, *floors)
    assert few.verdict == "inconclusive", "eight pictures do not exclude five in a hundred"
    assert few.reason.endswith("; a binomial test does not exclude 5 percentage points")


def test_labels_are_held_against_the_labels_of_a_guess_that_tells_features_too() -> None:
    entry = judged(telling("labels", [1.0] * 7 + [0.0]), chance(8))
    assert (entry.verdict, entry.exact.share, entry.over_floor.mean) == ("leaks", 7 / 8, 7 / 8)
    assert entry.reason.startswith("7 of 8 labels; mean 87.5 percentage points over chance")
    assert judged(telling("labels", [1.0] * 8)).reason.endswith("and no guess to compare with")


def test_pictures_features_and_labels_are_never_ranked_against_each_other() -> None:
    rows = [
        Row(cell("april", "none"), near(80)),
        Row(cell("grey", "none"), [12.5] * 8),
        telling("features", [1.0] * 8),
        telling("labels", [1.0] * 8),
        chance(8),
    ]
    shown = board(*rows, metrics=METRICS)
    assert [(one.reveals, one.rank) for one in shown.standings] == [("features", 1), ("labels", 1), ("pictures", 1)]
    pictures, *_, guess = shown.entries
    assert pictures.floor == shown.entries[1].id, "a guess at features is none at pictures"
    assert [one.floor for one in shown.entries[2:4]] == [guess.id, guess.id]


def test_ids_of_cells_that_reveal_pictures_are_what_they_were_and_old_boards_still_read() -> None:
    shown = board(Row(cell("april", "none"), near(80)), Row(cell("grey", "none"), [12.5] * 8))
    assert [one.id for one in shown.entries] == ["f9cfd8d7dea79c47", "eeb956d8224d677e"]
    values = json.loads(shown.model_dump_json())
    for one in (*values["entries"], *values["standings"]):
        assert one.pop("reveals") == "pictures"
    assert Board.read(json.dumps(values)) == shown


@cache
def submitted_text() -> str:
    """Features and labels told of eight pictures, and their guess, as a third party would submit them."""
    rows = (
        replace(telling("features", [1.0] * 8), cell=cell("class_token", "none", reveals="features")),
        replace(telling("labels", [1.0] * 8), cell=cell("labels", "none", reveals="labels")),
        chance(8),
    )
    return json.dumps(submission(*rows, metrics=METRICS))


def board_folder(folder: Path) -> Path:
    """A board of pictures alone, to add entries to."""
    ledger, _ = ledger_of([Row(cell("april", "none"), near(80))])
    (folder / "board").mkdir()
    ledger.save(folder / "board")
    return folder / "board"


def test_a_third_party_submits_features_and_labels_beside_a_board_of_pictures(tmp_path: Path) -> None:
    folder = board_folder(tmp_path)
    admitted = consistent(json.loads(submitted_text()))
    assert [claim.attack for claim in admit(write(folder, json.loads(submitted_text())), folder).claims] == [
        "class_token", "labels",
    ]  # fmt: skip
    assert [(one.reveals, one.verdict) for one in admitted] == [
        ("features", "leaks"), ("labels", "leaks"), ("features", "floor"),
    ]  # fmt: skip
    assert admitted[1].floor == admitted[2].id, "the guess at features guesses labels"
    assert set(admitted[0].scores) == {"rank1", "feature_error", "label_accuracy"}
    ledger, trials = ledger_of([Row(cell("april", "none"), near(80))])
    both = board_of(ledger, trials, ENVIRONMENTS, submitted=admitted)
    publish(both, tmp_path, formats=("csv", "md"), pictures=None)
    table = pd.read_csv(tmp_path / "leaderboard.csv").set_index("attack")
    assert table.loc[["class_token", "labels", "chance"], "origin"].tolist() == ["submitted"] * 3
    assert (table.loc["class_token", "rank1_mean"], table.loc["class_token", "feature_error_median"]) == (1, 0.5)
    others = (tmp_path / "leaderboard.md").read_text(encoding="utf-8").split("## What else leaks")[1]
    assert others.count("submitted") == 3
    assert disclosed_answer(both) == "", "what we have not measured is no answer of ours"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("entries.0.metrics.feature_error.median", 0.1, "feature_error median is 0.1, but its scores per picture give"),
        ("entries.0.scores.rank1.p0", 0.5, "rank1 of 'p0' is 0.5; it can be 0 or 1"),
        ("entries.0.scores.feature_error.p0", -0.1, "feature_error of 'p0' is -0.1; it can be from 0"),
        ("entries.0.scores.feature_error.p0", 1e300, "feature_error of 'p0' is 1e+300; it can be from 0"),
        ("entries.0.scores.membership", {}, "membership has no scores per picture"),
        ("entries.0.scores.label_accuracy", {"p0": 1.0}, "label_accuracy is not of the same pictures as rank1: 1 and"),
        ("entries.0.scores", {"rank1": {"p0": 1.0}}, "label_accuracy has no scores per picture"),
        ("entries.0.metrics.rank1.worst", 0.0, "rank1 worst is 0.0, but its scores per picture give 1"),
        ("entries.0.exact.share", 1.0, "exact share is 1.0, but its scores per picture give 0.0"),
        ("entries.0.flat", {"p9": 80.0}, "names flat pictures, which count as others where features are revealed"),
        ("entries.0.recognisable", {"share": 1.0, "low": 0.5, "high": 1.0}, "recognisable is given, but not scores"),
        ("entries.1.reveals", "features", "labels reveals labels, not features"),
        ("entries.1.verdict", "withstood", "the rules say 'leaks': 8 of 8 labels"),
        ("entries.2.attack", "labels", "labels has the role attack, not floor"),
        ("entries.2.reveals", "labels", "chance reveals features, not labels"),
    ],
)
def test_a_claim_about_features_that_does_not_follow_is_refused(
    tmp_path: Path, path: str, value: object, message: str
) -> None:
    folder = board_folder(tmp_path)
    with pytest.raises(AdmissionError) as caught:
        admit(write(folder, changed(path, value, json.loads(submitted_text()))), folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_features_without_their_guess_are_refused(tmp_path: Path) -> None:
    folder, content = board_folder(tmp_path), json.loads(submitted_text())
    del content["entries"][2]
    with pytest.raises(AdmissionError, match="over floor is given, but not the entry to compare with"):
        admit(write(folder, content), folder)


def test_what_is_right_or_wrong_is_a_share_of_the_trials_of_a_picture() -> None:
    shares = [1.0, 0.0, 1.0, 1.0] * 8
    entry = judged(telling("labels", shares, seeds=4))
    assert set(entry.scores["label_accuracy"].values()) == {0.75}
    assert [*impossible_figures(entry)] == []
    halved = entry.model_copy(update={"scores": {"label_accuracy": entry.scores["label_accuracy"] | {"p0": 0.4}}})
    (reason,) = impossible_figures(halved)
    assert reason == "label_accuracy of 'p0' is 0.4; it can be 0 or 1, or the mean of 4 trials at most"


def test_what_works_on_pictures_refuses_what_reveals_none() -> None:
    with pytest.raises(ConfigError, match="reassembly works on pictures; labels reveals labels"):
        AttackConfig.parse({"name": "labels", "then": "reassembly"})
    adversary = Adversary(small_model(), ThreatModel(), 0)
    with pytest.raises(AttackNotApplicableError, match="chance: reassembly works on pictures"):
        adversary.reconstruct("chance", [], {}, then="reassembly", on_progress=lambda *_: None)
    for name in ("gradient_matching", "mjp_matching"):
        with pytest.raises(BadInputError):
            AttackConfig.parse({"name": name, "options": {"start": "labels"}}).refusal(small_model(), ThreatModel())
    adversary = Adversary(small_model(), ThreatModel(labels_known=True), 0)
    with pytest.raises(AttackNotApplicableError, match="nothing to find out"):
        adversary.reconstruct("labels", [], {}, on_progress=lambda *_: None)


def test_python_scores_what_an_attack_tells(pictures: Selection) -> None:
    scenario, model = small_scenario(batch_size=2, pictures_per_client=2), small_model()
    first, second = (
        scenario.exchange([pictures.load(entry) for entry in pictures.entries[place : place + 2]], model=model)
        for place in (0, 2)
    )
    labels = facade.attack("labels", first.upload, scenario, model=model)
    assert {name: value.tolist() for name, value in facade.score(labels, first.private).items()} == {
        "label_accuracy": [1, 1]
    }
    guess = facade.attack("chance", first.upload, scenario, model=model)
    scored = facade.score(guess, first.private, model=model, gallery=[second.private])
    assert set(scored) == set(DISCLOSED)
    with pytest.raises(BadInputError, match="give the model"):
        facade.score(guess, first.private)


def test_recorded_uploads_have_the_gallery_of_direct_ones(tmp_path: Path) -> None:
    scenario, folder = (
        small_scenario(defences="mjp", clients=2, batch_size=2, pictures_per_client=2),
        RunFolder(tmp_path),
    )
    record_directly([scenario], folder)
    experiment = Experiment.parse({"scenario": scenario, "attacks": ("chance",), "settings": (Setting.C,)})
    recorded = {one.pictures: one for one in RecordedUploads(experiment, folder).private()}
    direct = {one.pictures: one for one in DirectUploads(experiment, select_for(scenario)).private()}
    assert recorded.keys() == direct.keys()
    assert len(direct) == 2
    for pictures, one in direct.items():
        assert torch.equal(one.shuffled, recorded[pictures].shuffled)
        assert torch.equal(one.mask, recorded[pictures].mask)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[OutputFolder, Prepared, str]:
    """A campaign of labels and features alone, run and rendered; and what the terminal showed."""
    campaign = Campaign.parse(
        {
            "name": "disclosures",
            "data": {"pictures": 8},
            "shared": {"models": ["deit_tiny"], "attacks": ["labels", "chance"], "threats": [{"batch_size": 1}]},
            "grids": [
                {"defences": [{"name": "withhold", "roles": "body"}, "secure_sum:clients=2"], "settings": ["a"]},
                {"defences": ["mjp"], "settings": ["c"]},
            ],
            "image_size": 64,
            "patch_size": 8,
        }
    )
    prepared = prepare(campaign, device="cpu", command="fedmjp campaign run disclosures.yaml")
    output = OutputFolder(tmp_path_factory.mktemp("disclosures"))
    output.prepare(fresh=False)
    store, console = output.store(), Console(file=io.StringIO(), width=200)
    for part in prepared.plan.parts:
        source = DirectUploads(part.experiment, prepared.selection)
        run_experiment(Engine(part.experiment, source), part.trials, Recorder(output, store, RunProgress()))
    assert render(prepared.plan, store, output, console, figure=True).empty
    assert verify(output, prepared.plan, store).problems == []
    return output, prepared, console.file.getvalue()


def test_a_campaign_of_labels_alone_ends_with_a_table_and_without_pictures(
    rendered: tuple[OutputFolder, Prepared, str],
) -> None:
    output, _, text = rendered
    table = pd.read_csv(output.root / "leaderboard.csv")
    assert set(table["reveals"]) == {"labels", "features"}
    ours = table[table["attack"] == "labels"]
    assert (ours["label_accuracy_mean"] == 1).all()
    assert dict(zip(ours["uploads"], ours["verdict"], strict=True)) == {8: "leaks", 4: "inconclusive"}
    assert set(ours["defence"]) == {"none", "mjp", "withhold:roles=body", "secure_sum:clients=2"}
    assert {"psnr_mean", "median", "recognisable_share"} <= set(ours.columns)
    assert (
        ours[["psnr_mean", "median", "recognisable_share", "feature_error_median", "rank1_mean"]].isna().all(axis=None)
    )
    assert not (output.root / "reconstructions.jpg").exists()
    assert "What else leaks: features and labels" in text
    assert "dB" not in text.split("What else leaks")[1]


def test_chance_is_at_chance_level(rendered: tuple[OutputFolder, Prepared, str]) -> None:
    table = pd.read_csv(rendered[0].root / "leaderboard.csv")
    guesses = table[table["attack"] == "chance"]
    assert (guesses["role"] == "floor").all()
    assert guesses["rank1_mean"].tolist() == [1 / 8] * len(guesses), "one of eight pictures"
    assert guesses["rank5_crop_mean"].tolist() == [5 / 8] * len(guesses)
    assert (guesses["label_accuracy_mean"] < 0.2).all()
    assert (guesses["feature_error_median"] > 1).all(), "worse than the mean of the batch"
    assert guesses["psnr_mean"].isna().all()


def test_the_page_of_labels_alone_shows_them_and_no_section_of_pictures(
    rendered: tuple[OutputFolder, Prepared, str],
) -> None:
    page = (rendered[0].root / "leaderboard.html").read_text(encoding="utf-8")
    assert 'id="disclosed"' in page
    assert "labels tells 8 of 8 labels: leaks." in page
    for absent in ('id="matrix"', 'id="results"', 'id="plots"', "40 dB or more"):
        assert absent not in page
    written = (rendered[0].root / "leaderboard.md").read_text(encoding="utf-8")
    assert "| labels" in written
    assert "labels right: share of pictures" in written


def test_a_mixed_board_keeps_pictures_first_and_adds_the_section(tmp_path: Path) -> None:
    rows = [
        Row(cell("april", "none"), near(80)),
        Row(cell("grey", "none"), [12.5] * 8),
        telling("features", [1.0] * 8),
        chance(8),
    ]
    shown = board(*rows, metrics=METRICS)
    publish(shown, tmp_path, formats=("html", "md", "csv", "latex"), pictures=None)
    page = (tmp_path / "leaderboard.html").read_text(encoding="utf-8")
    assert page.index('id="matrix"') < page.index('id="disclosed"')
    sections = (tmp_path / "leaderboard.md").read_text(encoding="utf-8").split("## What else leaks")
    assert "tells\\_features" not in sections[0].split("## Notes")[0]
    assert "tells_features" in sections[1]
    of_pictures, of_features = (tmp_path / "leaderboard.tex").read_text(encoding="utf-8").split(r"\end{table}")[:2]
    assert r"tells\_features" not in of_pictures
    assert "features exact & feature error, median & labels right" in of_features
    assert r"0 of 8 (0 to 32 \%)" in of_features, "the interval of Wilson for none of eight"
    table = pd.read_csv(tmp_path / "leaderboard.csv").set_index("attack")
    assert pd.isna(table.loc["april", "rank1_mean"])
    assert pd.isna(table.loc["tells_features", "psnr_mean"])


def test_the_command_ends_well_with_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert attack(monkeypatch, tmp_path, "labels", "--batch-size", "1") == 0
    shown = capsys.readouterr().out
    (row,) = (line.split() for line in shown.splitlines() if line.split()[2:3] == ["labels"])
    assert row[-1] == "100", "% of the labels are right"
    assert "reconstructions.jpg" not in shown
    assert attack_board(tmp_path).set_index("attack").loc["labels", "verdict"] == "leaks"
