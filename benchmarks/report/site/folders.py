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
    """Find every folder at or beneath some folders that holds trials, in alphabetical order.

    Args:
        roots: Studies, and folders of studies.
        database: URL of the database with the trials of folders that hold none themselves; may be empty.

    Returns:
        Folders by a name for addresses.

    Raises:
        OutputError: If one is no folder, or none holds trials.
    """
    names: dict[Path, str] = {}
    for root in roots:
        if not root.is_dir():
            raise OutputError(f"{root} is no folder; name a folder of results, or one of several")
        for path in _walk_studies(root, database):
            parts = path.relative_to(root).parts or (root.resolve().name,)
            names.setdefault(path.resolve(), unique_name("-".join(parts), names.values()))
    if not names:
        raise OutputError(f"no folder in {', '.join(map(str, roots))} holds trials.sqlite or {TRIALS}; run a campaign")
    return {name: path for path, name in names.items()}


def unique_name(name: str, used_names: Iterable[str]) -> str:
    """Reduce a name to letters that every file system and address bears, and number it if it is in use.

    Args:
        name: Any text.
        used_names: Names already in use; upper and lower case count as the same.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "unnamed"
    used = {used_name.casefold() for used_name in used_names}
    numbered = (plain if number == 1 else f"{plain}-{number}" for number in range(1, len(used) + 2))
    return next(candidate for candidate in numbered if candidate.casefold() not in used)


def resolve_address(folder: Path, address: str) -> Path | None:
    """Resolve an address in a README to a path, inside its folder or outside.

    Args:
        folder: Folder of the README.
        address: A relative address, with or without an anchor.

    Returns:
        The path; None if it does not exist.
    """
    try:
        path = (folder / unquote(address.partition("#")[0])).resolve()
        return path if path.exists() else None
    except (OSError, ValueError):
        return None


def _walk_studies(root: Path, database: str) -> Iterator[Path]:
    for folder, inner, _ in os.walk(root):
        inner.sort()
        path = Path(folder)
        if (path / MARK).exists():
            inner.clear()  # its copies of studies are none
        elif _holds_trials(path, database):
            inner.clear()  # what a study's own folders hold is part of it
            yield path


def _holds_trials(folder: Path, database: str) -> bool:
    """Check whether a folder holds a run or a published study."""
    files = (OutputFolder(folder).database, folder / TRIALS)
    return any(file.is_file() for file in files) or (bool(database) and (folder / ABOUT).is_file())
