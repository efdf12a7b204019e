"""Entries of a board in a line: the strongest of several, its conditions, and how much it recovers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import describe_origin, headline, server_name
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.advice import USUAL_RATIO
from fedmjp.benchmarks.report.findings import is_deployed
from fedmjp.benchmarks.report.matrix import MatrixCell, arrange_matrix
from fedmjp.settings import Picture


@dataclass(frozen=True)
class StrongestAttacks:
    """The strongest attack on what somebody might deploy, and the strongest without any defence."""

    defended: BoardEntry | None
    undefended: BoardEntry | None

    @classmethod
    def select(cls, entries: Iterable[BoardEntry]) -> Self:
        """Select among entries that were measured here, defended ones at the usual mask ratio or the nearest to it.

        Args:
            entries: Cells of a board.
        """
        pictured = [entry for entry in entries if entry.exact and entry.reveals == "pictures"]
        measured = [entry for entry in pictured if entry.origin == "reproduced"]
        defended = [entry for entry in measured if is_deployed(entry)]
        ratios = {entry.mask_ratio for entry in defended} - {0.0}
        usual = min(ratios, key=lambda ratio: abs(ratio - USUAL_RATIO), default=0.0)
        return cls(
            find_strongest(entry for entry in defended if entry.mask_ratio in (0.0, usual)),
            find_strongest(
                entry for entry in measured if not entry.defences and entry.setting.compared_with is Picture.CLEAN
            ),
        )

    @classmethod
    def select_for_board(cls, board: Board) -> Self:
        """Select for the defence that the board's page names first, and for the same model without it.

        Args:
            board: The leaderboard of a study.
        """
        row = arrange_matrix(board).subject
        subject = [cell.entry for cell in row.measured if cell.entry.exact] if row else []
        models = {entry.model for entry in subject}
        attacks = (entry for entry in board.reproduced.entries if entry.role == "attack")
        return cls(
            find_strongest(entry for entry in subject if entry.defences),
            cls.select(entry for entry in attacks if entry.model in models).undefended,
        )


def find_strongest(entries: Iterable[BoardEntry]) -> BoardEntry | None:
    """Find the entry with the largest exactly recovered share.

    Args:
        entries: Cells to compare. Ties go to the higher lower bound of the interval, then to fewer uploads.

    Returns:
        The entry; None if there are none.
    """
    return max(entries, key=_rank_strength, default=None)


def _rank_strength(entry: BoardEntry) -> tuple[float, ...]:
    exact, median = headline(entry)
    surest = entry.exact.low if entry.exact else 0.0
    uploads = entry.threat.uploads_per_picture if exact else 0  # where none is exact, the median decides
    return exact, surest, -uploads, round(median, 1)


def find_strongest_by_defence(entries: Iterable[BoardEntry]) -> list[BoardEntry]:
    """Find the strongest attack on each undefended model, and on each defence in a deployable setting.

    Args:
        entries: Cells of a board.
    """
    attacks = [entry for entry in entries if (entry.role, entry.reveals) == ("attack", "pictures") and entry.exact]
    eligible = [entry for entry in attacks if is_deployed(entry) or (not entry.defences and entry.setting == "a")]
    groups = grouped(eligible, _attacked).values()
    return [leading for group in groups if (leading := find_strongest(group))]


def _attacked(entry: BoardEntry) -> tuple[str, str, str, float, str]:
    """Return the model, its weights and defence, and who provided the entry."""
    return entry.model, entry.weights, entry.defence, entry.mask_ratio, describe_origin(entry)


def describe_model(entry: BoardEntry) -> str:
    """Name the model of an entry and its weights.

    Args:
        entry: A measured cell.
    """
    return f"{entry.model}, {numbers.weights(entry.weights)}"


def describe_conditions(entry: BoardEntry) -> str:
    """Describe what the server sees and the reference: ``12 uploads, compared with the shuffled picture``.

    Args:
        entry: A measured cell.
    """
    parts = {
        server_name(entry.server): True,
        "compared with the shuffled picture": entry.setting.compared_with is Picture.SHUFFLED,
        "masked, not shuffled": bool(entry.mask_ratio) and not entry.pipeline.shuffles,
        describe_origin(entry): entry.origin == "submitted",
    }
    return ", ".join(part for part, holds in parts.items() if holds)


def format_decibels(entry: BoardEntry) -> str:
    """Format the median PSNR over the pictures of an entry, in dB.

    Args:
        entry: A measured cell.
    """
    return numbers.with_minus(f"{numbers.score(headline(entry)[1], 'psnr')} dB")


def compute_level(entry: BoardEntry) -> int:
    """Compute the colour level of an entry's exact share, as in the matrix of a leaderboard.

    Args:
        entry: A measured cell.
    """
    return MatrixCell((entry,)).level
