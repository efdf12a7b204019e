"""What entries of a board come to in a line: the strongest of several, its conditions, and how much it recovers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import headline, server_name
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.advice import USUAL_RATIO
from fedmjp.benchmarks.report.findings import deployed
from fedmjp.benchmarks.report.matrix import MatrixCell, matrix
from fedmjp.settings import Picture


@dataclass(frozen=True)
class Answer:
    """The strongest attack on what somebody might deploy, and the strongest without any defence."""

    defended: BoardEntry | None
    undefended: BoardEntry | None

    @classmethod
    def of(cls, entries: Iterable[BoardEntry]) -> Self:
        """Of these entries, at the usual mask ratio or the nearest to it."""
        tried = [entry for entry in entries if entry.exact and entry.reveals == "pictures"]
        defended = [entry for entry in tried if deployed(entry)]
        ratios = {entry.mask_ratio for entry in defended} - {0.0}
        usual = min(ratios, key=lambda ratio: abs(ratio - USUAL_RATIO), default=0.0)
        return cls(
            strongest(entry for entry in defended if entry.mask_ratio in (0.0, usual)),
            strongest(entry for entry in tried if not entry.defences and entry.setting.compared_with is Picture.CLEAN),
        )

    @classmethod
    def of_board(cls, board: Board) -> Self:
        """Of the defence that the board's page speaks of first, and of the same model without it."""
        row = matrix(board).subject
        subject = [cell.entry for cell in row.measured if cell.entry.exact] if row else []
        models = {entry.model for entry in subject}
        attacks = (entry for entry in board.entries if entry.role == "attack")
        return cls(
            strongest(entry for entry in subject if entry.defences),
            cls.of(entry for entry in attacks if entry.model in models).undefended,
        )


def strongest(entries: Iterable[BoardEntry]) -> BoardEntry | None:
    """The one that recovers the largest share exactly, the surest of these, from the fewest uploads that do."""
    return max(entries, key=_strength, default=None)


def _strength(entry: BoardEntry) -> tuple[float, ...]:
    exact, median = headline(entry)
    surest = entry.exact.low if entry.exact else 0.0
    uploads = entry.threat.uploads_per_picture if exact else 0  # where none is exact, the median decides
    return exact, surest, -uploads, round(median, 1)


def by_defence(entries: Iterable[BoardEntry]) -> list[BoardEntry]:
    """The strongest attack on each model without a defence, and on each defence as somebody might deploy it."""
    attacks = [entry for entry in entries if (entry.role, entry.reveals) == ("attack", "pictures") and entry.exact]
    shown = [entry for entry in attacks if deployed(entry) or (not entry.defences and entry.setting == "a")]
    groups = grouped(shown, lambda entry: (entry.model, entry.weights, entry.defence, entry.mask_ratio)).values()
    return [leading for group in groups if (leading := strongest(group))]


def model(entry: BoardEntry) -> str:
    """The network, and on what weights it was attacked."""
    return f"{entry.model}, {numbers.weights(entry.weights)}"


def conditions(entry: BoardEntry) -> str:
    """What the server sees, and what is held against what: ``12 uploads, compared with the shuffled picture``."""
    parts = {
        server_name(entry.server): True,
        "compared with the shuffled picture": entry.setting.compared_with is Picture.SHUFFLED,
        "masked, not shuffled": bool(entry.mask_ratio) and not entry.pipeline.shuffles,
        "submitted": entry.origin == "submitted",
    }
    return ", ".join(part for part, holds in parts.items() if holds)


def decibels(entry: BoardEntry) -> str:
    """The median over pictures."""
    return numbers.with_minus(f"{numbers.score(headline(entry)[1], 'psnr')} dB")


def level(entry: BoardEntry) -> int:
    """The colour of its share, as in the matrix of a leaderboard."""
    return MatrixCell((entry,)).level
