"""What stands first on the page: the question, the answer in one sentence, and the figures behind it."""

from collections.abc import Mapping, Sequence

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import headline, recovery, server_name
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.leaderboard.standings import judge_model
from fedmjp.benchmarks.leaderboard.verdicts import LEAKING
from fedmjp.benchmarks.report.legend import name_defence
from fedmjp.benchmarks.report.matrix import Matrix, MatrixCell
from fedmjp.benchmarks.report.percent import percent

QUESTION = "How much of a private picture does a server recover from what clients upload?"
NOTHING = "No attack has a result yet."
MOST_KEY_FIGURES = 8  # rows
MANY = 4  # defences from which on the answer counts them, instead of speaking of one


def sentence(board: Board, table: Matrix) -> str:
    """Answer in one sentence: about pictures, or about features and labels where no attack reveals pictures.

    Args:
        board: A board.
        table: Its matrix.
    """
    return answer(table) if table.rows else disclosed_answer(board) or NOTHING


def disclosed_answer(board: Board) -> str:
    """Say what the strongest attack on features or labels reveals where clients do least; nothing without one.

    Args:
        board: A board.
    """
    entries = board.revealing("features", "labels").entries
    attacks = [entry for entry in entries if entry.origin == "reproduced" and entry.role == "attack" and entry.exact]
    if not attacks:
        return ""
    entry = min(attacks, key=lambda attack: (len(attack.defences), *(-value for value in headline(attack))))
    where = f"With {name_defence(entry.defence, entry.mask_ratio)} on {entry.model}, from {server_name(entry.server)}"
    return f"{where}, {entry.attack} tells {recovery(entry)}: {entry.verdict}."


def answer(table: Matrix) -> str:
    """Answer in one sentence how the board's defence does before the servers that see least and most.

    Args:
        table: The matrix of a board. Of many defences it counts those that lose pictures.
    """
    row, defences = table.subject, _by_defence(table)
    if row is None:
        return NOTHING
    if len(defences) >= MANY:
        return _counted(defences)
    first = row.measured[0]
    entry = first.entry
    amounts = f"{_amount(first, ' of pictures')} exactly from {server_name(entry.server)}"
    most, plain = max(row.measured, key=_share), table.undefended(first)
    if _share(most) > _share(first):
        amounts += f", and {_amount(most)} from {server_name(most.entry.server)}"
    elif entry.defences and plain:
        amounts += f"; without a defence, {_amount(plain)}"
    ratio = f" (mask ratio {entry.mask_ratio:g})" if entry.mask_ratio else ""
    name = f"{entry.defence if entry.defences else 'no defence'}{ratio} on {entry.model}"
    naive = f" No attack that knows {entry.defence} was run." if all(cell.blind for cell in row.measured) else ""
    return f"With {name}, a server recovers {amounts}.{naive}"


def _by_defence(table: Matrix) -> dict[str, list[MatrixCell]]:
    """Group the cells that were measured here by defence, whatever the model and the server."""
    defended = [cell for row in table.reproduced for cell in row.measured if cell.entry.defences]
    return grouped(defended, lambda cell: cell.entry.defence)


def _counted(defences: Mapping[str, Sequence[MatrixCell]]) -> str:
    """Count the defences that lose pictures exactly to some server, lose less, or withstood attacks."""
    exact = {name for name, cells in defences.items() if any(map(_share, cells))}
    leaking = {name for name, cells in defences.items() if any(map(_leaks, cells))} - exact
    resisting = {name for name, cells in defences.items() if any(map(_withstood, cells))}
    withstood = resisting - exact - leaking
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
    return any(attack.verdict in LEAKING for attack in cell.attacks)


def _withstood(cell: MatrixCell) -> bool:
    """Tell whether the defence withstood all attacks together: where one gave up, nothing follows."""
    return judge_model(cell.attacks).verdict == "withstood"


def _amount(cell: MatrixCell, of: str = "") -> str:
    return {0.0: "no picture", 1.0: "every picture"}.get(_share(cell), percent(_share(cell)) + of)


def select_key_entries(table: Matrix) -> list[BoardEntry]:
    """Select what decided the cells behind the answer: a row of several, or the first of each row of its model.

    Args:
        table: The matrix of a board. Of many defences, before the server that each loses most to, those that lose
            least are selected.
    """
    row, defences = table.subject, _by_defence(table)
    if row is None:
        return []
    cells = row.measured
    if len(defences) >= MANY:
        most = [max(members, key=_lost) for members in defences.values()]
        cells = sorted(most, key=_lost)
    elif len(cells) == 1:
        firsts = [other_row.measured[0] for other_row in table.reproduced if other_row.measured]
        cells = [cell for cell in firsts if cell.entry.model == cells[0].entry.model]
        cells.sort(key=lambda cell: (bool(cell.entry.defences), cell is not row.measured[0]))
    return [cell.entry for cell in cells[:MOST_KEY_FIGURES]]
