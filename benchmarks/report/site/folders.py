"""Where studies lie, and what they and their files are called in the addresses of a site."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.study import TRIALS
from fedmjp.benchmarks.plan.trial_plan import ABOUT
from fedmjp.errors import OutputError

MARK = ".fedmjp-site"  # lies in a site


def find_studies(roots: Sequence[Path], database: str = "") -> dict[str, Path]:
    """Every folder at or beneath these that holds trials, by a name for addresses, in alphabetical order.

    Raises:
        OutputError: If one is no folder, or none holds trials.
    """
    names: dict[Path, str] = {}
    for root in roots:
        if not root.is_dir():
            raise OutputError(f"{root} is no folder; name a folder of results, or one of several")
        for path in _beneath(root, database):
            parts = path.relative_to(root).parts or (root.resolve().name,)
            names.setdefault(path.resolve(), unique("-".join(parts), names.values()))
    if not names:
        raise OutputError(f"no folder in {', '.join(map(str, roots))} holds trials.sqlite or {TRIALS}; run a campaign")
    return {name: path for path, name in names.items()}


def unique(name: str, taken: Iterable[str]) -> str:
    """The name in letters that every file system and address bears, with a number where it is taken."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "unnamed"
    used = {other.casefold() for other in taken}
    numbered = (plain if number == 1 else f"{plain}-{number}" for number in range(1, len(used) + 2))
    return next(candidate for candidate in numbered if candidate.casefold() not in used)


def file_in(folder: Path, address: str) -> Path | None:
    """What a README in a folder means by an address, whether it lies in it or not; None if there is no such thing."""
    try:
        path = (folder / unquote(address.partition("#")[0])).resolve()
        return path if path.exists() else None
    except (OSError, ValueError):
        return None


def _beneath(root: Path, database: str) -> Iterator[Path]:
    for folder, inner, _ in os.walk(root):
        inner.sort()
        path = Path(folder)
        if (path / MARK).exists():
            inner.clear()  # its copies of studies are none
        elif holds_trials(path, database):
            inner.clear()  # what a study's own folders hold is part of it
            yield path


def holds_trials(folder: Path, database: str) -> bool:
    """Whether a run or a published study lies here."""
    files = (OutputFolder(folder).database, folder / TRIALS)
    return any(file.is_file() for file in files) or (bool(database) and (folder / ABOUT).is_file())
