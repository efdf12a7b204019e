"""A folder of results as a site shows it: a campaign with its board, or rows of another study."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pyarrow import parquet

from fedmjp.benchmarks.folder.output import OutputFolder, write_json
from fedmjp.benchmarks.folder.study import TRIALS, holds_plan, holds_study, open_results
from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.report.front import sentence
from fedmjp.benchmarks.report.matrix import matrix
from fedmjp.benchmarks.report.page import Gallery
from fedmjp.benchmarks.report.publish import publish
from fedmjp.benchmarks.report.render import board_in, gallery_in
from fedmjp.benchmarks.report.site.readme import Readme
from fedmjp.benchmarks.report.site.results import Answer, by_defence
from fedmjp.errors import OutputError

MANIFEST = "manifest.json"
LARGEST = 1_500_000  # bytes of a page


@dataclass(frozen=True)
class Study:
    """One study: its name in addresses, where it lies, what it says of itself, and its board if it is a campaign.

    ``rows`` counts the rows of its trials.
    """

    slug: str
    folder: Path
    readme: Readme
    about: Mapping[str, Any]
    rows: int
    board: Board | None

    @property
    def title(self) -> str:
        """Its README's, or its campaign's."""
        return self.readme.title or (self.board.title if self.board else self.folder.name)

    @property
    def heading(self) -> str:
        """The title as pages show it, with code marked as such."""
        return self.readme.heading or self.title

    @property
    def question(self) -> str:
        """What was asked."""
        return (self.board.question if self.board else "") or self.readme.sentence

    @property
    def pictures(self) -> int:
        """How many pictures most cells have."""
        return max((entry.n for entry in self.board.entries), default=0) if self.board else 0

    @cached_property
    def answer(self) -> Answer:
        """What its strongest attacks recover."""
        return Answer.of_board(self.board) if self.board else Answer(None, None)

    @property
    def found(self) -> str:
        """Its answer in a sentence, as the leaderboard's page has it."""
        return sentence(self.board, matrix(self.board)) if self.board else ""

    @cached_property
    def strongest(self) -> list[BoardEntry]:
        """The strongest attack on each defence."""
        return by_defence(self.board.entries) if self.board else []

    @property
    def date(self) -> str:
        """The day of its last trial; empty if that was not recorded."""
        last = self.about.get("trials", {}).get("last")
        return str(last)[:10] if last else ""

    @property
    def lost(self) -> str:
        """Why nobody can check out the code that made it; empty if one can."""
        return str(self.about.get("commit_lost") or "")

    @cached_property
    def commits(self) -> list[str]:
        """Those that made its rows; marked where files had been changed."""
        environments = self.about.get("environments") or [self.about]
        revisions = [one["revision"] for one in environments if one.get("revision")]
        made = (f"{one['commit']}{', changed' if one.get('modified') else ''}" for one in revisions if one["commit"])
        return list(dict.fromkeys(made))

    @property
    def commands(self) -> list[str]:
        """What repeats it."""
        commands = self.about.get("commands") or [self.about.get("command")]
        return [str(command) for command in commands if command]


def read_and_publish(slug: str, folder: Path, target: Path, *, pictures: bool, database: str) -> Study:
    """Read a study, and write what it is shown with into the target: leaderboard, tables, manifest, rows.

    Raises:
        OutputError: If it cannot be read.
    """
    readme = Readme.of(folder)
    stated = _stated(folder)
    published = holds_study(folder)
    rows, board = 0, None
    if published:
        rows = parquet.read_metadata(folder / TRIALS).num_rows
        (target / TRIALS).write_bytes((folder / TRIALS).read_bytes())
    if not published or holds_plan(folder):
        output = OutputFolder(folder)
        ledger, store = open_results(output, "" if published or output.database.exists() else database)
        board = board_in(ledger, store, folder)
        rows = len(ledger.trials)
        stated = board.about | {key: stated[key] for key in ("commit_lost",) if key in stated}
        _publish(board, target, gallery_in(ledger, store, board, output) if pictures else None)
    write_json(target / MANIFEST, stated)
    study = Study(slug, folder, readme, stated, rows, board)
    study.commits, study.date, study.commands  # noqa: B018 (a manifest that is none is told here)
    return study


def _stated(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(manifest, dict):
        raise OutputError(f"{path} holds no manifest")
    return manifest


def _publish(board: Board, target: Path, gallery: Gallery | None) -> None:
    """With pictures, if the page then stays small enough to be sent to a phone."""
    page, *_ = publish(board, target, formats=("html", "csv", "json"), pictures=gallery)
    if gallery and page.stat().st_size > LARGEST:
        publish(board, target, formats=("html",), pictures=None)
