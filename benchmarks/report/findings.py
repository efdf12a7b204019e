"""What the standings say about each defended model, in a sentence: what its strongest attack recovers."""

from collections.abc import Mapping, Sequence

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry, Standing, Verdict
from benchmarks.report import numbers
from fedmjp.settings import Picture

LINES = 6
# From what a reader has to know first.
SEVERITY: tuple[Verdict, ...] = ("leaks", "reduced", "inconclusive", "incomplete", "withstood", "refused")
NAIVE = "no attack that knows the defence was run"


def findings(board: Board, standings: Sequence[Standing]) -> list[str]:
    """One line per defended model, the worst first; at most ``LINES``, and how many more there are."""
    entries = {entry.id: entry for entry in board.entries}
    judged: dict[tuple[object, ...], list[tuple[Standing, Entry]]] = {}
    for standing in standings:
        if standing.defences:
            system = (standing.model, standing.weights, standing.defence, standing.mask_ratio)
            key = (*system, standing.protocol, standing.origin)
            judged.setdefault(key, []).append((standing, strongest(board, standing)))
    worst_first = sorted(judged.values(), key=lambda found: min(map(_badness, found)))
    lines = [_line(found, entries) for found in worst_first[:LINES]]
    more = len(judged) - len(lines)
    return lines + ([f"and {more} more below"] if more else [])


def deployed(entry: Entry) -> bool:
    """Whether it shows what somebody who deploys its defences wants to know.

    That is the picture itself, not its shuffled version, under defences that shuffle where they are made to.
    """
    pipeline = entry.pipeline
    as_made = pipeline.shuffles or not pipeline.mask_ratio
    return bool(entry.defences) and as_made and entry.setting.compared_with is Picture.CLEAN


def strongest(board: Board, standing: Standing) -> Entry:
    """The entry that a standing is judged by."""
    return next(entry for entry in board.entries if _judges(entry, standing))


def _judges(entry: Entry, standing: Standing) -> bool:
    return entry.attack == standing.strongest and all(
        getattr(entry, key) == getattr(standing, key)
        for key in ("threat", "origin", "setting", "protocol", "model", "weights", "defences")
    )


def _badness(found: tuple[Standing, Entry]) -> tuple[int, float]:
    standing, entry = found
    leakage = entry.metrics[LEAKAGE].mean if LEAKAGE in entry.metrics else 0.0
    return SEVERITY.index(standing.verdict), -leakage


def _line(found: Sequence[tuple[Standing, Entry]], entries: Mapping[str, Entry]) -> str:
    """Settings that say the same share a clause; what all are held against is said once."""
    ordered = sorted(found, key=_badness)
    references = {_references(entry, entries) for _, entry in ordered if LEAKAGE in entry.metrics}
    shared = references.pop() if len(references) == 1 else ""
    clauses: dict[tuple[str, str], list[str]] = {}
    for standing, entry in ordered:
        behind = "" if shared else _references(entry, entries)
        clauses.setdefault(_clause(standing, entry, behind), []).append(str(standing.setting))
    said = [before + _joined(settings) + after for (before, after), settings in clauses.items()]
    tried = [standing for standing, _ in found if standing.attacks]
    naive = [NAIVE] if tried and not any(standing.adapted for standing in tried) else []
    return f"{_system(found[0][0])}{shared}: {'; '.join([*said, *naive])}"


def _system(standing: Standing) -> str:
    weights = "" if standing.weights == "untrained" else f" ({numbers.weights(standing.weights)})"
    origin = "" if standing.origin == "reproduced" else f", {standing.origin}"
    ratio = f" at mask ratio {standing.mask_ratio:g}" if standing.mask_ratio else ""
    return f"{standing.defence}{ratio} on {standing.model}{weights}{origin}"


def _clause(standing: Standing, entry: Entry, references: str) -> tuple[str, str]:
    """What stands before and behind the settings."""
    if standing.verdict == "refused":
        return "no attack applies in ", ""
    if LEAKAGE not in entry.metrics:
        return "nothing is measured in ", f": {standing.verdict}"
    before = f"strongest attack {standing.strongest} recovers {_decibels(entry)} dB in "
    return before, f"{references}: {standing.verdict}"


def _references(entry: Entry, entries: Mapping[str, Entry]) -> str:
    """What a leakage is held against, in brackets: the guess, and the same attack without the defence."""
    named = {"grey guess": entry.floor, "without defence": entry.twin}
    found = {name: entries.get(reference) for name, reference in named.items() if reference}
    known = [f"{name} {_decibels(one)} dB" for name, one in found.items() if one and LEAKAGE in one.metrics]
    return f" ({', '.join(known)})" if known else ""


def _decibels(entry: Entry) -> str:
    return numbers.score(entry.metrics[LEAKAGE].mean, LEAKAGE)


def _joined(settings: Sequence[str]) -> str:
    names = sorted(settings)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
