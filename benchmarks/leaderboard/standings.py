"""Who leaks how much: each model with its defences judged by the strongest attack on it."""

from collections.abc import Iterable, Sequence
from typing import Any

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry, Standing
from fedmjp.benchmarks.leaderboard.headline import headline
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.leaderboard.verdicts import LEAKING, Judgement, gave_up

RANKED = (*LEAKING, "withstood")
_SHARED = (
    "origin",
    "threat",
    "setting",
    "protocol",
    "reveals",
    "model",
    "weights",
    "defences",
    "defence",
    "mask_ratio",
)


def rank_models(entries: Iterable[BoardEntry]) -> list[Standing]:
    """Rank defended models by the strongest attack on each.

    Args:
        entries: Judged cells.

    Returns:
        Standings by server, version of the picture compared with, and protocol: the ranked ones first, the least
        leaking at the top.
    """
    groups = grouped((entry for entry in entries if entry.role == "attack"), _judged_together)
    tables = grouped(groups.values(), lambda group: _ranked_together(group[0]))
    return [standing for table in sorted(tables) for standing in _ranked(tables[table])]


def strongest(board: Board, standing: Standing) -> BoardEntry:
    """Return the entry that a standing is judged by.

    Args:
        board: The board of the standing.
        standing: The standing.
    """
    return board.by_id[standing.entry]


def _judged_together(entry: BoardEntry) -> tuple[Any, ...]:
    """Return the key that the attacks on one defended model, by one source, share."""
    source = (entry.origin, entry.submitter and entry.submitter.name, entry.provenance.campaign)
    return (*_ranked_together(entry), entry.setting, entry.model, entry.weights, entry.defences, *source)


def _ranked_together(entry: BoardEntry) -> tuple[str, str, str, str]:
    """Return the key of a ranking: server without defences, version compared with, protocol, what is revealed.

    The version is the picture itself in settings a and c, the shuffled one in b. So a defence that shuffles (c) stands
    beside one that does not (a), and beside none.
    """
    return entry.server.sentence(), str(entry.setting.compared_with), entry.protocol, entry.reveals


def _ranked(groups: Sequence[Sequence[BoardEntry]]) -> list[Standing]:
    """Rank groups by headline; those that print the same share a rank."""
    judged = [_judged(group) for group in groups]
    has_rank = _Ranks([entry for group in groups for entry in group])
    ranked = [(_printed(strongest), standing) for standing, strongest in judged if has_rank(standing, strongest)]
    ranked.sort(key=lambda pair: pair[0])
    printed = [value for value, _ in ranked]
    first = [standing.model_copy(update={"rank": 1 + printed.index(value)}) for value, standing in ranked]
    return first + [standing for standing, strongest in judged if not has_rank(standing, strongest)]


def _printed(entry: BoardEntry) -> tuple[float, float]:
    share, median = headline(entry)
    return share, round(median, 1)


class _Ranks:
    """Which standings of a table have a rank: of third parties' those that the board computed on all of its pictures.

    What a third party adds to a model and defence that the board has itself is not ranked twice.
    """

    def __init__(self, entries: Sequence[BoardEntry]) -> None:
        reproduced = [entry for entry in entries if entry.origin == "reproduced"]
        self._pictures = {entry.provenance.pictures_sha256 for entry in reproduced}
        self._systems = {_system(entry) for entry in reproduced}

    def __call__(self, standing: Standing, strongest: BoardEntry) -> bool:
        """Tell whether a standing has a rank.

        Args:
            standing: The standing.
            strongest: The entry that it is judged by.
        """
        if standing.origin != "reproduced":
            on_all = strongest.check == "recomputed" and strongest.provenance.pictures_sha256 in self._pictures
            if not on_all or _system(strongest) in self._systems:
                return False
        return standing.verdict in RANKED and strongest.n > 0


def _system(entry: BoardEntry) -> tuple[Any, ...]:
    return entry.setting, entry.model, entry.weights, entry.defences


def _judged(group: Sequence[BoardEntry]) -> tuple[Standing, BoardEntry]:
    strongest, measured = _by_strength(group)
    verdict, reason = judge_model(group)
    standing = Standing(
        rank=None,
        **{name: getattr(strongest, name) for name in _SHARED},
        strongest=strongest.attack,
        entry=strongest.id,
        attacks=len(measured),
        adapted=any(entry.adapted for entry in measured),
        verdict=verdict,
        reason=reason,
    )
    return standing, strongest


def _by_strength(group: Sequence[BoardEntry]) -> tuple[BoardEntry, list[BoardEntry]]:
    """Return the strongest attack, one that ran if any did, and those with a score, the strongest first."""
    ran = [entry for entry in group if entry.verdict != "refused"]
    measured = sorted((entry for entry in ran if entry.n), key=headline, reverse=True)
    return (measured or ran or group)[0], measured


def judge_model(group: Sequence[BoardEntry]) -> Judgement:
    """Judge a defended model by all attacks on it: the strongest one's verdict, with four exceptions.

    While attacks are incomplete, nothing is ranked: the strongest may be among them. One attack that recovers more than
    a guess is a leak, whatever the others do. And a failure of attacks that do not know the defence is theirs: it
    stands if one that takes the defence into account was withstood, too, and none gave up.

    Args:
        group: The judged cells of the model, one for each attack.
    """
    strongest, measured = _by_strength(group)
    incomplete = [entry for entry in group if entry.verdict == "incomplete"]
    for entry in incomplete + [entry for entry in measured if entry.verdict in LEAKING]:
        return Judgement(entry.verdict, entry.reason if entry is strongest else f"{entry.attack}: {entry.reason}")
    if strongest.verdict not in ("withstood", "naive attack failed"):
        return Judgement(strongest.verdict, strongest.reason)
    adapted = [entry for entry in measured if entry.adapted]
    for entry in filter(gave_up, group):
        return Judgement(entry.verdict, f"{entry.attack}: {entry.reason}")
    if any(entry.verdict == "withstood" for entry in adapted):
        return Judgement("withstood", strongest.reason)
    if adapted:
        return Judgement("inconclusive", f"{adapted[0].attack} takes the defence into account: {adapted[0].reason}")
    naive = f"{len(measured)} naive ones" if len(measured) > 1 else "1 naive one"
    return Judgement(
        "inconclusive",
        f"no attack that takes the defence into account was run; {naive} recovered no more than a guess",
    )
