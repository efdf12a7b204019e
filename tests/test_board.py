"""The board as a whole: pairs, figures, notes, JSON."""

import hashlib
import io
import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.entries import Board, entry_id, read_reported
from fedmjp.benchmarks.leaderboard.pairing import Pairs
from fedmjp.benchmarks.plan.experiment import AttackConfig, experiments_of
from fedmjp.benchmarks.plan.planning import plan
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.report.texts import csv_text, markdown_text
from fedmjp.cli.leaderboard import show
from fedmjp.errors import OutputError, RecordError, UnknownNameError
from fedmjp.provenance import _add_source
from fedmjp.scenario import Scenario
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel
from tests.boards import ABOUT, ENVIRONMENT, ENVIRONMENTS, PICTURES, Row, board, cell, entry, grey, ledger_of, near

UNDEFENDED = Row(cell(defence="none"), near(80))


def whole() -> list[Row]:
    return [
        Row(cell(), near(12.6), adapted=True),
        grey(),
        UNDEFENDED,
        grey("none"),
        Row(cell(setting="c"), [*near(12.6)[:-2], "broke down", None]),
        Row(cell("patch"), refusal="does not apply"),
        Row(cell("oracle", role="bound"), near(200)),
    ]


def test_every_cell_gives_one_entry_in_its_order():
    rows = whole()
    found = board(*rows).entries
    assert [each.cell for each in found] == [row.cell for row in rows]
    assert len({each.id for each in found}) == len(rows)
    assert [each.n for each in found] == [8, 8, 8, 8, 6, 0, 8]


def test_a_ledger_without_any_trial_gives_a_board():
    ledger, trials = ledger_of(whole())
    found = board_of(ledger, trials.iloc[:0], {})
    assert {each.verdict for each in found.entries} == {"incomplete", "refused", "floor", "bound"}
    assert all(each.rank is None for each in found.standings)


def test_ranks_are_shared_where_medians_are_the_same_to_a_tenth_of_a_decibel():
    levels = {"clip": 25.0, "gaussian": 25.04, "laplace": 25.3, "sign": 26.0}
    rows = [row for name, level in levels.items() for row in (Row(cell(defence=name), [level] * 8), grey(name))]
    found = board(*rows, UNDEFENDED, grey("none")).standings
    assert {each.defence: each.rank for each in found if each.defence in levels} == dict(
        zip(levels, (1, 1, 3, 4), strict=True)
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    ledger, _ = ledger_of([UNDEFENDED, grey("none")])
    ledger.save(tmp_path)
    store = OutputFolder(tmp_path).store()
    store.close()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "leaderboard.md").mkdir()
    with pytest.raises(OutputError, match=r"out cannot be written: Is a directory; name another --output$"):
        show([tmp_path], formats=["md"], output=tmp_path / "out", pictures=False)


def test_json_comes_back_as_it_was_with_numbers_that_are_numbers():
    rows = [*whole(), Row(cell(defence="none", model="capped"), [200.0] * 8)]
    ledger, trials = ledger_of(rows)
    found = board_of(ledger, trials, ENVIRONMENTS, reported=read_reported(["mjp_table5"]))
    text = found.model_dump_json()
    assert Board.model_validate_json(text) == found
    assert not re.search(r"\b(NaN|-?Infinity)\b", text)
    assert isinstance(json.loads(text)["entries"][0]["metrics"]["psnr"]["mean"], float)


def test_the_ledger_read_from_disk_gives_the_same_board(tmp_path):
    ledger, trials = ledger_of(whole())
    ledger.save(tmp_path)
    found = [board_of(each, trials, ENVIRONMENTS) for each in (ledger, TrialPlan.load(tmp_path))]
    assert found[0].entries == found[1].entries
    assert found[0].standings == found[1].standings


