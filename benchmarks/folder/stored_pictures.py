"""Pictures in the database of the trials, for workers that share no folder."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from sqlalchemy import Column, LargeBinary, MetaData, Table, Text, delete, select
from sqlalchemy.dialects.postgresql import insert
from torch import Tensor

from fedmjp.benchmarks.folder.pictures import png_of
from fedmjp.benchmarks.folder.store import Store
from fedmjp.files import replacing

PER_QUERY = 100
_TABLES = MetaData()
_PICTURES = Table(
    "pictures",
    _TABLES,
    Column("name", Text, primary_key=True),
    Column("png", LargeBinary, nullable=False),
)


class StoredPictures:
    """The PNG files of a run as rows of a PostgreSQL database, by the names that they would have in a folder."""

    def __init__(self, store: Store) -> None:
        self._store = store
        store.make_tables(_TABLES)

    def save(self, images: Mapping[str, Tensor]) -> None:
        """Keep pictures, as a ``PictureKeeper`` does; StoreError if the database fails."""
        rows = [{"name": name, "png": png_of(images[name])} for name in sorted(images)]
        with self._store.transaction() as connection:
            statement = insert(_PICTURES)
            written = {"png": statement.excluded.png}
            connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=written), rows)

    def names(self) -> set[str]:
        """Of all pictures."""
        with self._store.transaction() as connection:
            return set(connection.execute(select(_PICTURES.c.name)).scalars())

    def copy(self, names: Collection[str], folder: Path) -> None:
        """Write those of these that are there into a folder of pictures, and delete what else is in it.

        Raises:
            StoreError: If the database fails.
            OSError: If the folder cannot be written.
        """
        wanted = self.names() & set(names)
        for path in folder.rglob("*.png"):
            if str(path.relative_to(folder)) not in wanted:
                path.unlink()
        for some in _in_chunks(wanted):
            with self._store.transaction() as connection:
                rows = connection.execute(select(_PICTURES).where(_PICTURES.c.name.in_(some))).all()
            for row in rows:
                path = folder / row.name
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as partial:
                    partial.write_bytes(row.png)

    def delete(self, names: Collection[str]) -> None:
        """Forget some."""
        for some in _in_chunks(names):
            with self._store.transaction() as connection:
                connection.execute(delete(_PICTURES).where(_PICTURES.c.name.in_(some)))


def _in_chunks(names: Collection[str]) -> Iterator[list[str]]:
    ordered = sorted(names)
    for start in range(0, len(ordered), PER_QUERY):
        yield ordered[start : start + PER_QUERY]
