"""Third parties' entries beside a board: admitted once, recomputed or as claims, and read again with it."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.folder.output import write_json
from fedmjp.benchmarks.folder.study import holds_plan, holds_study
from fedmjp.benchmarks.leaderboard.claims import missing_plug_ins, read_claim, read_claims
from fedmjp.benchmarks.leaderboard.consistency import AdmissionError, check_consistency
from fedmjp.benchmarks.leaderboard.entries import BoardEntry, Check, Claim, Submitter
from fedmjp.benchmarks.leaderboard.figures import judge_entries
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.benchmarks.leaderboard.plausible import odd_texts
from fedmjp.benchmarks.leaderboard.record import Record
from fedmjp.benchmarks.leaderboard.submissions import Submission, unfit_names
from fedmjp.benchmarks.plan.trial_plan import ABOUT, IDENTITY
from fedmjp.config import digest_of
from fedmjp.errors import BadInputError, ConfigError, OutputError
from fedmjp.files import read_file

SUBMITTED = "submitted"
LARGEST = 20_000_000  # bytes of a submission
NAMED = 16  # digits of the digest in a file's name
UNCHECKED = "it was admitted by a version of fedmjp that recomputed nothing: add the submission again"


class Recomputation(Record):
    """What a board computed again of a submission: entries as the board's own trials give them, and why no more.

    Attributes:
        reason: Why nothing was computed; empty where something was.
        draw: Random digits of the board, which choose the pictures together with the submission's digest.
        entries: The recomputed cells, with figures of the recomputed pictures alone.
    """

    reason: str = ""
    draw: str = ""
    entries: tuple[BoardEntry, ...] = ()


class Recompute(Protocol):
    """Anything that runs trials of a submission again, as ``fedmjp.benchmarks.running.recompute`` does."""

    def __call__(self, submission: Submission, digest: str) -> Recomputation:
        """Run a sample of the submission's trials again, and raise AdmissionError where its figures are others."""


class Submitted(NamedTuple):
    """What third parties add to a board: entries that it recomputed, and claims."""

    entries: tuple[BoardEntry, ...] = ()
    claims: tuple[Claim, ...] = ()


def admit(entry_file: Path, board_folder: Path, recompute: Recompute | None = None) -> Submitted:
    """Check a file that holds a ``Submission``, run a sample of it again, and put it beside a board.

    Args:
        entry_file: The submission, as JSON.
        board_folder: A folder of results.
        recompute: Runs trials again; without it all entries are claims.

    Returns:
        The entries as recomputed, and what remains a claim.

    Raises:
        ConfigError: If the file is not of that form, or names hold characters that no name needs.
        AdmissionError: If figures do not follow from the scores per picture, a verdict not from the rules, recomputed
            scores are others, the manifest is not complete, or the entry is there already.
        OutputError: If the folder holds no board or cannot be written.
    """
    published = holds_study(board_folder) and holds_plan(board_folder)
    if not published and not (board_folder / ABOUT).is_file():
        raise OutputError(f"{board_folder} holds no results to add an entry to; name the folder of a campaign")
    content = _parsed(entry_file)
    missing = missing_plug_ins(content)
    # An attack is a label; without its defences and server an entry cannot be read.
    readable = all(plug_in.kind == ATTACKS.kind for plug_in in missing)
    submission = _read(entry_file, content) if readable else None
    if submission is not None:
        submission = check_consistency(submission)
        content = submission.model_dump(mode="json")
    submitter = submission.submitter if submission else _submitter(entry_file, content)
    _refuse_duplicates(content, submitter, board_folder)
    if missing or submission is None or recompute is None:
        outcome = Recomputation(reason=str(missing[0]) if missing else "nothing was run again")
    else:
        outcome = recompute(submission, digest_of(content))
    result = _submitted(content, submitter, outcome)
    recomputation = outcome.model_dump(mode="json")
    sha256 = digest_of([content, recomputation])
    try:
        (board_folder / SUBMITTED).mkdir(exist_ok=True)
        write_json(
            board_folder / SUBMITTED / f"{sha256[:NAMED]}.json",
            {"sha256": sha256, "submission": content, "recomputation": recomputation},
        )
    except OSError as error:
        raise OutputError(f"{board_folder / SUBMITTED} cannot be written: {error.strerror or error}") from None
    return result


def read_submitted(board_folder: Path, *, tell: Callable[[str], object] = warnings.warn) -> Submitted:
    """Read what was admitted to a board.

    Args:
        board_folder: A folder of results.
        tell: Gets a line for each file that was changed or damaged since, and is left out.
    """
    entries: list[BoardEntry] = []
    claims: list[Claim] = []
    for path, content, outcome in _admitted(board_folder, tell):
        try:
            submitted = _submitted(content, _submitter(path, content), outcome)
        except BadInputError as error:
            tell(f"{path} is left out: {error}; add the submission again")
            continue
        entries += submitted.entries
        claims += submitted.claims
    return Submitted(tuple(entries), tuple(claims))


