"""Leakage against accuracy: the front, intervals that hold what they should, federations that differ in one thing."""

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from fedmjp.benchmarks.folder.study import keep_rows
from fedmjp.benchmarks.report.drawing import CEILING, STYLE
from fedmjp.defences.pipeline import pipeline_of
from fedmjp.errors import BadInputError
from tests.conftest import ROOT
from tests.studies import load_study

trade_off = load_study("defences/trade_off.py")
Point, accuracy, drawn, joined, of_one_gradient = (
    trade_off.Point, trade_off.accuracy, trade_off.drawn, trade_off.joined, trade_off.of_one_gradient,
)  # fmt: skip
on_front, point, spread, table = trade_off.on_front, trade_off.point, trade_off.spread, trade_off.table
training_cost, trained_under = load_study("training_cost/study.py"), load_study("trained_under/study.py")

BOARD = ROOT / "results" / "defences"


def wilson(hits: int, n: int, z: float) -> float:
    """An end of Wilson's interval, by its formula: the upper one where z is above zero."""
    share = hits / n
    root = np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return float((share + z * z / (2 * n) + z * root) / (1 + z * z / n))


def made(name: str, leakage: float, top1: float, central: float = 0) -> Point:
    leaks, right, elsewhere = ((each, each - 1, each + 1) for each in (leakage, top1, central))
    return Point(name, leaks, right, "mjp_prior", elsewhere)


POINTS = [
    made("none", 48, 13),
    made("free", 20, 13),
    made("worse", 30, 12),
    made("dear", 0, 3),
    made("as dear", 0, 3),
]


def test_the_front_has_what_nothing_else_beats_and_both_of_two_that_are_alike() -> None:
    assert [one.defence for one in POINTS if on_front(one, POINTS)] == ["free", "dear", "as dear"]


def test_a_defence_that_leaks_at_other_weights_is_no_better_for_attacks_that_failed_at_its_own() -> None:
    failed = made("failed", 1, 12, central=25)
    assert [one.defence for one in [*POINTS, failed] if on_front(one, [*POINTS, failed])] == ["free", "dear", "as dear"]


def test_the_interval_of_top1_is_wilsons_from_the_lowest_seed_to_the_highest() -> None:
    runs = pd.DataFrame({"top1": [0.1, 0.12], "validation_pictures": [1600, 1600]})
    middle, low, high = accuracy(runs)
    assert (middle, low, high) == pytest.approx(
        (11, 100 * wilson(160, 1600, -1.959964), 100 * wilson(192, 1600, 1.959964))
    )


def scores(*rows: tuple[int, str, str, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["seed", "picture", "attack", "psnr"])


def test_leakage_is_of_the_attack_with_the_largest_median_gain_over_the_guess_of_the_same_picture() -> None:
    runs = pd.DataFrame({"top1": [0.1], "validation_pictures": [1600], "seed": [0]})
    rows = scores(
        *((0, f"p{place}", "grey", 10.0 + place) for place in range(3)),
        *((0, f"p{place}", "near", 13.0 + 2 * place) for place in range(3)),
        (0, "p0", "search", 300.0),
        (0, "p1", "search", 11.0),
    )
    central = rows.assign(defence="none", psnr=lambda each: each["psnr"] + (each["attack"] == "near"))
    assert point("none", runs, rows, central).attack == "search"
    weaker, others = (each[each["attack"] != "search"] for each in (rows, central))
    assert point("none", runs, weaker, others).leakage[0] == pytest.approx(4)
    assert point("none", runs, weaker, others).central[0] == pytest.approx(5)
    with pytest.raises(BadInputError, match=r"no row of sign: give --board"):
        point("sign", runs, rows, central)


@pytest.mark.parametrize(("missing", "left"), [("grey", "near"), ("near", "grey")])
def test_leakage_without_a_guess_or_an_attack_is_told(missing: str, left: str) -> None:
    runs = pd.DataFrame({"top1": [0.1], "validation_pictures": [1600], "seed": [0]})
    rows = scores((0, "p", "grey", 10.0), (0, "p", "near", 11.0)).assign(defence="sign")
    with pytest.raises(BadInputError, match=f"of sign there are {left}: grey and an attack are needed"):
        point("sign", runs, rows, rows[rows["attack"] != missing])


def test_weights_that_nobody_attacked_are_told() -> None:
    runs = pd.DataFrame({"top1": [0.1, 0.2], "validation_pictures": [1600, 1600], "seed": [0, 1]})
    rows = scores((0, "p", "grey", 10.0), (0, "p", "near", 11.0)).assign(defence="sign")
    with pytest.raises(BadInputError, match=r"sign, seeds \[1\]"):
        point("sign", runs, rows, rows)


def test_the_interval_of_leakage_holds_seeds_that_differ() -> None:
    """Of two seeds that differ by 10 dB, a quarter of the resamples each has one seed alone."""
    places = pd.MultiIndex.from_product([[0, 1], list("abcdef")], names=["seed", "picture"])
    assert spread(pd.Series([1.0] * 6 + [11.0] * 6, index=places)) == pytest.approx((6, 1, 11))


def test_the_boards_rows_have_the_medians_of_its_table() -> None:
    """The page's table is made another way, by the board's verdicts."""
    said = (BOARD / "README.md").read_text().split("## Pictures: 16 tokens")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith("| `")]
    printed = {
        name: re.search(r", ([\d.]+)", cell) for names, cell, *_ in rows for name in re.findall("`(.*?)`", names)
    }
    medians = of_one_gradient(BOARD).groupby(["defence", "attack"])["psnr"].median().unstack()
    named = {name: float(median[1]) for name, median in printed.items() if median}
    capped = {name: min(CEILING, value) for name, value in named.items()}  # above it the table has the larger n
    assert {name: min(CEILING, medians.loc[name].max()) for name in named} == pytest.approx(capped, abs=0.051)
    assert len(named) > len(training_cost.DEFENCES)


