"""What third parties claim and nobody computed here, as a table that stands apart from all that was measured."""

import pandas as pd

from fedmjp.benchmarks.leaderboard.claims import figures_text
from fedmjp.benchmarks.leaderboard.entries import Board, Claim
from fedmjp.benchmarks.report.numbers import CellText

CLAIMS = "Claims of third parties, not measured here"
CAVEAT = (
    "These figures are their authors'. This board did not compute them, or only a part of them: they have no verdict "
    "and no rank, and nothing else here follows from them."
)


def claimed_table(board: Board) -> pd.DataFrame:
    """Write the claims beside a board.

    Args:
        board: A board.

    Returns:
        A row per claim, a column per heading; empty where nothing is claimed.
    """
    return pd.DataFrame([_row(claim) for claim in board.claims], dtype=object)


def _row(claim: Claim) -> dict[str, CellText]:
    return {
        "submitted by": CellText(claim.submitter.name),
        "model": CellText(claim.model),
        "defence": CellText(claim.defence),
        "attack": CellText(claim.attack),
        "setting": CellText(str(claim.setting)),
        "server sees": CellText(claim.server),
        "claimed": CellText(figures_text(claim)),
        "n": CellText(str(claim.n), claim.n),
        "status": CellText(claim.check),
        "why": CellText(claim.reason),
    }