def _admitted(
    board_folder: Path, tell: Callable[[str], object]
) -> Iterator[tuple[Path, dict[str, Any], Recomputation]]:
    """Yield each admitted file with its submission and what was recomputed; files of former versions hold neither."""
    for path in sorted((board_folder / SUBMITTED).glob("*.json")):
        try:
            values = json.loads(read_file(path, 2 * LARGEST))  # indented
            content, recomputation = values["submission"], values.get("recomputation")
            signed = content if recomputation is None else [content, recomputation]
            names = {values["sha256"][:NAMED], content["entries"][0]["id"] if recomputation is None else ""}
            if values["sha256"] != digest_of(signed) or path.stem not in names:
                raise AdmissionError("it was changed after it had been admitted")
            yield path, content, _outcome(content, recomputation)
        except (OSError, BadInputError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            tell(f"{path} is left out: {error}; add the submission again")


def _outcome(content: Mapping[str, Any], recomputation: Any) -> Recomputation:
    if recomputation is None:
        return Recomputation(reason=UNCHECKED)
    missing = missing_plug_ins(content)
    return Recomputation(reason=str(missing[0])) if missing else Recomputation.read(json.dumps(recomputation))


def _submitted(content: Mapping[str, Any], submitter: Submitter, outcome: Recomputation) -> Submitted:
    """Judge recomputed entries, and make claims of the attacks that were not recomputed in full."""
    recomputed = {_measured(entry.model_dump(mode="json"), ""): entry for entry in outcome.entries}
    if not recomputed:
        return Submitted((), read_claims(content, submitter, outcome.reason))
    claims = []
    for stated in content["entries"]:
        entry = recomputed.get(_measured(stated, ""))
        if stated["role"] == "attack" and (entry is None or entry.check != "recomputed"):
            check: Check = "claimed" if entry is None else "recomputed in part"
            claims.append(read_claim(stated, submitter, check, _explain(stated, entry)))
    return Submitted(tuple(judge_entries(outcome.entries)), tuple(claims))


def _explain(stated: Mapping[str, Any], entry: BoardEntry | None) -> str:
    if entry is None:
        return "its recipe holds no such cell"
    pictures = len(stated["scores"].get(MEASURES[entry.reveals].leakage, {})) + len(stated["flat"] or ())
    return f"{entry.n + len(entry.flat or ())} of {pictures} pictures recomputed: an entry of its own"


def _refuse_duplicates(content: Mapping[str, Any], submitter: Submitter, board_folder: Path) -> None:
    """Refuse an entry that its submitter already has on the board, under whatever campaign."""
    former: dict[str, tuple[Path, str]] = {}
    for path, admitted, _ in _admitted(board_folder, lambda _: None):
        author = _submitter(path, admitted)
        if _is_of(submitter, author):
            former |= {_measured(entry): (path, author.name) for entry in admitted["entries"]}
    for entry in content["entries"]:
        if _measured(entry) in former:
            path, author_name = former[_measured(entry)]
            raise AdmissionError(
                f"{entry['model']}, {entry['defence']}, {entry['attack']}, setting {entry['setting']} is there "
                f"already, as entry {path.stem} of {author_name}: to replace it, remove {path}; to add to it, put all "
                "entries into one file"
            )


def _measured(entry: Mapping[str, Any], pictures_sha256: str | None = None) -> str:
    """Identify an entry by its cell and pictures, in whichever campaign."""
    try:
        pictures = entry["provenance"]["pictures_sha256"] if pictures_sha256 is None else pictures_sha256
        cell = {name: entry[name] for name in IDENTITY if name != "reveals"}
    except (LookupError, TypeError) as error:
        raise ConfigError(f"an entry is of another form ({type(error).__name__}: {error})") from None
    return digest_of([cell, entry.get("reveals", "pictures"), pictures])


def _is_of(submitter: Submitter, candidate: Submitter) -> bool:
    return any(
        " ".join(getattr(submitter, name).casefold().split()) == " ".join(getattr(candidate, name).casefold().split())
        for name in ("name", "contact")
    )


def _submitter(path: Path, content: Mapping[str, Any]) -> Submitter:
    try:
        return Submitter.read(json.dumps(content.get("submitter")))
    except ConfigError as error:
        raise ConfigError(f"{path}, submitter: {error}") from None


def _parsed(path: Path) -> Any:
    try:
        content = json.loads(read_file(path, LARGEST))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    for fault in odd_texts(content):
        raise ConfigError(f"{path}: {fault}; shorten or remove it")
    for fault in unfit_names(content):
        raise ConfigError(f"{path}, {fault}")
    return content


def _read(path: Path, content: Any) -> Submission:
    entries = content.get("entries") if isinstance(content, dict) else None
    for number, values in enumerate(entries if isinstance(entries, list) else [], start=1):
        try:
            BoardEntry.read(json.dumps(values))
        except ConfigError as error:
            raise ConfigError(f"{path}, entry {number}: {error}") from None
    try:
        return Submission.read(json.dumps(content))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
