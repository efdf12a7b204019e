"""What else leaks: the table of attacks that reveal features and labels instead of pictures, and its words."""

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry, Standing
from fedmjp.benchmarks.leaderboard.headline import headline, recovery
from fedmjp.benchmarks.leaderboard.measures import EXACT_FEATURE, MEASURES
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.findings import strongest
from fedmjp.benchmarks.report.matrix import server_name
from fedmjp.benchmarks.report.numbers import Value
from fedmjp.benchmarks.report.percent import percent
from fedmjp.benchmarks.report.rows import Row, servers

TITLE = "What else leaks: features and labels"
EXACTLY, LABELS, ERROR = "features exact", "labels right", "feature error, median"
FOUND = {  # shares by heading
    LABELS: "label_accuracy",
    "rank 1": "rank1",
    "rank 5": "rank5",
    "rank 1, other crop": "rank1_crop",
    "rank 5, other crop": "rank5_crop",
    "members known": "membership",
}
OVER, AGAINST = "over chance, points", "against no defence, points"
TEXTS = ("server sees", "verdict", "reason")
DISPENSABLE = (
    "rank 5, other crop", "rank 5", "rank 1, other crop", AGAINST, "members known", "server sees", "setting", OVER,
    ERROR,
)  # fmt: skip
NO_SCORE = "not computed"


def rows(board: Board) -> list[Row]:
    """One per cell, in the order of the entries; rank and verdict of the whole where it decides a standing."""
    board, decided = _part(board), standings(board)
    return [_row(entry, decided.get(entry.id)) for entry in board.entries]


def standings(board: Board) -> dict[str, Standing]:
    """By id of the entry that decides it."""
    board = _part(board)
    return {strongest(board, standing).id: standing for standing in board.standings}


def answer(board: Board) -> str:
    """What the strongest attack tells where clients do least, in a sentence; empty where nothing was measured here."""
    ours = [entry for entry in _part(board).entries if entry.origin == "reproduced"]
    tried = [entry for entry in ours if entry.role == "attack" and entry.exact]
    entry = min(tried, key=lambda one: (len(one.defences), *(-value for value in headline(one))), default=None)
    if entry is None:
        return ""
    where = f"With {numbers.defence_name(entry)} on {entry.model}, from {server_name(entry.server)}"
    return f"{where}, {entry.attack} tells {recovery(entry)}: {entry.verdict}."


def sentences(board: Board) -> list[str]:
    """What each server sees that is in no section of pictures."""
    part, known = _part(board), set(servers(board.revealing("pictures")))
    return [
        server.sentence(entry.pipeline for entry in part.entries if entry.server == server)
        for server in servers(part)
        if server not in known
    ]


def meanings(board: Board) -> dict[str, str]:
    """What the columns hold; nothing where there are no such rows."""
    if not _part(board).entries:
        return {}
    return {
        EXACTLY: f"features with an error of {EXACT_FEATURE:g} or less; 95 % interval of their share (Wilson's "
        "for as many trials as uploads). A feature is what the last layer reads of a picture. Rows are ordered by it, "
        "then by rank 1, or labels right",
        LABELS: "share of pictures whose label is told, each label told counting once",
        ERROR: "distance from the feature of what went into the network, over that from the mean of the batch; the "
        "mean itself scores 1",
        "rank 1, rank 5": "share of pictures that are found by their feature among the 1 or 5 nearest of all pictures "
        "that were attacked; in setting b, of the shuffled ones",
        "other crop": "the same where only another crop of each picture is at hand",
        "members known": "share of pictures that are told from those outside of the upload, of which 0.001 at most are "
        "taken for members; with fewer than 1,000 of these, none",
        OVER: "labels right, or rank 1, minus that of a guess without the upload, in percentage points: mean, "
        "interval, p of Wilcoxon's test, with a value per upload",
    }


def _part(board: Board) -> Board:
    return board.revealing("features", "labels")


def _row(entry: BoardEntry, standing: Standing | None) -> Row:
    measure, error = MEASURES[entry.reveals], entry.metrics.get("feature_error")
    rank = standing.rank if standing else None
    differences = [
        numbers.difference(over, measure.scale) if over else Value("", why="nothing to compare with")
        for over in (entry.over_floor, entry.over_twin)
    ]
    verdict = (standing or entry).verdict
    values = {
        "rank": Value("" if rank is None else str(rank), rank),
        "model": Value(entry.model),
        "origin": Value("" if entry.origin == "reproduced" else entry.origin),
        "attack": Value(entry.attack if entry.role == "attack" else f"{entry.attack} ({entry.role})"),
        "defence": Value(numbers.defence_name(entry)),
        "server sees": Value(server_name(entry.server)),
        "setting": Value(str(entry.setting)),
        "verdict": Value(verdict),
        EXACTLY: numbers.exact(entry) if error else Value("", why=NO_SCORE),
        **{heading: _share(entry, name) for heading, name in FOUND.items()},
        ERROR: Value(numbers.score(error.median, "feature_error"), error.median) if error else Value("", why=NO_SCORE),
        **dict(zip((OVER, AGAINST), differences, strict=True)),
        "n": numbers.counted(entry),
        "failed": Value(str(entry.failures), entry.failures),
        "attack s": Value(numbers.seconds(entry.cost), entry.cost.attack_seconds),
        "weights": Value(numbers.weights(entry.weights)),
        "reason": Value((standing or entry).reason),
    }
    return Row(values, entry, verdict, dim=entry.role != "attack")


def _share(entry: BoardEntry, name: str) -> Value:
    share = entry.metrics.get(name)
    return Value(percent(share.mean), share.mean) if share else Value("", why=NO_SCORE)
