"""Leakage against accuracy: the front, intervals that hold what they should, federations that differ in one thing."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from benchmarks.report.drawing import STYLE
from benchmarks.studies.trade_off import Point, accuracy, drawn, on_front, table
from benchmarks.studies.training_cost import DEFENCES, PARTITIONS, scenario_of
from fedmjp.defences.pipeline import pipeline_of


def wilson(hits: int, n: int, z: float) -> float:
    """An end of Wilson's interval, by its formula: the upper one where z is above zero."""
    share = hits / n
    root = np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return float((share + z * z / (2 * n) + z * root) / (1 + z * z / n))


def point(name: str, leakage: float, top1: float) -> Point:
    return Point(name, (leakage, leakage - 1, leakage + 1), (top1, top1 - 2, top1 + 2))


POINTS = [
    point("none", 48, 13),
    point("free", 20, 13),
    point("worse", 30, 12),
    point("dear", 0, 3),
    point("as dear", 0, 3),
]


def test_the_front_has_what_nothing_else_beats_and_both_of_two_that_are_alike() -> None:
    assert [one.defence for one in POINTS if on_front(one, POINTS)] == ["free", "dear", "as dear"]


def test_the_interval_of_top1_is_wilsons_from_the_lowest_seed_to_the_highest() -> None:
    runs = pd.DataFrame({"top1": [0.1, 0.12], "validation_pictures": [1600, 1600]})
    middle, low, high = accuracy(runs)
    assert (middle, low, high) == pytest.approx(
        (11, 100 * wilson(160, 1600, -1.959964), 100 * wilson(192, 1600, 1.959964))
    )


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
    made = {name: scenario_of("bundled", "iid", name, 0) for name in DEFENCES}
    assert len({pipeline_of(one.defences).label for one in made.values()}) == len(DEFENCES)
    others = {one.model_copy(update={"defences": (), "model": made["none"].model}).digest() for one in made.values()}
    assert len(others) == 1
    assert scenario_of("bundled", PARTITIONS[1], "none", 0).digest() != made["none"].digest()