def test_figures_are_over_pictures_each_with_the_mean_over_its_seeds():
    leakage = [10.0, 20, 12, 14, 13, 15]  # three pictures, two seeds
    found = entry(Row(cell(), leakage, seeds=2))
    assert found.scores["psnr"] == {"p0": 15, "p1": 13, "p2": 14}
    assert found.metrics["psnr"].mean == 14
    assert found.metrics["psnr"].worst == 20
    assert found.metrics["mse"].worst == pytest.approx(10**-2)
    assert (found.n, found.trials, found.provenance.seeds) == (3, 6, (0, 1))


def test_uploads_are_those_of_the_plan_also_where_a_trial_failed_and_a_picture_is_flat():
    """Four uploads of two pictures: one of the first failed, one of the second is flat; all at two seeds."""
    leakage = [10.0, 20, "broke down", "broke down", *np.arange(12.0)]
    row = Row(cell(threat=ThreatModel(batch_size=2)), leakage, seeds=2, colours=[10, 10, 30, *[10] * 5])
    found = entry(row)
    assert found.together == {"p0": 0, "p3": 1, "p4": 2, "p5": 2, "p6": 3, "p7": 3}
    assert (found.n, found.uploads, found.metrics["psnr"].mean) == (6, 4, np.mean([15, 2.5, 4.5, 6.5, 8.5, 10.5]))
    one_each = entry(replace(row, leakage=[10.0, 20, "broke down", "broke down"]))
    assert (one_each.n, one_each.uploads, one_each.together) == (1, 1, {})


def test_a_share_has_the_interval_of_uploads_and_a_table_says_how_many():
    found = board(Row(cell(threat=ThreatModel(batch_size=2)), [75.0] * 4 + [12.0] * 4))
    assert (found.entries[0].exact.low, found.entries[0].exact.high) == pytest.approx(
        stats.binomtest(2, 4).proportion_ci(method="wilson"), abs=1e-9
    )
    assert "8 of 4 uploads" in markdown_text(Report(found))
    assert pd.read_csv(io.StringIO(csv_text(Report(found))))["uploads"].tolist() == [4]


def test_a_failed_trial_is_in_no_mean():
    found = entry(Row(cell(), [10.0, "broke down", 20.0]))
    assert (found.n, found.trials, found.failures, found.metrics["psnr"].mean) == (2, 2, 1, 15)


def test_pairs_hold_the_pictures_that_both_have():
    late = replace(UNDEFENDED, leakage=[None, None, *near(80)[2:]])
    found = entry(Row(cell(), [*near(12.6)[:-1], None]), late, grey())
    assert (found.over_twin.n, found.over_floor.n) == (5, 7)
    assert found.over_twin.mean == pytest.approx(
        np.mean(np.array(near(12.6)) - near(80), where=[0, 0, 1, 1, 1, 1, 1, 0])
    )


@pytest.mark.parametrize("setting", ["a", "b", "c"])
def test_twins_are_undefended_or_lack_one_defence_of_several(setting):
    levels = {("mjp", "gaussian"): 20.0, "mjp": 30.0, "gaussian": 50.0, "none": 80.0}
    rows = [
        Row(cell(defence=defence, setting=setting if "mjp" in defence else "a"), near(level))
        for defence, level in levels.items()
    ]
    both, mjp, gaussian, none = board(*rows).entries
    assert {each.twin for each in (both, mjp, gaussian)} == {none.id}
    assert (none.twin, none.marginal, mjp.marginal) == (None, (), ())
    assert [(each.defence, each.twin) for each in both.marginal] == [("mjp", gaussian.id), ("gaussian", mjp.id)]
    assert [each.difference.mean for each in both.marginal] == pytest.approx([-30, -10])


def test_a_gain_is_not_measured_against_another_setting_or_other_options():
    both = Row(cell(defence=("mjp", "gaussian"), setting="c"), near(20))
    others = [cell(defence="mjp", setting="b"), cell(defence="mjp:mask_ratio=0.5", setting="c")]
    others += [
        cell(defence="gaussian:noise=0.5"),
        cell("other", defence="gaussian"),
        cell(defence="jigsaw", setting="c"),
    ]
    assert entry(both, *(Row(other, near(30)) for other in others)).marginal == ()


