"""The table of all results on the page: a row per attack that was planned, those that decide a verdict marked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry, Standing
from fedmjp.benchmarks.leaderboard.headline import headline
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.findings import strongest
from fedmjp.benchmarks.report.legend import AGAINST_HEADING, MEDIAN_HEADING
from fedmjp.benchmarks.report.matrix import server_name
from fedmjp.benchmarks.report.numbers import Value

FILTERS = {
    "server sees": "Threat",
    "model": "Model",
    "defence": "Defence",
    "setting": "Setting",
    "attack": "Attack",
    "verdict": "Verdict",
}  # columns that a reader chooses values of, and what the choice is called
EXACTLY = "recovered exactly, % (95 % interval)"
TEXTS = (*FILTERS, "strongest attack")
OPTIONAL = ("model", "setting", "server sees")  # where all rows say the same, a line above the table says it


@dataclass(frozen=True)
class Result:
    """One row: values by heading, the entry, and the standing that it decides."""

    entry: BoardEntry
    values: dict[str, Value]
    standing: Standing | None

    @property
    def refusal(self) -> str:
        """Why there are no numbers, where there are none."""
        return "" if self.entry.exact else self.entry.reason


def results(board: Board) -> list[Result]:
    """Of pictures, in the order of the entries."""
    board = board.revealing("pictures")
    decided = {strongest(board, standing).id: standing for standing in board.standings}
    return [_result(entry, decided.get(entry.id)) for entry in board.entries]


def _result(entry: BoardEntry, standing: Standing | None) -> Result:
    return Result(entry, _values(entry, standing), standing)


def _values(entry: BoardEntry, standing: Standing | None) -> dict[str, Value]:
    leakage, median = entry.metrics.get(LEAKAGE), headline(entry)[1]
    over = entry.over_twin
    rank = standing.rank if standing else None
    return {
        "rank": Value("" if rank is None else str(rank), rank),
        "server sees": Value(server_name(entry.server)),
        "model": Value(entry.model),
        "defence": Value(numbers.defence_name(entry)),
        "setting": Value(str(entry.setting)),
        "attack": Value(entry.attack if entry.role == "attack" else f"{entry.attack} ({entry.role})"),
        "verdict": Value((standing or entry).verdict),
        EXACTLY: numbers.share(entry.exact) if entry.exact else Value(""),
        MEDIAN_HEADING: Value(numbers.score(median, LEAKAGE), median) if entry.exact else Value(""),
        "mean, dB (95 % interval)": numbers.mean(leakage, LEAKAGE) if leakage else Value(""),
        AGAINST_HEADING: Value(f"{over.mean:+.1f}", over.mean) if over else Value(""),
        "pictures": numbers.counted(entry),
    }


def result_columns(rows: Sequence[Result]) -> list[str]:
    """Headings of the columns that are not empty throughout, without names that all rows share."""
    texts = {name: {row.values[name].text for row in rows} for name in (rows[0].values if rows else ())}
    return [
        name for name, distinct in texts.items() if distinct != {""} and (name not in OPTIONAL or len(distinct) > 1)
    ]


def choices(rows: Iterable[Result], columns: Sequence[str]) -> dict[str, list[str]]:
    """By heading, what a column can be filtered by; none where there is nothing to choose."""
    offered = {name: list(dict.fromkeys(row.values[name].text for row in rows)) for name in FILTERS if name in columns}
    return {name: texts for name, texts in offered.items() if len(texts) > 1}
