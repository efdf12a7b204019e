"""Trials in a SQL database: one row per (cell, picture), never lost, never doubled."""

import hashlib
import json
import logging
import os
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Connection,
    DateTime,
    Double,
    Engine,
    ForeignKey,
    MetaData,
    Row,
    Table,
    Text,
    TypeDecorator,
    create_engine,
    event,
    func,
    inspect,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DatabaseError, SQLAlchemyError

from fedmjp.benchmarks.folder.trials import START_OVER, TrialResult, frame_of
from fedmjp.errors import GAVE_UP, MissingExtraError, OutputError, StoreError
from fedmjp.files import SQLITE, require_no_link

if TYPE_CHECKING:
    import pandas as pd

BUSY_MILLISECONDS = 30_000
CONNECT_SECONDS = 10
CHUNK = 1000  # keys per query: every database takes so many parameters
DRIVER = "psycopg"
POSTGRESQL = ("postgresql", "postgres", f"postgresql+{DRIVER}")
FORMS = "write sqlite:///FILE or postgresql://USER:PASSWORD@HOST:5432/DATABASE (special letters as %XX)"
REMEDY = {
    "sqlite": "see that the disk has room, the file can be written and no program locks it",
    "postgresql": "see that the server runs, has room and lets this user in",
}
# What is said of a server that is away, or comes up: it may be tried again, as a wrong name or password may not.
AWAY = ("Connection refused", "the database system is", "server closed the connection", "timeout expired")
DAMAGED = f"the file is damaged: put a copy in its place; {START_OVER}"
# A second process waits for the first instead of making the tables too.
LOCK_SCHEMA = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(7120230618)"}
# What the driver ignores when a connection is lost it would print beside our error.
logging.getLogger(DRIVER).addHandler(logging.NullHandler())
INSERT: dict[str, type[sqlite.Insert | postgresql.Insert]] = {"sqlite": sqlite.Insert, "postgresql": postgresql.Insert}


class Json(TypeDecorator[dict[str, Any]]):
    """A mapping as text: PostgreSQL's own JSON refuses the infinity of an exact reconstruction's PSNR."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: dict[str, Any] | None, _dialect: object) -> str:
        """Write a mapping as text."""
        return json.dumps(value)

    def process_result_value(self, value: str | None, _dialect: object) -> Any:
        """Read a mapping from text."""
        return json.loads(value or "null")


class _Message(TypeDecorator[str]):
    """Text from anywhere: no database takes lone surrogates, PostgreSQL no zero bytes."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: object) -> str | None:
        return value and value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


# The order of bytes, whatever language the server is set to.
_KEY = Text().with_variant(Text(collation="C"), "postgresql")