def test_a_defence_is_of_the_last_folder_that_has_it_in_a_partition(tmp_path: Path) -> None:
    columns = ["defence", "partition", "top1"]
    first = [("none", "iid", 1.0), ("none", "dirichlet", 2.0), ("sign", "iid", 3.0), ("sign", "dirichlet", 4.0)]
    for name, rows in {"first": first, "again": [("sign", "iid", 5.0)]}.items():
        keep_rows(tmp_path / name, pd.DataFrame(rows, columns=columns), {})
    table = joined([tmp_path / "first", tmp_path / "again"])
    assert list(table.itertuples(index=False, name=None)) == [*first[:2], first[3], ("sign", "iid", 5.0)]


def test_attacks_are_kept_by_the_weights_that_they_were_on_and_other_ones_not_mixed_with_them(tmp_path: Path) -> None:
    rows = [{"weights_sha256": f"{place}", "attack": name, "psnr": 10.0} for place in (0, 1) for name in ("grey", "a")]
    about = {"battery": "standard 4", "pictures": 3}
    assert trained_under.rows_by_weights(tmp_path, about) == {}
    keep_rows(tmp_path, pd.DataFrame(rows), about)
    assert trained_under.rows_by_weights(tmp_path, about) == {"0": rows[:2], "1": rows[2:]}
    with pytest.raises(BadInputError, match=r"rows with \{'pictures': 3\}, not .*another --output"):
        trained_under.rows_by_weights(tmp_path, {**about, "pictures": 4})
    keep_rows(tmp_path, pd.DataFrame(rows).drop(columns="weights_sha256"), about)
    with pytest.raises(BadInputError, match="does not say which weights"):
        trained_under.rows_by_weights(tmp_path, about)


def test_a_figure_and_a_line_per_defence() -> None:
    runs = pd.DataFrame(
        [{"defence": one.defence, "epsilon": np.nan, "upload_bytes": 10.0, "upload_seconds": 0.001} for one in POINTS]
    )
    lines = table({"iid": POINTS}, runs)
    assert lines["defence"].tolist()[0] in ("dear", "as dear")
    assert lines.set_index("defence")["front"].to_dict()["worse"] == ""
    with mpl.rc_context(STYLE):
        assert len(drawn({"iid": POINTS, "dirichlet": POINTS}).axes) == 2


def test_federations_differ_in_their_defence_alone() -> None:
    asked = {name: training_cost.scenario_of("bundled", "iid", name, 0) for name in training_cost.DEFENCES}
    assert len({pipeline_of(one.defences).label for one in asked.values()}) == len(training_cost.DEFENCES)
    others = {one.model_copy(update={"defences": (), "model": asked["none"].model}).digest() for one in asked.values()}
    assert len(others) == 1
    assert (
        training_cost.scenario_of("bundled", training_cost.PARTITIONS[1], "none", 0).digest() != asked["none"].digest()
    )
