"""Plans worked off: the same rows, whatever dies, fails or is stopped."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.running.engine import jobs
from fedmjp.benchmarks.running.runner import Pace, run_local
from fedmjp.benchmarks.running.workbench import Setup
from fedmjp.errors import StoreError
from tests.experiments import Told, files, moved, rows, small_campaign
from tests.processes import title


def workers() -> int:
    titles = map(title, psutil.Process().children(recursive=True))
    return sum(each is not None and each[0].startswith("ray::Worker") for each in titles)


def left_behind(started: list[psutil.Process]) -> list[tuple[str, list[str]]]:
    """Of what a run started, whoever is its parent now; other tests' fork server may live on in this process."""
    left = psutil.wait_procs([*started, *psutil.Process().children(recursive=True)], timeout=5)[1]
    titles = filter(None, map(title, left))
    return [each for each in titles if not any("multiprocessing" in word for word in each[1])]


def fill_the_disk(plan: TrialPlan, setup: Setup) -> None:
    """Make the database refuse the last picture's trials under MJP."""
    setup.store().close()
    victim = plan.tasks[-1].picture.name
    with sqlite3.connect(setup.output.database) as connection:
        connection.execute(
            f"create trigger full before insert on trials when new.defence = 'mjp' and new.picture = '{victim}' "
            "begin select raise(abort, 'database or disk is full'); end"
        )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[TrialPlan, Setup]:
    """One job per picture and version of two arms, of an attack that reads nothing."""
    monkeypatch.setattr("fedmjp.benchmarks.running.engine.CHUNK", 1)
    return small_campaign(tmp_path / "quick", seeds=(0,), mask_ratios=(0.27,), attacks=("grey",))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialPlan, Setup]:
    plan, setup = small_campaign(tmp_path_factory.mktemp("alone"), keep="all")
    told = Told()
    assert run_local(plan, setup, workers=1, progress=told) == 0
    assert told.announced == told.done == len(plan.tasks)
    return plan, setup


def test_what_parts_share_is_run_once(alone: tuple[TrialPlan, Setup]) -> None:
    plan, setup = alone
    kept = rows(plan, setup)
    assert len(plan.parts) == 2 * 8  # seeds; none, its jigsaws, MJP in a, MJP in b and c, at two ratios, and a twin
    assert any(not part.trials for part in plan.parts), "twins were asked for anyway"
    assert len(kept) == len(plan.tasks) == len({trial.key for trial in plan.tasks})
    assert {row["status"] for row in kept.values()} == {"ok"}
    assert {row["seed"] for row in kept.values()} == {0, 1}


def test_a_run_that_is_stopped_says_what_it_left_and_goes_on_later(quick: tuple[TrialPlan, Setup]) -> None:
    plan, setup = quick
    told = Told()
    left = run_local(plan, setup, workers=1, progress=told, stop=lambda: told.done >= 3)
    assert 0 < left == len(plan.tasks) - told.done
    assert len(rows(plan, setup)) == told.done
    assert run_local(plan, setup, workers=1, progress=told) == 0
    assert told.done == len(plan.tasks) == len(rows(plan, setup))


def test_a_database_that_fails_ends_the_run_and_keeps_what_is_finished(quick: tuple[TrialPlan, Setup]) -> None:
    plan, setup = quick
    fill_the_disk(plan, setup)
    told = Told()
    with pytest.raises(StoreError, match="database or disk is full") as error:
        run_local(plan, setup, workers=1, progress=told)
    assert "\n" not in str(error.value)
    finished = rows(plan, setup)
    assert told.done <= len(finished) < len(plan.tasks)
    assert finished
    with sqlite3.connect(setup.output.database) as connection:
        connection.execute("drop trigger full")
    assert run_local(plan, setup, workers=1, progress=Told()) == 0
    assert rows(plan, setup).items() >= finished.items()
    assert len(rows(plan, setup)) == len(plan.tasks)


def test_two_runs_in_different_folders_share_a_database(quick: tuple[TrialPlan, Setup], tmp_path: Path) -> None:
    plan, setup = quick
    elsewhere = replace(moved(setup, tmp_path / "elsewhere"), database=f"sqlite:///{setup.output.database}")
    stamps: list[list[object]] = []

    def recorded() -> list[object]:
        return setup.store().frame()["recorded_at"].tolist()

    def meanwhile() -> bool:
        if not stamps:
            run_local(plan, elsewhere, workers=1, progress=Told())
            stamps.append(recorded())
        return False

    told = Told()
    assert run_local(plan, setup, workers=1, progress=told, stop=meanwhile) == 0
    assert told.done == len(plan.tasks) == len(recorded())
    assert recorded() == stamps[0], "nothing was run a second time"
    assert not files(setup)


@pytest.mark.slow
def test_an_error_in_the_parent_leaves_no_process_behind(quick: tuple[TrialPlan, Setup]) -> None:
    plan, setup = quick
    started: list[psutil.Process] = []

    class Interrupted(Told):
        def trials(self, done: int) -> None:
            assert workers()  # Ray may bring the second a minute after the first
            started.extend(psutil.Process().children(recursive=True))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_local(plan, setup, workers=2, progress=Interrupted())
    assert not left_behind(started)
    assert 0 < len(rows(plan, setup)) < len(plan.tasks)


def test_the_time_that_is_left_is_told_by_the_part_of_each_job(tmp_path: Path) -> None:
    plan, _ = small_campaign(tmp_path, seeds=(0,))
    first, second = jobs(plan)[:2]
    pace = Pace()
    assert pace.remaining([first]) == 0
    pace.add(first, 10.0)
    assert pace.remaining([first, first]) == pytest.approx(20)
    rate = 10 / len(first.trials)
    assert pace.remaining([second]) == pytest.approx(rate * len(second.trials)), "a part of which nothing is known"
    pace.add(second, 1.0)
    assert pace.remaining([first, second]) == pytest.approx(11)


def test_a_few_trials_of_each_part_are_run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmjp.benchmarks.running.engine.CHUNK", 1)
    plan, _ = small_campaign(tmp_path, seeds=(0,))
    parts = [job.part for job in jobs(plan)]
    count = len(set(parts))
    assert len(parts) > count
    assert len(set(parts[:count])) == count


def test_time_left_is_told_while_a_campaign_runs(quick: tuple[TrialPlan, Setup]) -> None:
    plan, setup = quick

    class Watching(Told):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def time_left(self, seconds: float) -> None:
            self.seconds.append(seconds)

    progress = Watching()
    run_local(plan, setup, workers=1, progress=progress)
    assert progress.seconds[0] > 0
    assert progress.seconds[-1] == 0
