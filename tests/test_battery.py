"""Batteries: what every model and defence is tried with, and how their version stands in what is said."""

import json
from pathlib import Path

import pandas as pd
import pytest

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.campaign import battery as batteries
from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.leaderboard.entries import Board
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.cli import main
from fedmjp.cli.campaign_run import not_run
from fedmjp.defences import DEFENCES
from fedmjp.errors import ConfigError
from fedmjp.zoo import zoo_model
from tests.studies import load_study

by_view = load_study("defences/by_view.py")

SMALL = """\
name: small
version: 7
searched: 2
views:
  - name: one gradient
    attacks: [patch_embedding, grey]
    searches: [patch_embedding_wiener]
  - name: sums only
    sum_of: 2
    attacks: [labels, chance]
  - name: a head of its own making
    threat: {batch_size: 2}
    server: class_fishing
    attacks: [patch_embedding, grey]
"""
BAD_INPUT = 2


def benchmark(*arguments: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fedmjp", "benchmark", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A battery of little work."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setattr(batteries, "FOLDER", tmp_path)
    return "small"


@pytest.mark.parametrize("name", batteries.batteries())
def test_every_view_has_the_guess_that_its_attacks_are_read_against(name: str) -> None:
    battery = batteries.read_battery(name)
    assert battery.name == name
    for view in battery.views:
        revealed = {ATTACKS.get(attack.name)(attack.options).reveals for attack in (*view.attacks, *view.searches)}
        floors = {MEASURES[what].floor for what in revealed}
        assert floors <= {attack.name for attack in view.attacks}, view.name


def test_one_call_gives_a_defence_its_row_before_every_server(small: str, tmp_path: Path) -> None:
    size = ("--model", "deit_tiny", "--image-size", "32", "--patch-size", "8", "--pictures", "4")
    assert benchmark("--battery", small, *size, "--defence", "clip", "--output", tmp_path / "made") == 0
    rows = pd.read_csv(tmp_path / "made" / "leaderboard.csv")
    clipped = rows[rows["defence"].str.startswith("clip")]
    assert set(clipped["threat_server"]) == {"honest", "class_fishing"}
    assert set(clipped["defence"]) == {"clip", "clip + secure_sum:clients=2"}
    searched = rows[(rows["attack"] == "patch_embedding_wiener") & (rows["defence"] == "clip")]
    assert searched["n"].tolist() == [2]
    # A factor is on both sides of the closed form's equation: clipping takes nothing from it.
    exact = clipped[(clipped["attack"] == "patch_embedding") & (clipped["threat_server"] == "honest")]
    assert (exact["psnr_median"] > 60).all()
    board = json.loads((tmp_path / "made" / "leaderboard.json").read_text())
    assert all(entry["reason"].endswith("battery small 7") for entry in board["entries"] if entry["n"])
    assert board["about"]["battery"] == "small 7"
    shown = by_view.tables(Board.parse(board))["deit_tiny, untrained, pictures"].set_index("defence")
    assert str(shown.loc["clip", "one gradient"]).startswith("4 of 4, ")
    assert shown.loc["clip", "sums only"] == by_view.NOTHING  # nothing there reveals pictures


def test_a_view_that_cannot_be_says_why_and_the_others_are_run(small: str) -> None:
    campaign = Campaign.parse(
        {
            "name": "rows",
            "battery": small,
            "data": {"pictures": 3},
            "rows": [{"models": ["deit_tiny"], "defences": ["none", "withhold:roles=head"]}],
            "metrics": ["psnr"],
        }
    )
    assert [reason.partition(":")[0] for reason in campaign.not_run] == [
        "sums only, none",
        "a head of its own making, none",
        "sums only, withhold",
        "a head of its own making, withhold",
    ]
    assert "3 pictures make no whole uploads, which are of 2 each" in campaign.not_run[0]
    assert len(campaign.tried) == 4  # one gradient: all, and searches, of both rows


def test_a_search_that_does_not_know_a_defence_is_not_run_and_the_board_says_so(small: str) -> None:
    rows = [{"models": ["deit_tiny"], "defences": ["clip", "jigsaw"]}]
    campaign = Campaign.parse(
        {"name": "rows", "battery": small, "data": {"pictures": 4}, "rows": rows, "metrics": ["psnr"]}
    )
    searched = [grid.defences[0][0].name for grid in campaign.tried if grid.attacks[0].name == "patch_embedding_wiener"]
    assert searched == ["clip"]
    assert list(campaign.not_run) == [
        "one gradient, jigsaw: patch_embedding_wiener: take long, and do not apply or do not know the defence"
    ]


def test_several_uploads_are_looked_at_where_clients_draw_something(small: str, tmp_path: Path) -> None:
    again = """\
  - name: the same picture again
    threat: {uploads_per_picture: 3}
    attacks: [mjp_intersection, grey]
    searches: [patch_embedding_degraded]
"""
    first, *others = SMALL.partition("  - name: sums only")
    (tmp_path / "small.yaml").write_text(first + again + "".join(others))
    rows = [{"models": ["deit_tiny"], "defences": ["prune:kept=0.5", "gaussian", ["clip", "quantise"]]}]
    data = {"pictures": 2, "source": "bundled"}
    campaign = Campaign.parse({"name": "rows", "battery": small, "data": data, "rows": rows, "metrics": ["psnr"]})
    several = [grid for grid in campaign.tried if grid.views[0].get("uploads_per_picture")]
    assert [grid.defences[0][0].name for grid in several] == ["gaussian", "gaussian", "clip", "clip"]
    said = "the same picture again, prune:kept=0.5: a picture's uploads would be the same: what one says holds"
    assert said in campaign.not_run
    view, views = batteries.read_battery(small).views[1], batteries.read_battery(small).views
    pruned, noisy, _ = campaign.rows[0].defences
    assert by_view.once(view, views, pruned) == "one gradient"
    assert by_view.once(view, views, noisy) == ""
    crops = view.model_copy(update={"threat": {**view.threat, "crop_scale": 0.5}})
    assert not crops.repeats(pruned), "each upload shows another crop"


def test_of_many_reasons_why_nothing_is_run_one_is_told_and_how_many_there_are() -> None:
    reasons = [f"one gradient, row {number}: it takes long" for number in range(9)]
    assert not_run(reasons[:8]) == [f"Not run: {reason}" for reason in reasons[:8]]
    (line,) = not_run(reasons)
    assert "9 views" in line
    assert line.endswith(reasons[0])


def test_searches_have_uploads_not_pictures() -> None:
    servers = {view.server.name: view for view in batteries.read_battery("standard").views if view.server}
    view = servers["suppression"]
    assert {grid["pictures"] for grid in view.grids(("deit_tiny",), (), 8)[1:]} == {64}  # eight sums over eight clients


def test_the_campaign_of_defences_tries_every_defence_on_models_of_the_zoo() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "campaigns" / "defences.yaml"
    campaign = read_campaign(path, ["data.source=bundled"])
    tried = {config.name for rows in campaign.rows for defences in rows.defences for config in defences}
    assert tried == set(DEFENCES) - {"laplace", "pixels"}  # as gaussian and jigsaw, less known
    experiments = campaign.experiments(device="cpu")
    trained = {
        experiment.scenario.network.weights.sha256 for experiment in experiments if experiment.scenario.network.weights
    }
    zoo = ("coarse-none-0", "coarse-mjp-0", "wide-none-0", "wide-mjp-0")
    assert trained == {zoo_model(name).sha256 for name in zoo}
    assert {
        experiment.scenario.network.patch_size
        for experiment in experiments
        if experiment.scenario.network.name == "deit_mini"
    } == {4}


@pytest.mark.parametrize(
    ("model", "said"),
    [("zoo:coarse-none-0", "set image_size to that"), ("zoo:coarse-non-0", "Did you mean zoo:coarse-none-0")],
)
def test_a_model_of_the_zoo_that_does_not_fit_is_told(model: str, said: str) -> None:
    grids = [{"models": [model], "attacks": ["grey"]}]
    with pytest.raises(ConfigError, match=said):
        Campaign.parse({"name": "zoo", "grids": grids, "metrics": ["psnr"]}).experiments(device="cpu")


def test_the_guess_is_scored_where_all_that_attacks_read_is_withheld(small: str, tmp_path: Path) -> None:
    size = ("--model", "deit_tiny", "--image-size", "32", "--patch-size", "8", "--pictures", "2")
    assert benchmark("--battery", small, *size, "--defence", "withhold", "--output", tmp_path / "made") == 0
    rows = pd.read_csv(tmp_path / "made" / "leaderboard.csv")
    withheld = rows[(rows["defence"] == "withhold") & (rows["threat_server"] == "honest")].set_index("attack")
    assert withheld.loc["patch_embedding", "verdict"] == "refused"
    assert withheld.loc["grey", "n"] == 2


def test_what_is_no_battery_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark("--battery", "standart") == BAD_INPUT
    assert "there is no battery 'standart', did you mean 'standard'?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="give both or neither"):
        Campaign.parse(
            {"name": "half", "battery": "standard", "grids": [{"models": ["deit_tiny"], "attacks": ["grey"]}]}
        )
    with pytest.raises(ConfigError, match="name one at least"):
        Campaign.parse({"name": "empty"})
