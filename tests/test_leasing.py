"""Workers that share a campaign through PostgreSQL: a job has one of them, a trial one row, whoever dies or is late."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.campaign.prepare import Prepared, prepare
from fedmjp.benchmarks.campaign.shared import SharedCampaign
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.queue import Queue, QueuedJob
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.stored_pictures import StoredPictures
from fedmjp.benchmarks.running.leasing import MOST_DEATHS, offer, work_off
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import run_campaign
from fedmjp.errors import BadInputError, OutputError
from tests import databases
from tests.databases import open_plainly
from tests.test_campaign_command import FILE, run

server, postgresql = databases.server, databases.postgresql
PICTURES, TRIALS = 2, 16


def queue_of(url: str, *uploads: int) -> Queue:
    queue = Queue(Store.open(url))
    jobs = [QueuedJob(number, each, done=False) for number, each in enumerate(uploads)]
    queue.start("tiny", {}, {}, plan="a", jobs=jobs)
    return queue


def change(url: str, statement: str) -> None:
    with open_plainly(url) as connection:
        connection.execute(statement)
        connection.commit()


EXPIRE = "update jobs set expires = now() - interval '1 second' where status = 'leased'"


def test_each_job_has_one_worker_however_many_ask_at_once(postgresql: str) -> None:
    queue = queue_of(postgresql, *range(40))
    with ThreadPoolExecutor(4) as pool:
        claimed = pool.map(lambda _: queue.claim("a", None), range(44))
    assert sorted(lease.number for lease in claimed if lease) == list(range(40))
    assert queue.at_work() == 40


def test_a_worker_that_comes_back_after_its_lease_expired_changes_nothing(postgresql: str) -> None:
    queue = queue_of(postgresql, 0)
    late = queue.claim("a", None)
    assert late
    assert queue.renew(late)
    assert queue.claim("a", None) is None
    change(postgresql, EXPIRE)
    assert queue.at_work() == 0
    second = queue.claim("a", None)
    assert second
    assert (second.number, second.deaths) == (0, 1)
    assert not queue.renew(late)
    queue.finish(late)
    queue.give_back(late, died=True)
    assert queue.open() == {0}
    assert queue.at_work() == 1
    queue.finish(second)
    assert queue.open() == set()


def test_workers_prefer_uploads_that_they_have_computed_then_those_that_nobody_has(postgresql: str) -> None:
    queue = queue_of(postgresql, 0, 0, 1, 1, 2)
    first, second, third = (queue.claim("a", uploads) for uploads in (None, None, 0))
    assert [lease and lease.number for lease in (first, second, third)] == [0, 2, 1]
    assert first
    queue.give_back(first, died=False)
    again = queue.claim("a", 0)
    assert again
    assert (again.number, again.deaths) == (0, 0)


def test_a_database_has_one_campaign_and_no_other_plan_of_it_while_workers_are_at_work(postgresql: str) -> None:
    queue = queue_of(postgresql, 0, 1)
    lease = queue.claim("a", None)
    with pytest.raises(OutputError, match="holds the campaign 'tiny', this one is 'other'"):
        queue.start("other", {}, {}, plan="a", jobs=[])
    with pytest.raises(OutputError, match=r"workers \(1\) are at work on 'tiny'"):
        queue.start("tiny", {}, {}, plan="b", jobs=[])
    queue.start("tiny", {}, {}, plan="a", jobs=[QueuedJob(0, 0, done=False), QueuedJob(1, 1, done=True)])
    assert lease
    assert queue.renew(lease)
    assert queue.open() == {0}
    with pytest.raises(OutputError, match="started anew"):
        queue.claim("b", None)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    path = tmp_path_factory.mktemp("campaign") / "tiny.yaml"
    path.write_text(FILE)
    return prepare(read_campaign(path, [f"data.pictures={PICTURES}"]), device="cpu", command="")


def work(url: str, progress: RunProgress | None = None) -> int:
    store = Store.open(url)
    queue = Queue(store)
    shared = SharedCampaign.read(queue.content())
    return work_off(shared, store=store, queue=queue, progress=progress or RunProgress())


def offered(prepared: Prepared, url: str) -> Store:
    store = Store.open(url)
    offer(prepared, store=store, queue=Queue(store), device="cpu", arithmetic="float32")
    return store


def test_a_worker_that_lost_its_job_in_the_middle_doubles_no_row_and_all_is_as_in_one_process(
    prepared: Prepared, postgresql: str, tmp_path: Path
) -> None:
    store, recorded = offered(prepared, postgresql), list[Any]()

    class Overtaken(RunProgress):
        """After its first rows its lease expires, and another worker does all that is left."""

        def trials(self, done: int) -> None:
            if done and not recorded:
                change(postgresql, EXPIRE)
                recorded.append(None)
                assert work(postgresql) == len(prepared.plan.trials)
                recorded.append(store.frame()["recorded_at"].tolist())

    work(postgresql, Overtaken())
    assert store.frame()["recorded_at"].tolist() == recorded[1]
    alone = OutputFolder(tmp_path / "alone")
    alone.prepare(fresh=False)
    run_campaign(prepared, alone, RunProgress(), database="", workers=1, ray="")
    keys = [trial.key for trial in prepared.plan.trials]
    expected = [(row.key, row.status, row.scores) for row in alone.store().trials(keys)]
    assert [(row.key, row.status, row.scores) for row in store.trials(keys)] == expected
    assert len(store.frame()) == len(keys) == TRIALS
    StoredPictures(store).copy(StoredPictures(store).names(), tmp_path / "copied")
    assert files(tmp_path / "copied") == files(alone.pictures)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.png")}


def test_a_job_that_killed_too_many_workers_becomes_failed_rows(prepared: Prepared, postgresql: str) -> None:
    store = offered(prepared, postgresql)
    change(postgresql, f"update jobs set deaths = {MOST_DEATHS} where number = 0")
    change(postgresql, "update jobs set status = 'done' where number > 0")
    work(postgresql)
    rows = store.frame()
    assert set(rows["status"]) == {"failed"}
    assert rows["error"].str.startswith(f"{MOST_DEATHS} workers died with this trial").all()


OTHERS = {
    "fedmjp here is another than the campaign's; install that of commit 123456789abc": {
        "code": "", "commit": "123456789abcdef",
    },
    "the campaign computes on CUDA": {"device": "cuda"},
    r"torch is .* here, the campaign's is 1\.0": {"versions": {"torch": "1.0"}},
    "mse, psnr: computed on one": {"metrics": ()},
    "this machine plans other trials": {"plan": ""},
}  # fmt: skip


@pytest.mark.parametrize("message", OTHERS)
def test_a_worker_that_would_make_other_trials_refuses(prepared: Prepared, message: str) -> None:
    shared = SharedCampaign.of(prepared, device="cpu", arithmetic="float32").model_dump(mode="json")
    with pytest.raises(BadInputError, match=message) as refusal:
        SharedCampaign.read({**shared, **OTHERS[message]}).prepare()
    assert "\n" not in str(refusal.value)


def test_a_worker_with_other_pictures_refuses(prepared: Prepared) -> None:
    shared = SharedCampaign.of(prepared, device="cpu", arithmetic="float32")
    first, *others = shared.pictures
    for pictures, message in (
        ((replace(first, sha256="0"), *others), f"picture '{first.name}' in bundled is not the campaign's"),
        ((replace(first, name="nobody"), *others), r"no picture 'nobody'.*--data says where they are"),
    ):
        with pytest.raises(BadInputError, match=message):
            shared.model_copy(update={"pictures": pictures}).prepare()


def test_the_commands_share_a_campaign_and_bring_it_back(
    postgresql: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, database = tmp_path / "tiny.yaml", f"--database={postgresql}"
    path.write_text(FILE)
    assert run("campaign", "work", database) == 2
    assert "holds no campaign to work on; `fedmjp campaign start" in capsys.readouterr().err
    only = ["shared.settings=[a]", "data.pictures=1", "shared.mask_ratios=[0.27]"]
    assert run("campaign", "start", path, *only, database, "--device", "cpu") == 0
    assert "jobs wait in postgresql://postgres:***@" in capsys.readouterr().out
    assert run("campaign", "status", database) == 0
    assert "No worker is at work" in capsys.readouterr().out
    assert run("campaign", "work", database) == 0
    assert run("campaign", "fetch", tmp_path / "results", database) == 0
    assert run("campaign", "verify", tmp_path / "results") == 0
    capsys.readouterr()
    change(postgresql, "update trials set status = 'failed', error = 'no memory'")
    assert run("campaign", "work", database) == 1
    assert "trials failed: no memory" in capsys.readouterr().out
    assert run("campaign", "start", path, *only, database, "--device", "cpu") == 0
    assert ": 0 of " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["start FILE", "work", "fetch DIR", "status"])
def test_without_a_postgresql_database_there_is_nothing_to_share(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("campaign", *command.split()) == 2
    assert "name the campaign's database with --database" in capsys.readouterr().err
    assert run("campaign", *command.split(), f"--database=sqlite:///{tmp_path / 'trials.sqlite'}") == 2
    assert "workers share a PostgreSQL database" in capsys.readouterr().err
