"""Which pictures stay, held against a slow reading of the rule."""

from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmjp.benchmarks.plan.experiment import Keep
from fedmjp.benchmarks.plan.trial_plan import PlannedTrial, TrialPlan
from fedmjp.benchmarks.running.retention import Retention, extremes
from fedmjp.benchmarks.running.runner import run_local
from fedmjp.benchmarks.running.workbench import Setup
from tests.experiments import Told, files, moved, rows, small_campaign


def cell_of(values: list[float | None]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "key": [f"{index:03}" for index in range(len(values))],
            "status": ["failed" if value is None else "ok" for value in values],
            "scores": [{} if value is None else {"psnr": value} for value in values],
        }
    )


@given(st.lists(st.none() | st.integers(0, 9).map(float), max_size=12), st.randoms())
def test_extremes_are_the_ends_and_numpy_s_lower_median(values: list[float | None], order: object) -> None:
    cell = cell_of(values)
    found = extremes(cell.sample(frac=1, random_state=order.randrange(99)))
    finished = [value for value in values if value is not None]
    if not finished:
        assert found == {}
        return
    psnr = {label: values[int(key)] for label, key in found.items()}
    assert psnr == {
        "most revealing": max(finished),
        "median": np.quantile(finished, 0.5, method="lower"),
        "least revealing": min(finished),
    }


def test_equal_trials_are_taken_by_key() -> None:
    assert extremes(cell_of([5.0, 5.0, 5.0, None])) == {
        "most revealing": "002",
        "median": "001",
        "least revealing": "000",
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialPlan, Setup]:
    plan, setup = small_campaign(tmp_path_factory.mktemp("all"), pictures=6, seeds=(0,), keep="all")
    run_local(plan, setup, workers=1, progress=Told())
    return plan, setup


def expected(plan: TrialPlan, setup: Setup) -> set[str]:
    """By the plan alone, cell by cell."""
    trials = plan.trials.merge(setup.store().frame()[["key", "scores"]], on="key")
    shown: set[str] = set()
    for _, own in trials.groupby("cell"):
        ranked = own.assign(psnr=[scores["psnr"] for scores in own["scores"]]).sort_values(["psnr", "key"])
        three = ranked.iloc[[0, (len(ranked) - 1) // 2, len(ranked) - 1]]
        shown |= {name for row in three.to_dict("records") for name in plan.files_of(row).values()}
    return shown


def test_all_keeps_every_file_that_the_plan_names(finished: tuple[TrialPlan, Setup]) -> None:
    plan, setup = finished
    rows_of_plan = plan.trials.to_dict("records")
    assert files(setup).keys() == {name for row in rows_of_plan for name in plan.files_of(row).values()}


def test_extremes_keep_three_trials_per_cell_and_what_they_share(
    finished: tuple[TrialPlan, Setup], tmp_path: Path
) -> None:
    plan, everything = finished
    setup = moved(everything, tmp_path)
    bystanders = [tmp_path / "notes.png", tmp_path / "pictures.png"]
    for path in bystanders:
        path.touch()
    most: list[int] = []

    class Counting(Told):
        def trials(self, done: int) -> None:
            super().trials(done)
            most.append(len(files(setup)))

    run_local(plan, setup, workers=1, progress=Counting())
    kept = files(setup)
    assert kept.keys() == expected(plan, setup)
    assert kept.items() <= files(everything).items()
    assert len(kept) <= max(most) < len(files(everything)), "pictures of complete cells go during the run"
    assert all(path.exists() for path in bystanders)


def test_none_writes_nothing(finished: tuple[TrialPlan, Setup], tmp_path: Path) -> None:
    plan, everything = finished
    setup = moved(everything, tmp_path, keep="none")
    run_local(plan, setup, workers=1, progress=Told())
    assert not setup.output.pictures.exists()
    assert rows(plan, setup) == rows(plan, everything)


@pytest.mark.parametrize("keep", ["extremes", "all"])
def test_an_interrupted_run_ends_with_the_same_pictures(
    finished: tuple[TrialPlan, Setup], tmp_path: Path, keep: Keep
) -> None:
    plan, everything = finished
    setup = moved(everything, tmp_path, keep=keep)
    left = 1
    while left:
        asked = count()
        left = run_local(plan, setup, workers=1, progress=Told(), stop=lambda asked=asked: next(asked) == 2)
    wanted = expected(plan, setup) if keep == "extremes" else files(everything).keys()
    assert files(setup).keys() == wanted


def test_pictures_of_a_cell_in_work_stay(finished: tuple[TrialPlan, Setup], tmp_path: Path) -> None:
    """Another cell's end must not take an original that a running job has just written."""
    plan, everything = finished
    setup = moved(everything, tmp_path)
    pictures, cells = setup.output.kept, list(dict.fromkeys(trial.cell for trial in plan.tasks))
    first, second = ([trial for trial in plan.tasks if trial.cell == cell] for cell in cells[:2])

    def paths(trial: PlannedTrial) -> list[Path]:
        return [pictures.path(name) for name in trial.files.values()]

    store = setup.store()
    retention = Retention("extremes", plan, pictures, store)
    retention.start([*first, *second])
    for trial in [*first, *second]:
        pictures.save(dict.fromkeys(trial.files.values(), b""))
    done = everything.store()
    store.put(done.trials([trial.key for trial in first]))
    retention.mark_finished(first)
    assert all(path.exists() for trial in second for path in paths(trial))
    store.put(done.trials([trial.key for trial in second]))
    retention.mark_finished(second)
    assert files(setup).keys() == expected(plan, setup)
