"""A campaign in PostgreSQL that workers on any machines share: who works on which job, and until when.

A worker leases one job at a time and says again and again that it lives. A lease that nobody renewed expires, by the
database's clock, and another worker takes the job.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from os import getpid
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Integer,
    MetaData,
    Table,
    Text,
    and_,
    case,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from fedmjp.benchmarks.folder.store import LOCK_SCHEMA, Json, Store
from fedmjp.errors import OutputError

LEASE_SECONDS = 60.0
START = "`fedmjp campaign start FILE --database URL` puts one there"
_TABLES = MetaData()
_CAMPAIGN = Table(
    "campaign",
    _TABLES,
    Column("name", Text, primary_key=True),
    Column("plan", Text, nullable=False),
    Column("content", Json, nullable=False),
    Column("ledger", Json, nullable=False),
)
_JOBS = Table(
    "jobs",
    _TABLES,
    Column("number", Integer, primary_key=True),
    Column("uploads", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("deaths", Integer, nullable=False, default=0),
    Column("token", Text),
    Column("worker", Text),
    Column("expires", DateTime(timezone=True)),
)
WAITING, LEASED, DONE = "waiting", "leased", "done"


@dataclass(frozen=True)
class QueuedJob:
    """A job of a plan, by its place there: which uploads it is about, and whether nothing of it is missing."""

    number: int
    uploads: int
    done: bool


@dataclass(frozen=True)
class Lease:
    """A job that a worker has taken.

    Attributes:
        number: The job's.
        uploads: Which the job is about.
        deaths: How many workers died with this job.
        token: Of this lease alone, so that who comes back too late changes nothing.
    """

    number: int
    uploads: int
    deaths: int
    token: str


class Queue:
    """The jobs of one campaign in a database.

    Raises:
        OutputError: If the database is a file, or its tables cannot be made.
    """

    def __init__(self, store: Store) -> None:
        if store.dialect != "postgresql":
            raise OutputError(
                f"workers share a PostgreSQL database, {store.name} is a file: "
                "name postgresql://USER:PASSWORD@HOST:5432/DATABASE, or use `fedmjp campaign run`"
            )
        self._store = store
        store.make_tables(_TABLES)

    def start(
        self,
        name: str,
        content: Mapping[str, Any],
        ledger: Mapping[str, str],
        *,
        plan: str,
        jobs: Sequence[QueuedJob],
    ) -> None:
        """Offer the jobs of a plan; those that are leased stay so.

        Args:
            name: The campaign's.
            content: What a worker must know.
            ledger: What a folder of results says of the plan, by the names of the files.
            plan: Digest of the plan.
            jobs: All of the plan.

        Raises:
            OutputError: If the database holds another campaign, or workers are at work on another plan.
        """
        with self._store.transaction() as connection:
            connection.exec_driver_sql(LOCK_SCHEMA["postgresql"])
            former = connection.execute(select(_CAMPAIGN.c.name, _CAMPAIGN.c.plan)).one_or_none()
            leased = set(connection.execute(select(_JOBS.c.number).where(_alive())).scalars())
            if former and former.name != name:
                raise OutputError(
                    f"{self._store.name} holds the campaign {former.name!r}, this one is {name!r}; "
                    "name another database"
                )
            if former and former.plan != plan and leased:
                raise OutputError(
                    f"workers ({len(leased)}) are at work on {name!r} as it was started before, with other files, "
                    "pictures or packages; end them, and try again in a minute"
                )
            _replace(connection, jobs, leased)
            connection.execute(delete(_CAMPAIGN))
            said = {"name": name, "plan": plan, "content": content, "ledger": ledger}
            connection.execute(insert(_CAMPAIGN), said)

    def content(self) -> Mapping[str, Any]:
        """What a worker must know; OutputError if no campaign was started."""
        return self._told("content")

    def ledger(self) -> Mapping[str, str]:
        """What a folder of results says of the plan, by the names of the files; OutputError as of ``content``."""
        return self._told("ledger")

    def claim(self, plan: str, uploads: int | None) -> Lease | None:
        """Lease a job that nobody works on, if there is one.

        Args:
            plan: Digest of the plan that the worker has: numbers of jobs are places there.
            uploads: Those that this worker has computed: jobs about them come first, then jobs about uploads that no
                other worker works on.

        Raises:
            OutputError: If the campaign was started anew with another plan.
        """
        others = select(_JOBS.c.uploads).where(_alive())
        order = (_JOBS.c.uploads != (-1 if uploads is None else uploads), _JOBS.c.uploads.in_(others), _JOBS.c.number)
        free = (
            select(_JOBS.c.number)
            .where(or_(_JOBS.c.status == WAITING, and_(_JOBS.c.status == LEASED, _JOBS.c.expires < _now())))
            .where(exists().where(_CAMPAIGN.c.plan == plan))
            .order_by(*order)
            .limit(1)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        token = uuid4().hex
        taken = (
            update(_JOBS)
            .where(_JOBS.c.number == free)
            .values(
                status=LEASED,
                deaths=_JOBS.c.deaths + case((_JOBS.c.status == LEASED, 1), else_=0),
                token=token,
                worker=f"{platform.node()} {getpid()}",
                expires=_expiry(),
            )
            .returning(_JOBS.c.number, _JOBS.c.uploads, _JOBS.c.deaths)
        )
        with self._store.transaction() as connection:
            row = connection.execute(taken).one_or_none()
            of = connection.execute(select(_CAMPAIGN.c.plan)).scalar_one_or_none()
        if row is None and of != plan:
            raise OutputError("the campaign was started anew, with other files, pictures or packages; begin again")
        return None if row is None else Lease(row.number, row.uploads, row.deaths, token)

    def renew(self, lease: Lease) -> bool:
        """Say that the worker lives; False if it said so too late, and lost the job."""
        return self._changed(lease, expires=_expiry())

    def finish(self, lease: Lease) -> None:
        """Nothing is missing of the job; what a worker finished that had lost it is in the store as well."""
        self._changed(lease, status=DONE, token=None, worker=None, expires=None)

    def give_back(self, lease: Lease, *, died: bool) -> None:
        """Let others have the job; an error that ended the worker counts as its death."""
        deaths = _JOBS.c.deaths + int(died)
        self._changed(lease, status=WAITING, deaths=deaths, token=None, worker=None, expires=None)

    def open(self) -> set[int]:
        """The numbers of the jobs that are not done."""
        with self._store.transaction() as connection:
            return set(connection.execute(select(_JOBS.c.number).where(_JOBS.c.status != DONE)).scalars())

    def at_work(self) -> int:
        """How many workers have a job."""
        with self._store.transaction() as connection:
            return connection.execute(select(func.count()).select_from(_JOBS).where(_alive())).scalar_one()

    def _changed(self, lease: Lease, **values: Any) -> bool:
        """Change the job if it is still this worker's."""
        own = and_(_JOBS.c.number == lease.number, _JOBS.c.token == lease.token)
        with self._store.transaction() as connection:
            return connection.execute(update(_JOBS).where(own).values(**values)).rowcount == 1

    def _told(self, column: str) -> Mapping[str, Any]:
        with self._store.transaction() as connection:
            told: Mapping[str, Any] | None = connection.execute(select(_CAMPAIGN.c[column])).scalar_one_or_none()
        if told is None:
            raise OutputError(f"{self._store.name} holds no campaign to work on; {START}")
        return told


def _replace(connection: Connection, jobs: Sequence[QueuedJob], leased: set[int]) -> None:
    """Put jobs in place of all that are not leased."""
    connection.execute(delete(_JOBS).where(_JOBS.c.number.not_in(leased)))
    rows = [
        {"number": job.number, "uploads": job.uploads, "status": DONE if job.done else WAITING}
        for job in jobs
        if job.number not in leased
    ]
    if rows:
        connection.execute(insert(_JOBS), rows)


def _now() -> ColumnElement[Any]:
    """The database's clock: those of machines differ."""
    return func.clock_timestamp()


def _expiry() -> ColumnElement[Any]:
    return _now() + timedelta(seconds=LEASE_SECONDS)


def _alive() -> ColumnElement[bool]:
    return and_(_JOBS.c.status == LEASED, _JOBS.c.expires >= _now())
