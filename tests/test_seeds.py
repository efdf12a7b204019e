"""Means and differences over seeds, against scipy's tests."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedmjp.errors import BadInputError
from tests.studies import load_study

table = load_study("learning/seeds.py").table


@pytest.fixture
def rows() -> pd.DataFrame:
    generator = np.random.default_rng(0)
    made = [
        {
            "training": "central",
            "defence": defence,
            "seed": seed,
            **dict.fromkeys(["difference", "consistency"], 1.0 + seed),
        }
        for defence in ("mjp", "none")
        for seed in (2, 0, 1)
    ]
    return pd.DataFrame(made).assign(top1=generator.normal(40, 5, 6))


def test_intervals_are_those_of_students_tests(rows: pd.DataFrame) -> None:
    mjp, none = table(rows).set_index("defence").loc[["mjp", "none"]].to_dict("records")
    mine, others = (rows[rows["defence"] == name].set_index("seed")["top1"].sort_index() for name in ("mjp", "none"))
    of_one = stats.ttest_1samp(others, 0).confidence_interval()
    assert none["Top-1 %"] == f"{others.mean():.1f} ({of_one.low:.1f} to {of_one.high:.1f})"
    assert none["Top-1 %, against none"] == ""
    paired = stats.ttest_rel(mine, others).confidence_interval()
    expected = f"{(mine - others).mean():+.1f} ({paired.low:+.1f} to {paired.high:+.1f})"
    assert mjp["Top-1 %, against none"] == expected
    assert mjp["Diff. Norm., against none"] == "+0.000 (+0.000 to +0.000)"


def test_other_seeds_than_those_without_a_defence_are_refused(rows: pd.DataFrame) -> None:
    with pytest.raises(BadInputError, match=r"central, mjp has the seeds \[0, 1, 2\], without a defence \[0, 1\]"):
        table(rows[(rows["defence"] == "mjp") | (rows["seed"] < 2)])


def test_what_was_trained_once_tells_no_interval(rows: pd.DataFrame) -> None:
    once = rows[rows["seed"] == 0]
    assert len(table(pd.concat([rows, once.assign(training="short")]))) == 2
    with pytest.raises(BadInputError, match="no training has two seeds"):
        table(once)
