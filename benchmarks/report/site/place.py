"""The folder that a site stands in: it may be replaced or removed only while it holds what fedmjp wrote alone."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fedmjp.benchmarks.report.site.folders import MARK
from fedmjp.errors import OutputError
from fedmjp.files import read_file

LARGEST = 100_000_000  # bytes of the list of a site's files


def list_files(site: Path) -> None:
    """Write the names of all files of a site into its mark.

    Args:
        site: That is whole.
    """
    (site / MARK).write_text(json.dumps(sorted(_names(site)), indent=0) + "\n", encoding="utf-8")


def require_replaceable(site: Path) -> None:
    """Refuse a place that holds anything but a site as it was written.

    Args:
        site: Where a site is to stand.

    Raises:
        OutputError: If it holds a file that its list does not name, or no site.
    """
    if not site.exists() or (site.is_dir() and not any(site.iterdir())):
        return
    if not (site / MARK).is_file():
        raise OutputError(f"{site} holds something that is no site of fedmjp's; name another --site")
    try:
        written = set(json.loads(read_file(site / MARK, LARGEST)))
    except (OSError, ValueError, TypeError, RecursionError):
        written = set()
    if strange := next((name for name in _names(site) if name not in written), None):
        raise OutputError(f"{site / strange} is not from fedmjp, and would be lost: move it, or name another --site")


def remove_site(folder: Path) -> None:
    """Remove a site that was replaced or never finished; nothing else of that name, and never what a link leads to.

    Args:
        folder: Of the site; may be missing.
    """
    if not folder.is_symlink() and (folder / MARK).is_file():
        shutil.rmtree(folder, ignore_errors=True)


def _names(site: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(site):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*links, *files):
            if name != MARK or Path(parent) != site:
                yield Path(parent, name).relative_to(site).as_posix()