_TABLES = MetaData()
_ENVIRONMENTS = Table(
    "environments",
    _TABLES,
    Column("sha256", _KEY, primary_key=True),
    Column("content", Json, nullable=False),
)
_TRIALS = Table(
    "trials",
    _TABLES,
    Column("key", _KEY, primary_key=True),
    Column("status", Text, nullable=False),
    Column("error", _Message),
    Column("model", Text, nullable=False),
    Column("defence", Text, nullable=False),
    Column("mask_ratio", Double, nullable=False),
    Column("attack", Text, nullable=False),
    Column("setting", Text, nullable=False),
    Column("protocol", Text, nullable=False),
    Column("picture", Text, nullable=False),
    Column("picture_sha256", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("realised_ratio", Double),
    Column("weights_sha256", Text),
    Column("attack_seconds", Double),
    Column("scores", Json, nullable=False),
    Column("diagnostics", Json, nullable=False),
    Column("environment_sha256", ForeignKey(_ENVIRONMENTS.c.sha256), nullable=False),
    Column("recorded_at", DateTime, nullable=False),
)


class Store:
    """A database of trials: a SQLite file, or PostgreSQL for workers on several machines.

    Opening one that cannot be used raises ``OutputError``, without its driver ``MissingExtraError``. Every method but
    ``close`` raises ``StoreError`` when the database fails it, and so does opening one whose server is away; what was
    put before stays.
    """

    def __init__(self, url: URL) -> None:
        self.name = _shown(url)
        if url.drivername == "sqlite":
            for end in SQLITE:  # SQLite opens them under these names
                require_no_link(Path(f"{url.database}{end}"))
        self._engine = _engine(url)
        self.make_tables(_TABLES)
        self._path = Path(url.database) if url.drivername == "sqlite" and url.database else None
        self._begun = None if self._path is None else self._path.stat()

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a SQLite file, or make it; its folder must exist.

        Args:
            path: Of the file.
        """
        return cls(URL.create("sqlite", database=str(path)))

    @classmethod
    def open(cls, url: str) -> Self:
        """Open ``sqlite:///FILE`` or ``postgresql://USER:PASSWORD@HOST:PORT/DATABASE``.

        Args:
            url: Of the database.
        """
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):
            raise OutputError(f"The database URL cannot be read; {FORMS}") from None  # it may hold a password
        if parsed.drivername == "sqlite":
            if parsed.host or parsed.query or parsed.database in (None, "", ":memory:"):
                raise OutputError(f"A SQLite URL names a file and nothing else; {FORMS}")
            return cls(parsed)
        if parsed.drivername not in POSTGRESQL:
            raise OutputError(f"{parsed.drivername!r} is not a kind of database that fedmjp writes to; {FORMS}")
        if url.count("@") > 1:  # the end of the password would be taken for the host, and shown
            raise OutputError(f"The database URL has more than one @; {FORMS}")
        return cls(parsed.set(drivername=f"postgresql+{DRIVER}"))

    def put(self, trials: Iterable[TrialResult]) -> None:
        """Write trials in one transaction: all of them or, if the process dies, none.

        A finished trial is never overwritten; a failed one is replaced by a later attempt.

        Args:
            trials: In any order.
        """
        # In one order, so that two writers of the same rows wait for each other but never in a circle.
        ordered = sorted(trials, key=lambda trial: trial.key)
        if not ordered:
            return
        shared = {id(trial.environment): trial.environment for trial in ordered}  # thousands of trials name one
        digests = {place: _digest(environment) for place, environment in shared.items()}
        rows = [{**vars(trial), "environment_sha256": digests[id(trial.environment)]} for trial in ordered]
        environments = {row["environment_sha256"]: row.pop("environment") for row in rows}
        insert = INSERT[self.dialect]
        statement = insert(_TRIALS)
        columns = {column.name: statement.excluded[column.name] for column in _TRIALS.c if column.name != "key"}
        with self.transaction() as connection:
            connection.execute(
                insert(_ENVIRONMENTS).on_conflict_do_nothing(),
                [{"sha256": key, "content": environments[key]} for key in sorted(environments)],
            )
            connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["key"], set_=columns, where=_TRIALS.c.status == "failed"
                ),
                rows,
            )

    def finished(self, keys: Collection[str]) -> set[str]:
        """Pick the keys whose trial is done: it ended well, or the attack gave up, as it would again.

        Args:
            keys: Of trials.
        """
        with self.transaction() as connection:
            rows = _rows(connection, ("key", "status", "error"), keys)
            return {row.key for row in rows if row.status == "ok" or (row.error or "").startswith(GAVE_UP)}

    def counts(self) -> dict[str, int]:
        """Count the trials in the whole database by status."""
        status = _TRIALS.c.status
        with self.transaction() as connection:
            return {row[0]: row[1] for row in connection.execute(select(status, func.count()).group_by(status))}

    def trials(self, keys: Collection[str]) -> Sequence[TrialResult]:
        """Return trials, done or failed, in a fixed order.

        Args:
            keys: Of the trials.
        """
        environments = self.environments()
        with self.transaction() as connection:
            rows = [dict(row._mapping) for row in _rows(connection, _TRIALS.c.keys(), keys)]
            return [TrialResult(environment=environments[row.pop("environment_sha256")], **row) for row in rows]

    def frame(self, keys: Collection[str] | None = None) -> "pd.DataFrame":
        """Return trials as ``RecordedTrials`` has them.

        Args:
            keys: Of the trials; all if None.
        """
        with self.transaction() as connection:
            return frame_of([tuple(row) for row in _rows(connection, _TRIALS.c.keys(), keys)])

    def environments(self) -> dict[str, dict[str, Any]]:
        """Return environments as ``RecordedTrials`` has them."""
        with self.transaction() as connection:
            return {row.sha256: row.content for row in connection.execute(select(_ENVIRONMENTS))}

    def close(self) -> None:
        """Give the database back."""
        self._engine.dispose()

    def is_in_place(self) -> bool:
        """Tell whether the file that was opened is still there under its name; a server's database always is."""
        if self._path is None or self._begun is None:
            return True
        try:
            return os.path.samestat(self._path.stat(), self._begun)
        except OSError:
            return False

    def copy_to(self, path: Path) -> None:
        """Copy a SQLite database that is open, even if its file was removed.

        Args:
            path: Of the copy, which must not exist.

        Raises:
            OutputError: If there is a file.
            StoreError: If it cannot be copied.
        """
        if os.path.lexists(path):
            raise OutputError(f"{path} is there already")
        with self.transaction() as connection, closing(sqlite3.connect(path)) as copy:
            source: Any = connection.connection.driver_connection
            source.backup(copy)

    def make_tables(self, tables: MetaData) -> None:
        """Make tables beside the trials, unless they are there.

        Args:
            tables: What must be there.

        Raises:
            OutputError: If they cannot be made, or are of another version of fedmjp.
            StoreError: If the server is away.
        """
        try:
            _make_tables(self._engine, self.name, tables)
        except (SQLAlchemyError, UnicodeError) as error:
            if any(sign in _reason(error) for sign in AWAY):
                raise self._failure(error) from None
            remedy = DAMAGED if self._shows_damage(error) else REMEDY[self.dialect]
            raise OutputError(f"{self.name} cannot be used as a trials database: {_reason(error)}; {remedy}") from None

    @property
    def dialect(self) -> str:
        """Return the kind of database: sqlite or postgresql."""
        return self._engine.dialect.name

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Do all of what is done with the connection, or nothing; StoreError where the database fails it."""
        try:
            with self._engine.begin() as connection:
                yield connection
        except (
            SQLAlchemyError,
            sqlite3.Error,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # values that no column has
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> StoreError:
        remedy = f"finished trials are kept; {REMEDY[self.dialect]}, and run again"
        if self._shows_damage(error):
            remedy = DAMAGED
        return StoreError(f"The trials database {self.name} failed: {_reason(error)}; {remedy}")

    def _shows_damage(self, error: Exception) -> bool:
        """Tell whether the file itself is at fault, which trying again does not mend."""
        if isinstance(error, SQLAlchemyError):
            # SQLite's own word for damage has no kind of its own; nor has text that is none.
            return type(error) is DatabaseError or "Could not decode" in str(error)
        return self.dialect == "sqlite" and not isinstance(error, UnicodeEncodeError)


def _digest(environment: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()


def _engine(url: URL) -> Engine:
    if url.drivername != "sqlite":
        url = url.update_query_dict({"connect_timeout": str(CONNECT_SECONDS), **url.query})
    try:
        # A connection that died while an attack ran for hours is replaced, not an error. A server takes a hundred, and
        # hundreds of workers keep one each.
        engine = create_engine(url, pool_pre_ping=True, **({} if url.drivername == "sqlite" else {"pool_size": 1}))
    except ImportError:
        raise MissingExtraError(_shown(url), DRIVER, "postgresql") from None
    event.listen(engine, "connect", _prepare_sqlite if url.drivername == "sqlite" else _prepare_postgresql)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # A reader never blocks the writer, and a second process waits instead of failing.
    connection.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
    _require_ours(connection)
    connection.execute("PRAGMA journal_mode=WAL")


def require_ours(path: Path) -> None:
    """Refuse a SQLite file with tables of another program; what is no database, or a damaged one, passes.

    Args:
        path: Of the file, which exists.

    Raises:
        OutputError: If it is a link, or another program's.
    """
    require_no_link(path)
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as connection:
        _require_ours(connection)


def _require_ours(connection: Any) -> None:
    """Refuse the tables of another program before anything in them is changed."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
    columns = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info('trials')")}
    if tables and not columns & {"key", "picture"}:
        path = next(file for _, name, file in connection.execute("PRAGMA database_list") if name == "main")
        strange = ", ".join(repr(name[:40]) for name in sorted(tables)[:3])
        raise OutputError(
            f"{path} is the database of another program (it holds {strange}); name another folder or file"
        )


def _prepare_postgresql(connection: Any, _record: object) -> None:
    connection.execute(f"SET lock_timeout = {BUSY_MILLISECONDS}")
    connection.commit()


def _make_tables(engine: Engine, name: str, tables: MetaData) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(LOCK_SCHEMA[engine.dialect.name])
        inspector = inspect(connection)
        columns = {
            table: {column["name"] for column in inspector.get_columns(table)}
            for table in tables.tables
            if inspector.has_table(table)
        }
        if not columns:
            tables.create_all(connection)
        elif columns != {table.name: set(table.c.keys()) for table in tables.tables.values()}:
            remedy = START_OVER if engine.dialect.name == "sqlite" else "name another database"
            raise OutputError(f"{name} was written by another version of fedmjp; {remedy}")


def _rows(connection: Connection, columns: Iterable[str], keys: Collection[str] | None) -> Iterator[Row[Any]]:
    """Read rows in the order of their keys."""
    statement = select(*(_TRIALS.c[column] for column in columns)).order_by(_TRIALS.c.key)
    if keys is None:
        yield from connection.execute(statement)
        return
    ordered = sorted(set(keys))
    for start in range(0, len(ordered), CHUNK):
        yield from connection.execute(statement.where(_TRIALS.c.key.in_(ordered[start : start + CHUNK])))


def _shown(url: URL) -> str:
    """Name a database without its password, which may stand in the query as well."""
    if url.drivername == "sqlite":
        return str(url.database)
    return url.set(drivername="postgresql", query={}).render_as_string(hide_password=True)


def _reason(error: Exception) -> str:
    """Give the driver's words in one line, without the statement that PostgreSQL quotes."""
    return " ".join(re.split(r"\nLINE \d+:", str(getattr(error, "orig", None) or error))[0].split())
