"""Files that are replaced whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

PARTIAL = ".partial"  # how the names of files end that are not whole yet


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a file to write, which then takes the place of ``path``; of a failure nothing is left.

    Several processes may write the same path. A killed one leaves its partial file.
    """
    partial = path.with_name(f".{uuid4().hex}{PARTIAL}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
