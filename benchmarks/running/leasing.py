"""A campaign in a database, and a worker of it: it leases a job, works it off, and leases the next one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from fedmjp.arithmetic import Arithmetic
from fedmjp.benchmarks.campaign.prepare import Prepared
from fedmjp.benchmarks.campaign.shared import SharedCampaign
from fedmjp.benchmarks.folder.queue import LEASE_SECONDS, Lease, Queue, QueuedJob
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.stored_pictures import StoredPictures
from fedmjp.benchmarks.running.engine import Job, jobs
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import SECONDS_PER_HOUR
from fedmjp.benchmarks.running.stored_retention import StoredRetention
from fedmjp.benchmarks.running.workers import Bench
from fedmjp.errors import StoreError

HEARTBEAT = LEASE_SECONDS / 4
POLL_SECONDS = 2.0
MOST_DEATHS = 5  # machines are taken away at any time, which is no fault of the job


def offer(
    prepared: Prepared, *, store: Store, queue: Queue, device: Literal["cpu", "cuda"], arithmetic: Arithmetic
) -> int:
    """Put a campaign into a database, with what is missing of it as jobs; the number of these.

    Raises:
        OutputError: If the database holds another campaign, or workers are at work on this one with another plan.
        StoreError: If the database failed.
    """
    plan = prepared.plan
    finished = store.finished([trial.key for trial in plan.trials])
    queued = [
        QueuedJob(number, job.uploads, all(trial.key in finished for trial in job.trials))
        for number, job in enumerate(jobs(plan))
    ]
    shared = SharedCampaign.of(prepared, device=device, arithmetic=arithmetic)
    content, ledger = shared.model_dump(mode="json"), prepared.ledger.texts()
    queue.start(prepared.campaign.name, content, ledger, plan=shared.plan, jobs=queued)
    return sum(not job.done for job in queued)


def work_off(shared: SharedCampaign, *, store: Store, queue: Queue, progress: RunProgress) -> int:
    """Work until nothing is left of a campaign, here and in all other processes, or its budget is spent.

    Args:
        shared: The campaign whose jobs are queued.
        store: The trials.
        queue: The jobs.
        progress: Is told what happens.

    Returns:
        How many trials were in this worker's jobs.

    Raises:
        BadInputError: If this machine would make other trials, or the campaign is started anew.
        StoreError: If the database failed.
    """
    selection, plan = shared.prepare()
    campaign = shared.campaign
    listed, pictures = jobs(plan), StoredPictures(store)
    keeper = None if campaign.keep == "none" else pictures
    bench = Bench([part.experiment for part in plan.parts], selection, store, keeper, progress)
    retention = StoredRetention(campaign.keep, listed, queue, store, pictures)
    hours, began = campaign.budget.hours, time.monotonic()
    done, uploads = 0, None
    progress.attacks(sum(len(listed[number].trials) for number in queue.open()))
    while hours is None or time.monotonic() - began < hours * SECONDS_PER_HOUR:
        lease = queue.claim(shared.plan, uploads)
        if lease is None:
            if not queue.open():
                break
            time.sleep(POLL_SECONDS)  # others are at work, and may die
            continue
        job, uploads = listed[lease.number], lease.uploads
        with _held(queue, lease):
            _work(bench, job, lease)
            queue.finish(lease)
        retention.ends(lease.number)
        done += len(job.trials)
    return done


def _work(bench: Bench, job: Job, lease: Lease) -> None:
    engine = bench.engine(job.part)
    if lease.deaths < MOST_DEATHS:
        engine.work(job)
    else:
        engine.give_up(job, f"{lease.deaths} workers died with this trial, or with others of its job")


@contextmanager
def _held(queue: Queue, lease: Lease) -> Iterator[None]:
    """Keep a lease alive; of a job that is not finished, give it back."""
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(queue, lease, ended), daemon=True)
    heart.start()
    try:
        yield
    except BaseException as error:
        queue.give_back(lease, died=isinstance(error, Exception))
        raise
    finally:
        ended.set()
        heart.join()


def _beat(queue: Queue, lease: Lease, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT):
        try:
            if not queue.renew(lease):
                return  # another worker has it, and this one's rows are the same
        except StoreError:
            continue  # the next beat may be in time
