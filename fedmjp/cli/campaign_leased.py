"""`fedmjp campaign start`, `work` and `fetch`: a campaign that processes on any machines work on."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fedmjp.cli.campaign_options import Database, File, Overrides, Weights, prepared_of
from fedmjp.cli.campaign_run import require_campaign
from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import RUN, Arithmetic, Device
from fedmjp.cli.outcome import tell_outcome
from fedmjp.errors import GAVE_UP
from fedmjp.running import FAILED

if TYPE_CHECKING:
    from fedmjp.benchmarks.folder.ledger import Ledger
    from fedmjp.benchmarks.folder.queue import Queue
    from fedmjp.benchmarks.folder.store import Store

DATABASE = "name the campaign's database with --database postgresql://USER:PASSWORD@HOST/NAME, or FEDMJP_DATABASE"
Data = Annotated[
    str,
    typer.Option(
        "--data", help="Where the pictures are on this machine, if elsewhere.", metavar="FOLDER", rich_help_panel=RUN
    ),
]


def start(
    file: File,
    overrides: Overrides = [],
    weights: Weights = [],
    database: Database = "",
    device: Device = "auto",
    arithmetic: Arithmetic = "float32",
) -> None:
    """Put a campaign into a database, for any number of `fedmjp campaign work` on any machines; run nothing here.

    The same command again lets workers try failed trials once more.
    """
    from fedmjp.benchmarks.running.leasing import offer
    from fedmjp.cli.runs import choose

    store, queue = _opened(database)
    prepared = prepared_of(file, overrides, weights, device, arithmetic)
    left = offer(prepared, store=store, queue=queue, device=choose(device), arithmetic=arithmetic)
    keys = [trial.key for trial in prepared.plan.trials]
    finished = f"{prepared.campaign.name}: {len(store.finished(keys))} of {len(keys)} trials are finished"
    tell(
        wide_console(),
        *(f"Skipped: {reason}" for reason in prepared.selection.skipped),
        f"{finished}, {left} jobs wait in {store.name} for `fedmjp campaign work`.",
    )


def work(database: Database = "", data: Data = "") -> None:
    """Work on the campaign in a database, beside any number of other workers, until nothing is left.

    Exit code 0: nothing is left; 1: trials failed, or the database did; 2: this machine lacks the pictures, or has
    another fedmjp or other packages than the campaign was started with. A worker may be killed at any time: after a
    minute others have its job.
    """
    from fedmjp.benchmarks.campaign.shared import SharedCampaign
    from fedmjp.benchmarks.running.leasing import work_off
    from fedmjp.cli.progress import TerminalProgress
    from fedmjp.cli.runs import located

    console = wide_console()
    store, queue = _opened(database)
    shared = SharedCampaign.read(queue.content())
    if data:
        shared = shared.moved_to(located(data))
    with _ending_on_request(), TerminalProgress(console) as progress:
        done = work_off(shared, store=store, queue=queue, progress=progress)
    tell(console, f"{done} trials were tried here.")
    if left := len(queue.open()):
        tell(console, f"The budget of {shared.campaign.budget.hours:g} h is spent; {left} jobs wait for other workers.")
    _tell_failures(store, _ledger(store, queue).trials["key"].tolist())


def fetch(
    folder: Annotated[Path, typer.Argument(help="Folder for results.", show_default=False)], database: Database = ""
) -> None:
    """Copy trials and pictures out of a database, as many as there are, into a folder as `campaign run` leaves it."""
    from fedmjp.benchmarks.folder.output import OutputFolder
    from fedmjp.benchmarks.folder.stored_pictures import StoredPictures
    from fedmjp.benchmarks.report.render import render

    console = wide_console()
    store, queue = _opened(database)
    ledger, output = _ledger(store, queue), OutputFolder(folder)
    require_campaign(output, ledger.about["name"])
    output.prepare(fresh=False)
    ledger.save(folder)
    own = output.store()
    own.put(store.trials(ledger.trials["key"].tolist()))
    StoredPictures(store).copy(ledger.files, output.pictures)
    failed = render(ledger, own, output, console)
    tell_outcome(failed, folder, console)


def tell_status(database: str) -> None:
    """Print how far the campaign in a database is."""
    from fedmjp.benchmarks.running.status import status
    from fedmjp.cli.campaign_tables import print_status

    store, queue = _opened(database)
    ledger, workers = _ledger(store, queue), queue.at_work()
    at_work = f"{workers} {'worker is' if workers == 1 else 'workers are'} at work" if workers else ""
    idle = "No worker is at work; `fedmjp campaign work` goes on."
    print_status(ledger, status(ledger, store), wide_console(), at_work=at_work, idle=idle)


def _opened(database: str) -> "tuple[Store, Queue]":
    from fedmjp.benchmarks.folder.queue import Queue
    from fedmjp.benchmarks.folder.store import Store
    from fedmjp.errors import BadInputError

    if not database:
        raise BadInputError(DATABASE)
    store = Store.open(database)
    return store, Queue(store)


def _ledger(store: "Store", queue: "Queue") -> "Ledger":
    from fedmjp.benchmarks.folder.ledger import ABOUT, TRIALS, Ledger

    texts = queue.ledger()
    return Ledger.read(texts[ABOUT], texts[TRIALS].encode(), store.name)


def _tell_failures(store: "Store", keys: list[str]) -> None:
    """Say which trials failed of the whole campaign; ends with code 1 if some did that may yet end well."""
    rows = store.frame(keys)
    errors = Counter(rows.loc[rows["status"] == "failed", "error"])
    again = {error: count for error, count in errors.items() if not error.startswith(GAVE_UP)}
    console = wide_console()
    tell(console, *(f"{count} trials failed: {error}" for error, count in again.items()), style="bold red")
    tell(
        console, f"{len(rows)} of {len(keys)} trials have rows; `fedmjp campaign fetch DIR` makes tables and pictures."
    )
    if again:
        raise typer.Exit(FAILED)


@contextmanager
def _ending_on_request() -> Iterator[None]:
    """Take a scheduler's wish to have the machine back for Ctrl-C: the job is given back at once."""

    def interrupt(_signal: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
