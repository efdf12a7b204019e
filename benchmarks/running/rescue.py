"""A run whose folder went away ends with an error, and its trials are written again where they can be."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.claims import claim_folder, is_gone
from fedmjp.errors import FedmjpError, OutputGoneError

REMOVAL_SECONDS = 2.0  # that whoever removes a folder may take to end


def lost_place(output: OutputFolder, store: Store) -> bool:
    """Tell whether a run's folder, or its database, was removed, moved or replaced since the run began.

    Args:
        output: Of the run.
        store: Of its trials.
    """
    return is_gone(output.root) or not store.is_in_place()


@contextmanager
def rescuing(output: OutputFolder, plan: TrialPlan, store: Store) -> Iterator[None]:
    """Watch over the folder of a run: where it went away, write the trials again.

    Args:
        output: Of the run.
        plan: What was run.
        store: Of its trials, open since before they were run.

    Raises:
        OutputGoneError: If the folder is not where it was; the message says what is kept, and where.
    """
    try:
        yield
    except Exception:
        if not lost_place(output, store):
            raise
    if lost_place(output, store):
        raise OutputGoneError(
            f"{output.root} was removed, moved or replaced while the run wrote to it; {_rescue(output, plan, store)}"
        ) from None


def _rescue(output: OutputFolder, plan: TrialPlan, store: Store) -> str:
    """Write the trials into the folder anew, or beside it if something else is there; say where they are."""
    if store.dialect != "sqlite":
        return f"its trials are in {store.name}: run the same command again"
    deadline = time.monotonic() + REMOVAL_SECONDS
    while output.root.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        return _write_again(output, plan, store)
    except (FedmjpError, OSError):
        pass
    try:
        beside = Path(tempfile.mkdtemp(prefix=f"{output.root.name}-kept-", dir=output.root.parent))
        return f"{_write_again(OutputFolder(beside), plan, store)} with --output {beside}"
    except (FedmjpError, OSError) as error:
        return f"its trials could not be written again ({error})"


def _write_again(target: OutputFolder, plan: TrialPlan, store: Store) -> str:
    claim_folder(target.root)
    store.copy_to(target.database)
    plan.save(target.root)
    count = sum(store.counts().values())
    return f"its {count} trials were written to {target.root} again, without pictures: run the same command again"
