"""Who leaks how much: each model with its defences judged by the strongest attack on it.

Ranked together is what one server would see without defences, and what is compared with the same version of the
picture: settings a and c with the picture itself, b with the shuffled one. So a defence that shuffles (c) stands beside
one that does not (a), and beside none.

Standings are made of what was reproduced here. What a third party submitted is judged by the same rules,
flagged and never ranked.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.leaderboard.entries import LEAKAGE, Entry, Standing
from benchmarks.leaderboard.verdicts import LEAKING, Judgement

RANKED = (*sorted(LEAKING), "withstood")


class _Judged(NamedTuple):
    standing: Standing
    leakage: float | None


def standings(entries: Iterable[Entry]) -> list[Standing]:
    """By server, version compared with and protocol: ranked ones, the least leaking first, then the others."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        if entry.role == "attack":
            groups.setdefault(_group(entry), []).append(entry)
    tables: dict[Any, list[_Judged]] = {}
    for group in groups.values():
        tables.setdefault(_table(group[0]), []).append(_judged(group))
    return [standing for table in sorted(tables) for standing in _ranked(tables[table])]


def _group(entry: Entry) -> tuple[Any, ...]:
    """What is judged together: the attacks on one defended model, by one source."""
    source = (entry.origin, entry.submitter and entry.submitter.name, entry.provenance.campaign)
    return (*_table(entry), entry.setting, entry.model, entry.weights, entry.defences, *source)


def _table(entry: Entry) -> tuple[str, str, str]:
    """What is ranked together."""
    return entry.server.sentence(), str(entry.setting.compared_with), entry.protocol


def _ranked(judged: Sequence[_Judged]) -> list[Standing]:
    """What prints the same decibels shares a rank."""
    shown = {id(each): round(each.leakage, 1) for each in judged if _is_ranked(each) and each.leakage is not None}
    values = list(shown.values())
    ranked = sorted((each for each in judged if id(each) in shown), key=lambda each: shown[id(each)])
    first = [
        each.standing.model_copy(update={"rank": 1 + sum(value < shown[id(each)] for value in values)})
        for each in ranked
    ]
    return first + [each.standing for each in judged if id(each) not in shown]


def _is_ranked(judged: _Judged) -> bool:
    return judged.standing.origin == "reproduced" and judged.standing.verdict in RANKED


def _judged(group: Sequence[Entry]) -> _Judged:
    ran = [entry for entry in group if entry.verdict != "refused"]
    measured = sorted((entry for entry in ran if entry.n), key=_leakage, reverse=True)
    strongest = (measured or ran or group)[0]
    verdict, reason = _verdict(strongest, measured, ran)
    standing = Standing(
        rank=None,
        **{name: getattr(strongest, name) for name in _SHARED},
        strongest=strongest.attack,
        attacks=len(measured),
        adapted=any(entry.adapted for entry in measured),
        verdict=verdict,
        reason=reason,
    )
    return _Judged(standing, _leakage(strongest) if measured else None)


_SHARED = ("origin", "threat", "setting", "protocol", "model", "weights", "defences", "defence", "mask_ratio")


def _verdict(strongest: Entry, measured: Sequence[Entry], ran: Sequence[Entry]) -> Judgement:
    """The strongest attack's, with three exceptions.

    While attacks are incomplete, nothing is ranked: the strongest may be among them. One attack that
    recovers more than a guess is a leak, whatever the others do. And a failure of attacks that do not
    know the defence is theirs.
    """
    leaking = [entry for entry in measured if entry.verdict in LEAKING]
    incomplete = [entry for entry in ran if entry.verdict == "incomplete"]
    for entry in incomplete + leaking:
        return _said_by(entry, strongest)
    if strongest.verdict in ("withstood", "naive attack failed"):
        return _withstood(strongest, measured)
    return Judgement(strongest.verdict, strongest.reason)


def _withstood(strongest: Entry, measured: Sequence[Entry]) -> Judgement:
    """It stands if an attack that takes the defence into account was withstood, too."""
    adapted = [entry for entry in measured if entry.adapted]
    if any(entry.verdict == "withstood" for entry in adapted):
        return Judgement("withstood", strongest.reason)
    if adapted:
        return Judgement("inconclusive", f"{adapted[0].attack} takes the defence into account: {adapted[0].reason}")
    naive = f"{len(measured)} naive ones" if len(measured) > 1 else "1 naive one"
    return Judgement(
        "inconclusive",
        f"no attack that takes the defence into account was run; {naive} recovered no more than a guess",
    )


def _said_by(entry: Entry, strongest: Entry) -> Judgement:
    named = "" if entry is strongest else f"{entry.attack}: "
    return Judgement(entry.verdict, named + entry.reason)


def _leakage(entry: Entry) -> float:
    return entry.metrics[LEAKAGE].mean
