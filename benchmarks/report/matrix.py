"""The matrix of a board: what the strongest attack recovers, by defence and by what the server sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import PLAIN, describe_origin, headline
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.advice import USUAL_RATIO
from fedmjp.benchmarks.report.findings import is_deployed
from fedmjp.benchmarks.report.legend import name_defence
from fedmjp.benchmarks.report.percent import percent
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel

LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75)  # shares above which a cell has the next colour


@dataclass(frozen=True)
class MatrixCell:
    """The attacks on one defended model before one server, the strongest first."""

    attacks: tuple[BoardEntry, ...]

    @property
    def entry(self) -> BoardEntry:
        """Return the strongest attack."""
        return self.attacks[0]

    @property
    def measured(self) -> bool:
        """Tell whether any attack has a score."""
        return self.entry.exact is not None

    @property
    def blind(self) -> bool:
        """Tell whether no measured attack knows the defence, so that its failure says little."""
        return self.measured and bool(self.entry.defences) and not any(e.adapted for e in self.attacks if e.exact)

    @property
    def level(self) -> int:
        """Return the colour, from 0 to 5."""
        return sum(headline(self.entry)[0] > bound for bound in LEVELS)

    @property
    def text(self) -> str:
        """Write the share recovered exactly, or why there is no number."""
        if self.measured:
            return percent(headline(self.entry)[0])
        return "refused" if self.entry.verdict == "refused" else "no result"

    @property
    def decibels(self) -> str:
        """Write the median in dB."""
        return numbers.score(headline(self.entry)[1], LEAKAGE) if self.measured else ""


@dataclass(frozen=True)
class MatrixRow:
    """One defended model, with a cell per column of the matrix; none where nothing was planned."""

    defence: str
    model: str
    cells: tuple[MatrixCell | None, ...]

    @property
    def measured(self) -> list[MatrixCell]:
        """List the cells with a score, in the order of the columns."""
        return [cell for cell in self.cells if cell and cell.measured]


@dataclass(frozen=True)
class Matrix:
    """Rows in the order in which they are shown; ``shared`` names what of the model all rows have in common."""

    columns: tuple[ThreatModel, ...]
    rows: tuple[MatrixRow, ...]
    shared: str

    @property
    def reproduced(self) -> list[MatrixRow]:
        """List the rows that were measured here: no third party's entry decides what the page says."""
        return [row for row in self.rows if any(cell and cell.entry.origin == "reproduced" for cell in row.cells)]

    @property
    def repeats(self) -> bool:
        """Tell whether servers differ in how often they see a picture."""
        return len({server.uploads_per_picture for server in self.columns}) > 1

    def undefended(self, cell: MatrixCell) -> MatrixCell | None:
        """Find the undefended cell of the same model before the same server.

        Args:
            cell: A cell of the matrix.
        """
        system = (cell.entry.model, cell.entry.server)
        plain = (candidate for row in self.reproduced for candidate in row.measured if not candidate.entry.defences)
        return next(
            (candidate for candidate in plain if (candidate.entry.model, candidate.entry.server) == system), None
        )

    @cached_property
    def subject(self) -> MatrixRow | None:
        """Choose the row that the page speaks of first.

        It was measured here; it is attacked by somebody who knows the defence, defended, seen by many servers, at a
        usual mask ratio, and least leaking, in this order.
        """
        rows = [row for row in self.reproduced if row.measured]
        return min(rows, key=_importance, default=None)


def _importance(row: MatrixRow) -> tuple[Any, ...]:
    first = row.measured[0].entry
    adapted = any(cell.entry.defences and not cell.blind for cell in row.measured)
    return (
        not adapted, not first.defences, -len(row.measured), len(first.defences), abs(first.mask_ratio - USUAL_RATIO),
        headline(first),
    )  # fmt: skip


def arrange_matrix(board: Board) -> Matrix:
    """Arrange what somebody might deploy, held against the picture itself.

    Args:
        board: The board.

    Returns:
        All attacks where nothing of that kind is on the board.
    """
    attacks = [entry for entry in board.revealing("pictures").entries if entry.role == "attack"]
    measured = [entry for entry in attacks if entry.origin == "reproduced"] or attacks
    cells = [entry for entry in attacks if _is_shown(entry)] if any(map(_is_shown, measured)) else attacks
    columns = tuple(server for server in sorted({entry.server: None for entry in cells}, key=_seen))
    models = list(dict.fromkeys(entry.model for entry in cells))
    defences = list(dict.fromkeys(entry.defence for entry in cells))

    def place(entry: BoardEntry) -> tuple[Any, ...]:
        kind = (len(entry.defences), defences.index(entry.defence), entry.mask_ratio)
        return models.index(entry.model), *kind, entry.weights

    systems = grouped(sorted(cells, key=place), _system)
    names = [_named(entry) for entry in cells]
    shared = [len(set(texts)) == 1 for texts in zip(*names, strict=True)]
    rows = tuple(_row(entries, columns, shared) for entries in systems.values())
    return Matrix(columns, rows, ", ".join(filter(None, compress(names[0], shared))) if names else "")


def _named(entry: BoardEntry) -> tuple[str, ...]:
    """Name the model, its weights, and how it is scored."""
    scored = "" if entry.protocol == "float" else f"scored as {entry.protocol}"
    return entry.model, numbers.weights(entry.weights), scored


def _row(entries: Sequence[BoardEntry], columns: Sequence[ThreatModel], shared: Sequence[bool]) -> MatrixRow:
    ranked = sorted(entries, key=headline, reverse=True)
    by_server = grouped(ranked, lambda entry: entry.server)
    cells = tuple(MatrixCell(tuple(by_server[server])) if server in by_server else None for server in columns)
    first = entries[0]
    origin = f", {describe_origin(first)}" if first.submitter else ""
    model = ", ".join(text for text, is_shared in zip(_named(first), shared, strict=True) if not is_shared)
    return MatrixRow(name_defence(first.defence, first.mask_ratio) + origin, model, cells)


def _is_shown(entry: BoardEntry) -> bool:
    return is_deployed(entry) if entry.defences else entry.setting.compared_with is Picture.CLEAN


def _system(entry: BoardEntry) -> tuple[Any, ...]:
    source = (entry.origin, entry.submitter and entry.submitter.name)
    defended = (entry.defence, entry.mask_ratio, entry.setting.compared_with)
    return entry.model, entry.weights, entry.protocol, *defended, *source


def _seen(server: ThreatModel) -> tuple[Any, ...]:
    return (
        server.update != PLAIN.update, server.batch_size, server.local_steps, server.local_optimiser,
        server.labels_known, server.label_smoothing, server.mixup, server.crop_scale or 0.0,
        server.uploads_per_picture,
        "" if server.server is None else server.server.text,
    )  # fmt: skip
