"""A board's report: its frame, and the tables and sentences that every format shows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, Standing, Verdict
from fedmjp.benchmarks.leaderboard.frame import board_frame
from fedmjp.benchmarks.leaderboard.listing import grouped, listed
from fedmjp.benchmarks.leaderboard.standings import strongest
from fedmjp.benchmarks.report.columns import CELLS, DISCLOSED, RANKED, write
from fedmjp.benchmarks.report.findings import list_findings
from fedmjp.benchmarks.report.legend import COMPARED, threat_title
from fedmjp.benchmarks.report.matrix import Matrix, arrange_matrix
from fedmjp.threat import ThreatModel

CHANGED = "What it sees is said of clients that leave their updates as they are; defences change it."

_COUNTED: dict[Verdict, tuple[str, str]] = {
    "leaks": ("leaks", "leak"),
    "reduced": ("leaks less than without the defence", "leak less than without the defence"),
    "withstood": ("withstood these attacks", "withstood these attacks"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    "no leak seen": ("is undefended and showed no leak", "are undefended and showed no leak"),
    "incomplete": ("is incomplete", "are incomplete"),
    "refused": ("had no attack that applies", "had no attack that applies"),
}


@dataclass(frozen=True)
class Section:
    """One server's part of a board, whatever clients do to defend themselves.

    Attributes:
        server: Its view of clients without defences.
        title: A heading.
        sentence: The threat model in words, with what the server is told of the defences here.
        findings: Sentences about each defended model that was measured here.
        summary: The number of standings of these by verdict, in a sentence.
        rankings: Tables of standings that are ranked together, by what they are compared with.
        cells: The table of all its cells.
    """

    server: ThreatModel
    title: str
    sentence: str
    findings: tuple[str, ...]
    summary: str
    rankings: dict[str, pd.DataFrame]
    cells: pd.DataFrame


@dataclass(frozen=True)
class Report:
    """A board, and what is made of it once for all formats."""

    board: Board

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Build the board's frame, as ``board_frame`` does."""
        return board_frame(self.board)

    @cached_property
    def pictures(self) -> Board:
        """Return the part of the board about attacks that reveal pictures."""
        return self.board.revealing("pictures")

    @cached_property
    def matrix(self) -> Matrix:
        """Arrange what the strongest attacks recover, by defence and by what the server sees."""
        return arrange_matrix(self.board)

    @cached_property
    def disclosed(self) -> pd.DataFrame:
        """Write the table of attacks that reveal features and labels; empty where there are none."""
        if self.frame.empty:
            return self.frame
        return write(self.frame[self.frame["reveals"] != "pictures"], DISCLOSED)

    @cached_property
    def disclosed_sentences(self) -> list[str]:
        """Describe what each server sees that is in no section of pictures."""
        part, described = self.board.revealing("features", "labels"), set(list_servers(self.pictures))
        return [
            server.sentence(entry.pipeline for entry in part.entries if entry.server == server)
            for server in list_servers(part)
            if server not in described
        ]

    @cached_property
    def sections(self) -> list[Section]:
        """Make a section for each server that pictures leak to, in the order of the entries."""
        return [self._section(server, place) for place, server in enumerate(list_servers(self.pictures), start=1)]

    def _section(self, server: ThreatModel, place: int) -> Section:
        board, frame = self.pictures, self.frame
        standings = [standing for standing in board.standings if standing.server == server]
        entries = [entry for entry in board.entries if entry.server == server]
        changed = CHANGED if any(entry.threat.defences for entry in entries) else ""
        sentences = [server.sentence(entry.pipeline for entry in entries), changed]
        several = len({standing.protocol for standing in standings}) > 1
        rankings = grouped(standings, lambda standing: _compared(standing, with_protocol=several))
        measured = [standing for standing in standings if standing.origin == "reproduced"]
        return Section(
            server,
            f"Threat model {place}: {threat_title(server)}",
            " ".join(filter(None, sentences)),
            tuple(list_findings(board, measured)),
            _summary(measured),
            {title: self._ranking(group) for title, group in rankings.items()},
            write(
                frame.loc[[entry.id for entry in entries]],
                CELLS,
                [name for name in board.metrics if name != LEAKAGE],
            ),
        )

    def _ranking(self, standings: Sequence[Standing]) -> pd.DataFrame:
        """Write the table of standings, each with the figures of its strongest attack."""
        rows = self.frame.loc[[strongest(self.pictures, standing).id for standing in standings]]
        judged = {
            "rank": [standing.rank for standing in standings],
            "judged": [standing.verdict for standing in standings],
            "judged_reason": [standing.reason for standing in standings],
        }
        return write(
            rows.assign(**{name: pd.Series(values, rows.index, object) for name, values in judged.items()}), RANKED
        )


def list_servers(board: Board) -> list[ThreatModel]:
    """List the threat models without defences, in the order of the entries.

    Args:
        board: A board.
    """
    return list(dict.fromkeys(entry.server for entry in board.entries))


def _compared(standing: Standing, *, with_protocol: bool) -> str:
    protocol = f", scored as {standing.protocol}" if with_protocol else ""
    return COMPARED[standing.setting.compared_with] + protocol


def _summary(standings: Sequence[Standing]) -> str:
    """Count the verdicts before one server in one sentence."""
    counts = Counter(standing.verdict for standing in standings)
    if not counts:
        return "No model of this board was judged under this threat model."
    parts = [
        f"{counts[verdict]} {singular if counts[verdict] == 1 else plural}"
        for verdict, (singular, plural) in _COUNTED.items()
        if counts[verdict]
    ]
    judged = "combination" if len(standings) == 1 else "combinations"
    return f"Of {len(standings)} {judged} of model, defence and setting, {listed(parts)}."
