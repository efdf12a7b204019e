"""What stands first on the page: the question, the answer in one sentence, and the figures behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import headline
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.leaderboard.standings import together
from fedmjp.benchmarks.leaderboard.verdicts import LEAKING
from fedmjp.benchmarks.report import disclosed, numbers
from fedmjp.benchmarks.report.legend import MEDIAN_HEADING
from fedmjp.benchmarks.report.matrix import Matrix, MatrixCell, server_name
from fedmjp.benchmarks.report.numbers import Value
from fedmjp.benchmarks.report.percent import percent

QUESTION = "How much of a private picture does a server recover from what clients upload?"
NOTHING = "No attack has a result yet."
KEY_FIGURES = 8  # rows
MANY = 4  # defences from which on the answer counts them, instead of speaking of one


@dataclass(frozen=True)
class KeyFigure:
    """One line behind the answer: the strongest attack of a cell, and what it is held against."""

    entry: BoardEntry
    values: dict[str, Value]


def question(board: Board) -> str:
    """What the board asks."""
    return board.question or QUESTION


def sentence(board: Board, shown: Matrix) -> str:
    """The board in one sentence: about pictures, or about features and labels where no attack reveals pictures."""
    return answer(shown) if shown.rows else disclosed.answer(board) or NOTHING


def answer(shown: Matrix) -> str:
    """The board in one sentence: how the defence that it is about does, before the servers that see least and most.

    A board of many defences is about none of them: it counts those that lose pictures.
    """
    row, defences = shown.subject, _by_defence(shown)
    if row is None:
        return NOTHING
    if len(defences) >= MANY:
        return _counted(defences)
    first = row.measured[0]
    entry = first.entry
    said = f"{_amount(first, ' of pictures')} exactly from {server_name(entry.server)}"
    most, plain = max(row.measured, key=_share), shown.undefended(first)
    if _share(most) > _share(first):
        said += f", and {_amount(most)} from {server_name(most.entry.server)}"
    elif entry.defences and plain:
        said += f"; without a defence, {_amount(plain)}"
    ratio = f" (mask ratio {entry.mask_ratio:g})" if entry.mask_ratio else ""
    name = f"{entry.defence if entry.defences else 'no defence'}{ratio} on {entry.model}"
    naive = f" No attack that knows {entry.defence} was run." if all(cell.blind for cell in row.measured) else ""
    return f"With {name}, a server recovers {said}.{naive}"


def _by_defence(shown: Matrix) -> dict[str, list[MatrixCell]]:
    """What was measured of each defence, whatever the model and the server."""
    defended = [cell for row in shown.rows for cell in row.measured if cell.entry.defences]
    return grouped(defended, lambda cell: cell.entry.defence)


def _counted(defences: Mapping[str, Sequence[MatrixCell]]) -> str:
    """How many defences lose pictures exactly to some server, how many lose less, and how many withstood attacks."""
    exact = {name for name, cells in defences.items() if any(map(_share, cells))}
    leaking = {name for name, cells in defences.items() if any(map(_leaks, cells))} - exact
    held = {name for name, cells in defences.items() if any(map(_withstood, cells))}
    withstood = held - exact - leaking
    silent = len(defences) - len(exact) - len(leaking) - len(withstood)
    return (
        f"Of {len(defences)} defences, {len(exact)} let some server recover a picture exactly and {len(leaking)} less "
        f"than that; {len(withstood)} withstood attacks that know them, and of {silent} nothing follows."
    )


def _lost(cell: MatrixCell) -> tuple[float, float]:
    return headline(cell.entry)


def _share(cell: MatrixCell) -> float:
    return _lost(cell)[0]


def _leaks(cell: MatrixCell) -> bool:
    return any(tried.verdict in LEAKING for tried in cell.attacks)


def _withstood(cell: MatrixCell) -> bool:
    """All attacks together: where one gave up, nothing follows of those that failed."""
    return together(cell.attacks).verdict == "withstood"


def _amount(cell: MatrixCell, of: str = "") -> str:
    return {0.0: "no picture", 1.0: "every picture"}.get(_share(cell), percent(_share(cell)) + of)


def key_figures(board: Board, shown: Matrix) -> list[KeyFigure]:
    """What decided the cells behind the answer: a row of several, or else the first of each row of its model.

    Of many defences, before the server that each loses most to, those that lose least.
    """
    row, defences = shown.subject, _by_defence(shown)
    if row is None:
        return []
    cells = row.measured
    if len(defences) >= MANY:
        most = [max(alike, key=_lost) for alike in defences.values()]
        cells = sorted(most, key=_lost)
    elif len(cells) == 1:
        firsts = [shown_row.measured[0] for shown_row in shown.rows if shown_row.measured]
        cells = [cell for cell in firsts if cell.entry.model == cells[0].entry.model]
        cells.sort(key=lambda cell: (bool(cell.entry.defences), cell is not row.measured[0]))
    return [KeyFigure(cell.entry, _values(board, cell.entry)) for cell in cells[:KEY_FIGURES]]


def _values(board: Board, entry: BoardEntry) -> dict[str, Value]:
    return {
        "server sees": Value(server_name(entry.server)),
        "model": Value(entry.model),
        "defence": Value(numbers.defence_name(entry)),
        "strongest attack": Value(entry.attack),
        "recovered exactly, % (95 % interval)": numbers.share(entry.exact) if entry.exact else Value(""),
        MEDIAN_HEADING: _median(entry),
        "grey guess, dB": _median(board.by_id.get(entry.floor)),
        "without defence, dB": _median(board.by_id.get(entry.twin)),
        "attack, s per picture": Value(numbers.seconds(entry.cost)),
        "pictures": numbers.counted(entry),
    }


def _median(entry: BoardEntry | None) -> Value:
    return Value(numbers.score(headline(entry)[1], LEAKAGE)) if entry and entry.exact else Value("")


def key_columns(rows: Sequence[KeyFigure]) -> list[str]:
    """Columns in which rows differ, and those of numbers that are not empty; what is shared stands in the heading."""
    return [
        name
        for name in (rows[0].values if rows else ())
        if any(row.values[name].text for row in rows)
        and (name not in ("server sees", "model", "defence") or len({row.values[name].text for row in rows}) > 1)
    ]
