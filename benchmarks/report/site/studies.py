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
from fedmjp.benchmarks.report.matrix import arrange_matrix
from fedmjp.benchmarks.report.page import Gallery
from fedmjp.benchmarks.report.publish import publish
from fedmjp.benchmarks.report.render import board_in, gallery_in
from fedmjp.benchmarks.report.site.readme import Readme
from fedmjp.benchmarks.report.site.results import StrongestAttacks, find_strongest_by_defence
from fedmjp.errors import OutputError
from fedmjp.files import find_link

MANIFEST = "manifest.json"
LARGEST = 1_500_000  # bytes of a page


@dataclass(frozen=True)
class StudyPage:
    """A study as the site shows it: its slug, folder, README and manifest, and its board if it is a campaign.

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
        """Return the title of its README, or else of its campaign."""
        return self.readme.title or (self.board.title if self.board else self.folder.name)

    @property
    def heading(self) -> str:
        """Return the title with code marked as such."""
        return self.readme.heading or self.title

    @property
    def question(self) -> str:
        """Return the question of its campaign, or else the first sentence of its README."""
        return (self.board.question if self.board else "") or self.readme.sentence

    @property
    def pictures(self) -> int:
        """Count the pictures of its largest cell."""
        return max((entry.n for entry in self.board.reproduced.entries), default=0) if self.board else 0

    @cached_property
    def answer(self) -> StrongestAttacks:
        """Find its strongest attacks, with and without a defence."""
        return StrongestAttacks.select_for_board(self.board) if self.board else StrongestAttacks(None, None)

    @property
    def finding(self) -> str:
        """Summarise its result in the sentence that heads the leaderboard's page."""
        return sentence(self.board, arrange_matrix(self.board)) if self.board else ""

    @cached_property
    def strongest(self) -> list[BoardEntry]:
        """Find the strongest attack on each model and defence."""
        return find_strongest_by_defence(self.board.entries) if self.board else []

    @property
    def date(self) -> str:
        """Return the day of its last trial; empty if it was not recorded."""
        last = self.about.get("trials", {}).get("last")
        return str(last)[:10] if last else ""

    @property
    def lost(self) -> str:
        """Return the reason why its commit cannot be checked out; empty if it can."""
        return str(self.about.get("commit_lost") or "")

    @cached_property
    def commits(self) -> list[str]:
        """List the commits that its rows come from, marked where files had been changed."""
        environments = self.about.get("environments") or [self.about]
        revisions = [environment["revision"] for environment in environments if environment.get("revision")]
        commits = (
            f"{revision['commit']}{', changed' if revision.get('modified') else ''}"
            for revision in revisions
            if revision["commit"]
        )
        return list(dict.fromkeys(commits))

    @property
    def commands(self) -> list[str]:
        """List the commands that repeat it."""
        commands = self.about.get("commands") or [self.about.get("command")]
        return [str(command) for command in commands if command]


def read_and_publish(slug: str, folder: Path, target: Path, *, pictures: bool, database: str) -> StudyPage:
    """Read a study, and write its leaderboard, tables, manifest and rows into the target.

    Args:
        slug: Its name in addresses.
        folder: Folder of the study.
        target: Folder of its page; exists already.
        pictures: Whether the leaderboard shows the pictures that the run kept.
        database: URL of the database with its trials if the folder holds none; may be empty.

    Raises:
        OutputError: If it cannot be read, or holds a link.
    """
    if link := find_link(folder):
        raise OutputError(f"{link} is a link, and a site publishes nothing that one leads to: put a copy in its place")
    readme = Readme.read(folder)
    stated = _read_manifest(folder)
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
    study = StudyPage(slug, folder, readme, stated, rows, board)
    study.commits, study.date, study.commands  # noqa: B018 (a manifest that is none is told here)
    return study


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(manifest, dict):
        raise OutputError(f"{path} holds no manifest")
    return manifest


def _publish(board: Board, target: Path, gallery: Gallery | None) -> None:
    """Write a board, with pictures if the page then stays small enough to be sent to a phone."""
    page, *_ = publish(board, target, formats=("html", "csv", "json"), pictures=gallery)
    if gallery and page.stat().st_size > LARGEST:
        publish(board, target, formats=("html",), pictures=None)
