"""A board as one pandas frame, a row per cell and a column per figure: every table of a report is a selection of it."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry, Difference, Share, Statistics, Utility
from fedmjp.benchmarks.leaderboard.headline import describe_origin, server_name
from fedmjp.benchmarks.leaderboard.standings import strongest
from fedmjp.config import Config
from fedmjp.defences.pipeline import NONE
from fedmjp.threat import HONEST

NESTED = {
    "defences", "marginal", "threat", "metrics", "scores", "submitter", "utility", "cost", "provenance", "errors",
    "over_floor", "over_twin", "exact", "flat", "recognisable", "together",
}  # fmt: skip
DERIVED = ["provided", "view", "rank", "judged", "judged_reason", "floor_median", "twin_median", "decides", "stages"]


def board_frame(board: Board) -> pd.DataFrame:
    """Lay a board out as a frame, whose rows are in the order of its entries and indexed by their ids.

    Args:
        board: The board; attacks of all kinds are in one frame, told apart by ``reveals``.

    Returns:
        The columns of ``leaderboard.csv`` (``psnr_mean``, ``over_twin_p_value``, ``threat_batch_size``), numbers as
        numbers, None where there is no value; then ``DERIVED``: who submitted it, what the server sees in a few words,
        rank, verdict and reason of the standing that a cell decides (or verdict and reason of its own), and medians of
        its references, whether it decides one, and the number of its defences.
    """
    ids = [entry.id for entry in board.entries]
    frame = pd.DataFrame([_figures(entry, board.metrics) for entry in board.entries], index=ids, dtype=object)
    standings = {strongest(board, standing).id: standing for standing in board.standings}
    judged = [standings.get(entry.id) or entry for entry in board.entries]
    derived = {
        "provided": [describe_origin(entry) for entry in board.entries],
        "view": [server_name(entry.server) for entry in board.entries],
        "rank": [getattr(record, "rank", None) for record in judged],
        "judged": [record.verdict for record in judged],
        "judged_reason": [record.reason for record in judged],
        "floor_median": [_reference_median(board, entry.floor) for entry in board.entries],
        "twin_median": [_reference_median(board, entry.twin) for entry in board.entries],
        "decides": [name in standings for name in ids],
        "stages": [len(entry.defences) for entry in board.entries],
    }
    return pd.concat([frame, pd.DataFrame(derived, index=ids, dtype=object)], axis=1)


def _figures(entry: BoardEntry, metrics: tuple[str, ...]) -> dict[str, Any]:
    provenance = entry.provenance.model_dump(mode="json", exclude={"environments"})
    exact = entry.exact
    return {
        **entry.model_dump(mode="json", exclude=NESTED),
        "errors": "; ".join(entry.errors),
        "defences": " + ".join(config.text for config in entry.defences) or NONE,  # as the command line takes them
        "marginal": entry.marginal,
        "exact": exact and exact.share,
        "exact_low": exact and exact.low,
        "exact_high": exact and exact.high,
        "median": _median(entry),
        "flat": None if entry.flat is None else len(entry.flat),
        "uploads": entry.uploads,
        **_prefixed("threat", entry.server.model_dump(mode="json", exclude={"defences", "server"})),
        "threat_server": HONEST if entry.threat.server is None else entry.threat.server.text,
        **{key: value for name in metrics for key, value in _fields(name, Statistics, entry.metrics.get(name)).items()},
        **_fields("over_floor", Difference, entry.over_floor),
        **_fields("over_twin", Difference, entry.over_twin),
        **_fields("recognisable", Share, entry.recognisable),
        **_fields("utility", Utility, entry.utility),
        **entry.cost.model_dump(),
        **_prefixed("provenance", provenance),
        **{f"provenance_{name}": " ".join(map(str, provenance[name])) for name in ("weights_sha256", "seeds")},
    }


def _median(entry: BoardEntry | None) -> float | None:
    """Return the median PSNR of a cell that reveals pictures and has a score."""
    return entry.metrics[LEAKAGE].median if entry and entry.exact and entry.reveals == "pictures" else None


def _reference_median(board: Board, name: str | None) -> float | None:
    return _median(board.by_id.get(name))


def _fields(name: str, kind: type[Config], record: Config | None) -> dict[str, Any]:
    return _prefixed(name, record.model_dump() if record else dict.fromkeys(kind.model_fields))


def _prefixed(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}_{key}": value for key, value in values.items()}
