"""Trials in a SQL database: one row per (cell, picture), never lost, never doubled."""

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, URL, create_engine, event, inspect, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fedmjp.errors import OutputError

BUSY_MILLISECONDS = 30_000


class Base(DeclarativeBase):
    """Tables of the store."""


class Trial(Base):
    """One attack on one picture, scored in one setting; or the error that it ended with.

    ``key`` digests everything that determines the trial. ``scores`` maps metric names to values, or
    to null where the metric could not be computed on the machine. ``status`` is "ok" or "failed".
    ``environment`` says with which versions, revision and hardware the trial was run; ``recorded_at``
    is UTC.
    """

    __tablename__ = "trials"

    key: Mapped[str] = mapped_column(primary_key=True)
    status: Mapped[str]
    error: Mapped[str | None]
    model: Mapped[str]
    defence: Mapped[str]
    mask_ratio: Mapped[float]
    attack: Mapped[str]
    setting: Mapped[str]
    protocol: Mapped[str]
    picture: Mapped[str]
    picture_sha256: Mapped[str]
    seed: Mapped[int]
    realised_ratio: Mapped[float | None]
    weights_sha256: Mapped[str | None]
    attack_seconds: Mapped[float | None]
    scores: Mapped[dict[str, Any]] = mapped_column(JSON)
    diagnostics: Mapped[dict[str, Any]] = mapped_column(JSON)
    environment: Mapped[dict[str, Any]] = mapped_column(JSON)
    recorded_at: Mapped[datetime]


class Store:
    """A SQLite file of trials.

    Args:
        path: The database file; its folder must exist.

    Raises:
        OutputError: If the file cannot be opened as a database.
    """

    def __init__(self, path: Path) -> None:
        self._engine = create_engine(URL.create("sqlite", database=str(path)))
        event.listen(self._engine, "connect", _prepare)
        try:
            Base.metadata.create_all(self._engine)
        except SQLAlchemyError as error:
            reason = getattr(error, "orig", error)
            raise OutputError(f"{path} cannot be used as a trials database: {reason}; --fresh starts over") from None
        found = {column["name"] for column in inspect(self._engine).get_columns(Trial.__tablename__)}
        if found != {column.key for column in Trial.__table__.columns}:
            raise OutputError(f"{path} was written by another version of fedmjp; --fresh starts over")

    def put(self, trials: Iterable[Trial]) -> None:
        """Write trials in one transaction: all of them or, if the process dies, none.

        A finished trial is never overwritten; a failed one is replaced by a later attempt.
        """
        rows = [_values(trial) for trial in trials]
        if not rows:
            return
        statement = insert(Trial)
        columns = {name: statement.excluded[name] for name in rows[0] if name != "key"}
        with Session(self._engine) as session, session.begin():
            session.execute(
                statement.on_conflict_do_update(index_elements=["key"], set_=columns, where=Trial.status == "failed"),
                rows,
            )

    def finished(self, keys: Collection[str]) -> set[str]:
        """Those of ``keys`` whose trial is done."""
        with Session(self._engine) as session:
            return set(session.scalars(select(Trial.key).where(Trial.status == "ok"))) & set(keys)

    def trials(self, keys: Collection[str]) -> Sequence[Trial]:
        """The trials behind ``keys``, done or failed, in a fixed order."""
        wanted = set(keys)
        with Session(self._engine, expire_on_commit=False) as session:
            return [trial for trial in session.scalars(select(Trial).order_by(Trial.key)) if trial.key in wanted]

    def close(self) -> None:
        """Give the file back."""
        self._engine.dispose()


def _values(trial: Trial) -> dict[str, Any]:
    values = {column.key: getattr(trial, column.key) for column in Trial.__table__.columns}
    return values | {"recorded_at": datetime.now(UTC)}


def _prepare(connection: Any, _record: object) -> None:
    # A reader never blocks the writer, and a second process waits instead of failing.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
