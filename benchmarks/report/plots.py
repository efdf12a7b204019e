"""All plots of a leaderboard: leakage per picture, against utility, against mask ratio."""

import matplotlib as mpl

from benchmarks.leaderboard.entries import Board
from benchmarks.report.distributions import distributions
from benchmarks.report.drawing import STYLE, Plot
from benchmarks.report.mask_ratios import mask_ratios
from benchmarks.report.rows import servers
from benchmarks.report.trade_off import trade_off
from benchmarks.report.upload_counts import upload_counts


def plots(board: Board) -> list[Plot]:
    """All plots that the board has the numbers for: across servers, then one server after the other."""
    with mpl.rc_context(STYLE):
        within = [
            plot
            for index, server in enumerate(servers(board), start=1)
            for draw in (distributions, trade_off, mask_ratios)
            for plot in draw(board, server, f"threat-{index}")
        ]
        return [*upload_counts(board), *within]