@pytest.mark.parametrize("defences", ["none", "jigsaw", "mjp", "gaussian", ("mjp", "gaussian"), ("jigsaw", "gaussian")])
def test_every_twin_that_is_planned_is_found(defences):
    scenario = Scenario(model={"name": "deit_tiny", "image_size": 64, "patch_size": 8}, defences=defences)
    experiments = experiments_of(
        scenario, tuple(Setting), [AttackConfig(name="patch_embedding"), AttackConfig(name="grey")], mask_ratio=0.27
    )
    cells = plan(experiments, [[]] * len(experiments), uploads="direct").cells
    pairs = Pairs(cells)
    for each in cells:
        if each.role == "attack" and each.defences:
            twin, without = pairs.twin(each), pairs.without_each(each)
            assert (twin.defences, twin.setting, twin.attack) == ((), "a", each.attack)
            assert len(without) == (len(each.defences) if len(each.defences) > 1 else 0)
            assert all(set(other.defences) < set(each.defences) for other in without.values())


@pytest.mark.parametrize(
    "changes", [{"model": "other"}, {"attack": "other"}, {"protocol": "8bit"}, {"threat": ThreatModel(batch_size=2)}]
)
def test_the_twin_is_the_same_attack_on_the_same_model(changes):
    assert entry(Row(cell(), near(30)), UNDEFENDED).twin is not None
    assert entry(Row(cell(), near(30)), UNDEFENDED.on(**changes)).twin is None


def test_the_twin_may_have_other_weights_if_it_is_the_only_one():
    row = Row(cell(weights="mjp"), near(30))
    first, second = UNDEFENDED.on(weights="one"), UNDEFENDED.on(weights="two")
    found = board(row, first)
    assert found.entries[0].twin == found.entries[1].id
    assert any("other weights" in note and "deit-mjp" in note for note in found.notes)
    assert entry(row, first, second).twin is None
    found = board(row, first, UNDEFENDED.on(weights="mjp"))
    assert found.entries[0].twin == found.entries[2].id


def test_the_guess_is_that_of_the_same_cell_or_any_at_the_same_pictures():
    row = Row(cell(), near(30))
    found = board(row, grey("none"), grey(), grey("none", "c"))
    assert found.entries[0].floor == found.entries[2].id
    assert entry(row, grey("none", "c")).floor is not None
    assert entry(row, grey("none", "b")).floor is None
    assert entry(row, grey(protocol="8bit")).floor is None
    assert entry(Row(cell(setting="b"), near(30)), grey("none", "b", mask_ratio=0.5)).floor is None


def test_a_metric_that_could_not_be_computed_is_absent():
    rows = [Row(cell(), near(30), scores={"lpips_alex": None}), grey()]
    found = board(*rows, metrics=["psnr", "lpips_alex"])
    assert set(found.entries[0].metrics) == {"psnr"}
    assert any(note.startswith("lpips_alex is empty: ") for note in found.notes)


@pytest.mark.parametrize("score", [float("inf"), float("nan"), None])
def test_a_finished_trial_without_leakage_is_an_error_that_names_it(score):
    with pytest.raises(RecordError, match="Trial 0-0 has finished, but a score is no finite number"):
        entry(Row(cell(), near(30), scores={"psnr": score}))


def test_share_of_recognisable_pictures_uses_the_threshold_of_the_campaign():
    row = Row(cell(), [10.0, 15, 18, 25])
    assert entry(row).recognisable.share == 0.25
    assert entry(row, recognisable_at=15).recognisable.share == 0.75


def test_the_share_recovered_exactly_is_from_40_decibels_on_with_wilsons_interval():
    found = entry(Row(cell(), [39.9, 40.0, 75.0, 12.0])).exact
    assert (found.share, found.low, found.high) == pytest.approx((0.5, 0.150, 0.850), abs=1e-3)
    assert board(*whole()).entries[5].exact is None, "refused"


