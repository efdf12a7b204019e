"""What the standings say about each defended model, in a sentence: what its strongest attack recovers."""

from collections.abc import Sequence
from operator import attrgetter

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry, Standing, Verdict
from fedmjp.benchmarks.leaderboard.headline import headline, recovery
from fedmjp.benchmarks.leaderboard.listing import grouped, listed
from fedmjp.benchmarks.leaderboard.standings import strongest
from fedmjp.benchmarks.report import numbers
from fedmjp.settings import Picture

LINES = 6
# From what a reader has to know first.
SEVERITY: tuple[Verdict, ...] = ("leaks", "reduced", "inconclusive", "incomplete", "withstood", "refused")
NAIVE = "no attack that knows the defence was run"
_SYSTEM = attrgetter("model", "weights", "defence", "mask_ratio", "protocol", "origin")


def list_findings(board: Board, standings: Sequence[Standing]) -> list[str]:
    """Write what the strongest attack recovers, a line per defended model, the worst first.

    Args:
        board: The board.
        standings: Standings before one server.

    Returns:
        At most ``LINES`` lines, and how many more there are.
    """
    judged = [(standing, strongest(board, standing)) for standing in standings if standing.defences]
    systems = grouped(judged, lambda pair: _SYSTEM(pair[0])).values()
    worst_first = sorted(systems, key=lambda pairs: min(map(_badness, pairs)))
    more = len(systems) - LINES
    return [_line(board, pairs) for pairs in worst_first[:LINES]] + ([f"and {more} more below"] if more > 0 else [])


def is_deployed(entry: BoardEntry) -> bool:
    """Tell whether somebody might deploy a cell: it shows the picture itself and shuffles where it is made to.

    Args:
        entry: The entry of the cell.
    """
    pipeline = entry.pipeline
    as_made = pipeline.shuffles or not pipeline.mask_ratio
    return bool(entry.defences) and as_made and entry.setting.compared_with is Picture.CLEAN


def _badness(pair: tuple[Standing, BoardEntry]) -> tuple[int, float, float]:
    standing, entry = pair
    share, median = headline(entry)
    return SEVERITY.index(standing.verdict), -share, -median


def _line(board: Board, pairs: Sequence[tuple[Standing, BoardEntry]]) -> str:
    """Write settings with the same result as one clause, and shared references once."""
    ordered = sorted(pairs, key=_badness)
    references = {_references(board, entry) for _, entry in ordered if entry.exact}
    shared = references.pop() if len(references) == 1 else ""
    clauses = grouped(ordered, lambda pair: _clause(*pair, "" if shared else _references(board, pair[1])))
    settings = [listed(sorted(str(standing.setting) for standing, _ in members)) for members in clauses.values()]
    texts = [opening + names + ending for (opening, ending), names in zip(clauses, settings, strict=True)]
    attacked = [standing for standing, _ in pairs if standing.attacks]
    naive = [NAIVE] if attacked and not any(standing.adapted for standing in attacked) else []
    return f"{_named(pairs[0][0])}{shared}: {'; '.join([*texts, *naive])}"


def _named(standing: Standing) -> str:
    weights = "" if standing.weights == "untrained" else f" ({numbers.weights(standing.weights)})"
    origin = "" if standing.origin == "reproduced" else f", {standing.origin}"
    ratio = f" at mask ratio {standing.mask_ratio:g}" if standing.mask_ratio else ""
    return f"{standing.defence}{ratio} on {standing.model}{weights}{origin}"


def _clause(standing: Standing, entry: BoardEntry, references: str) -> tuple[str, str]:
    """Write the texts before and behind the settings."""
    if standing.verdict == "refused":
        return "no attack applies in ", ""
    if not entry.exact:
        return "nothing is measured in ", f": {standing.verdict}"
    opening = f"strongest attack {standing.strongest} recovers {recovery(entry)}, in "
    return opening, f"{references}: {standing.verdict}"


def _references(board: Board, entry: BoardEntry) -> str:
    """Write the references of a leakage in brackets: the guess, and the same attack without the defence."""
    guess, twin = board.by_id.get(entry.floor), board.by_id.get(entry.twin)
    references = [f"grey guess {headline(guess)[1]:.1f} dB"] if guess and guess.exact else []
    references += [f"without defence {recovery(twin)}"] if twin and twin.exact else []
    return f" ({', '.join(references)})" if references else ""
