"""The short answer of a board: a line per attack on a defence, and what follows."""

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import exactly, headline
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report.advice import advice
from fedmjp.metrics import EXACT
from fedmjp.texts import printable

TEXTS, NUMBERS = ("model", "defence", "attack"), ("uploads of a picture", "recovered exactly", "median PSNR, dB")


def print_answer(board: Board, console: Console) -> None:
    """Print how many pictures each attack recovers exactly, and the sentences of ``advice``."""
    table = Table(
        *TEXTS, *(Column(name, justify="right") for name in NUMBERS), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for entry in answers(board):
        uploads = str(entry.threat.uploads_per_picture)
        cells = (entry.model, entry.defence, entry.attack, uploads, exactly(entry), f"{headline(entry)[1]:.1f}")
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
    exact = f"Exactly: {EXACT:g} dB or more against the private picture, where everything is in its place."
    for sentence in (exact, *advice(board)):
        console.print(printable(f"{sentence}\n"), markup=False, highlight=False)


def answers(board: Board) -> list[BoardEntry]:
    """Of each model the strongest attack without a defence, from one upload, then every attack on a defence."""
    tried = [entry for entry in board.revealing("pictures").entries if entry.role == "attack" and entry.n]
    undefended = [entry for entry in tried if not entry.defences and entry.threat.uploads_per_picture == 1]
    strongest = [max(group, key=_as_printed) for group in grouped(undefended, lambda entry: entry.model).values()]
    return [*strongest, *(entry for entry in tried if entry.defences)]


def _as_printed(entry: BoardEntry) -> tuple[float, float]:
    """Of attacks that print the same figures the first one stays."""
    share, median = headline(entry)
    return share, round(median, 1)
