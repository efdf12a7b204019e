"""Third parties' entries: admitted if their figures follow from their own data and their claim from our rules."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks.folder.ledger import ABOUT
from benchmarks.folder.output import write_text
from benchmarks.leaderboard.entries import Entry, Record, Submission
from benchmarks.leaderboard.rechecking import AdmissionError, checked
from fedmjp.errors import BadInputError, ConfigError, OutputError

SUBMITTED = "submitted"


class _Admitted(Record):
    """A submission as it lies in a board's folder; ``sha256`` digests it."""

    sha256: str
    submission: Submission


def admit(entry_file: Path, board_folder: Path) -> tuple[Entry, ...]:
    """Check a file that holds a ``Submission`` and put it beside a board.

    Everything that can be computed again is, and is stored as it was computed here.

    Returns:
        Its entries; the id of the first names the stored file.

    Raises:
        ConfigError: If the file is not of that form.
        AdmissionError: If a claim does not follow, or the entry is there already.
        OutputError: If the folder holds no board or cannot be written.
    """
    if not (board_folder / ABOUT).is_file():
        raise OutputError(f"{board_folder} holds no results to add an entry to; name the folder of a campaign")
    submission = checked(_parsed(entry_file))
    known = {entry.id for entry in submitted(board_folder)} | {path.stem for path in _files(board_folder)}
    for entry in submission.entries:
        if entry.id in known:
            raise AdmissionError(f"entry {entry.id} ({entry.model}, {entry.defence}, {entry.attack}) is there already")
    first = submission.entries[0]
    admitted = _Admitted(sha256=submission.digest(), submission=submission)
    try:
        (board_folder / SUBMITTED).mkdir(exist_ok=True)
        write_text(board_folder / SUBMITTED / f"{first.id}.json", admitted.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"{board_folder / SUBMITTED} cannot be written: {error.strerror or error}") from None
    return submission.entries


def submitted(board_folder: Path, *, tell: Callable[[str], object] = warnings.warn) -> tuple[Entry, ...]:
    """The entries that were admitted to a board, checked again.

    Args:
        board_folder: The board's folder.
        tell: Gets one line for each file that was changed or damaged since; its entries are left out.
    """
    found: list[Entry] = []
    for path in _files(board_folder):
        try:
            admitted = _Admitted.read(path.read_bytes())
            submission = admitted.submission
            if admitted.sha256 != submission.digest() or path.stem != submission.entries[0].id:
                raise AdmissionError("it was changed after it had been admitted")
            found += checked(submission).entries
        except (OSError, BadInputError) as error:
            tell(f"{path} is left out: {error}; add the submission again")
    return tuple(found)


def _files(board_folder: Path) -> list[Path]:
    return sorted((board_folder / SUBMITTED).glob("*.json"))


def _parsed(path: Path) -> Submission:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    entries = content.get("entries") if isinstance(content, dict) else None
    for number, values in enumerate(entries if isinstance(entries, list) else [], start=1):
        try:
            Entry.read(json.dumps(values))
        except ConfigError as error:
            raise ConfigError(f"{path}, entry {number}: {error}") from None
    try:
        return Submission.read(json.dumps(content))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