def test_provenance_cost_and_utility():
    found = board(*whole()).entries
    assert found[0].provenance.environments == (ENVIRONMENT,)
    assert found[0].provenance.first == "2026-11-20T12:00:00+00:00"
    assert (found[0].cost.attack_seconds, found[0].cost.upload_bytes, found[0].realised_ratio) == (2, 1000, 0.25)
    assert (found[0].utility, found[2].utility.top1) == (None, 79.8)
    assert found[0].provenance.pictures_sha256 == found[2].provenance.pictures_sha256


def test_ids_tell_cells_campaigns_pictures_and_origins_apart():
    values = [cell(), cell("patch")], ["one", "two"], ["p", "q"], ["reproduced", "submitted"]
    ids = {entry_id(a, b, c, d) for a in values[0] for b in values[1] for c in values[2] for d in values[3]}
    assert len(ids) == 16
    assert entry_id(cell(), "one", "p", "reproduced") == entry_id(cell(), "one", "p", "reproduced")


def test_notes_are_those_that_apply():
    notes = "\n".join(board(*whole()).notes)
    for part in (
        "Rows marked bound",
        "untrained",
        "1 trials failed",
        "1 trials are not run yet",
        "A note of the campaign",
    ):
        assert part in notes
    assert "No attack here is adapted" not in notes
    assert "In (a) nothing is shuffled: of mjp only" in notes
    assert "shuffles and does nothing else" not in notes
    assert "jigsaw shuffles and does nothing else" in "\n".join(
        board(Row(cell(defence="jigsaw", setting="c"), near(30))).notes
    )
    assert "_april" not in notes
    assert "No attack here is adapted to mjp." in "\n".join(board(Row(cell(), near(30))).notes)
    assert "_april" in "\n".join(board(Row(cell(model="deit_april"), near(30))).notes)
    assert "prior was made of" in "\n".join(board(Row(cell(), near(30), left_out=2)).notes)


def test_about_is_the_manifest():
    about = board(*whole()).about
    assert about["trials"]["planned"] == 48
    assert set(about["pictures"]) == set(PICTURES)
    assert about["command"] == ABOUT["command"]


def test_table_5_stands_as_printed():
    rows = read_reported(["mjp_table5"])
    assert len(rows) == 10
    assert [row.setting for row in rows] == ["a"] * 4 + ["b"] * 4 + ["a", "c"]
    figures = {(row.model, row.setting): row for row in rows}
    assert figures["DeiT-S+MJP", "c"].metrics == {
        "mse": 0.1706, "fft2d": 0.0338, "psnr": 8.07, "ssim": 0.0875, "lpips_alex": 0.8945,
    }  # fmt: skip
    # Row (3) repeats five columns of row (2), and says so.
    assert figures["DeiT-S+MJP (w/o)", "a"].metrics == figures["DeiT-S+MJP", "b"].metrics
    assert "repeat row (2)" in figures["DeiT-S+MJP (w/o)", "a"].differs


def test_models_that_the_reported_rows_name_exist():
    from fedmjp.models.build import architecture

    for row in read_reported(["mjp_table5"]):
        if row.compares_with:
            architecture(row.compares_with)


def test_an_unknown_table_is_named():
    with pytest.raises(UnknownNameError, match="Did you mean mjp_table5"):
        read_reported(["mjp_table6"])


def test_summarising_leaves_the_keys_of_trials_alone(tmp_path):
    def digest() -> str:
        found = hashlib.sha256()
        _add_source(found, tmp_path, tmp_path)
        return found.hexdigest()

    for name in ("leaderboard/reported/table.json", "leaderboard/verdicts.py", "engine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    before = digest()
    (tmp_path / "leaderboard/reported/table.json").write_text("2")
    (tmp_path / "leaderboard/verdicts.py").write_text("2")
    assert digest() == before
    (tmp_path / "engine.py").write_text("2")
    assert digest() != before
