"""The tables of a leaderboard as rows of shown values, whatever they are then written as."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry, Reported, Standing, Verdict
from benchmarks.report import numbers
from benchmarks.report.legend import HEADINGS, LEAKAGE_HEADING, heading
from fedmjp.threat import ThreatModel

FILTERED = ("model", "weights", "defence", "attack", "strongest attack", "setting", "verdict", "protocol")
TEXT = (*FILTERED, "origin", "source", "row", "differs", "nearest of ours")
NO_INTERVAL = "no interval below two pictures"

_COUNTED: dict[Verdict, tuple[str, str]] = {
    "leaks": ("leaks", "leak"),
    "reduced": ("leaks less than without the defence", "leak less than without the defence"),
    "withstood": ("withstood these attacks", "withstood these attacks"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    "no leak seen": ("is undefended and showed no leak", "are undefended and showed no leak"),
    "incomplete": ("is incomplete", "are incomplete"),
    "refused": ("had no attack that applies", "had no attack that applies"),
}


@dataclass(frozen=True)
class Value:
    """One cell: its text, the number that it sorts by, and why it is empty where it is."""

    text: str
    order: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One row: values by heading, the entry behind it, its verdict; references are ``dim``."""

    values: Mapping[str, Value]
    entry: Entry | None
    verdict: str
    dim: bool = False


@dataclass(frozen=True)
class Section:
    """What one threat model has to show."""

    threat: ThreatModel
    summary: str
    standings: tuple[Row, ...]
    cells: tuple[Row, ...]


def sections(board: Board) -> list[Section]:
    """One per threat model, in the order of the entries."""
    return [
        Section(
            threat,
            summary([standing for standing in board.standings if standing.threat == threat]),
            tuple(_standing_row(board, standing) for standing in board.standings if standing.threat == threat),
            tuple(_cell_row(board, entry) for entry in board.entries if entry.threat == threat),
        )
        for threat in threats(board)
    ]


def threats(board: Board) -> list[ThreatModel]:
    """The threat models, in the order of the entries."""
    found: list[ThreatModel] = []
    for entry in board.entries:
        if entry.threat not in found:
            found.append(entry.threat)
    return found


def strongest(board: Board, standing: Standing) -> Entry:
    """The entry that a standing is judged by."""
    return next(entry for entry in board.entries if _judges(entry, standing))


def _judges(entry: Entry, standing: Standing) -> bool:
    return entry.attack == standing.strongest and all(
        getattr(entry, key) == getattr(standing, key)
        for key in ("threat", "origin", "setting", "protocol", "model", "weights", "defence", "mask_ratio")
    )


def summary(standings: Sequence[Standing]) -> str:
    """The verdicts of one threat model in one sentence."""
    counts = Counter(standing.verdict for standing in standings)
    if not counts:
        return "No model was judged under this threat model."
    parts = [
        f"{counts[verdict]} {one if counts[verdict] == 1 else several}"
        for verdict, (one, several) in _COUNTED.items()
        if counts[verdict]
    ]
    total = len(standings)
    what = "combination" if total == 1 else "combinations"
    return f"Of {total} {what} of model, defence and setting, {_listed(parts)}."


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _standing_row(board: Board, standing: Standing) -> Row:
    entry = strongest(board, standing)
    rank = "" if standing.rank is None else str(standing.rank)
    values = {
        "rank": _number(standing.rank, rank, "this verdict has no rank"),
        **_what(standing),
        **_outcome(standing, entry),
        "strongest attack": Value(standing.strongest),
        **_figures(entry),
        "reason": Value(standing.reason),
    }
    return Row(values, entry, standing.verdict)


def _cell_row(board: Board, entry: Entry) -> Row:
    others = [name for name in board.metrics if name != LEAKAGE]
    values = {
        **_what(entry),
        "attack": Value(entry.attack if entry.role == "attack" else f"{entry.attack} ({entry.role})"),
        **_outcome(entry, entry),
        "over grey, dB": _difference(entry, "floor"),
        "failed": Value(str(entry.failures), entry.failures),
        **_figures(entry),
        **{HEADINGS.get(name, name): _metric(entry, name) for name in others},
        "reason": Value(entry.reason),
    }
    return Row(values, entry, entry.verdict, dim=entry.role != "attack")


def _what(row: Standing | Entry) -> dict[str, Value]:
    return {
        "model": Value(row.model),
        "origin": Value("" if row.origin == "reproduced" else row.origin),
        "defence": Value(row.defence),
        "mask ratio": Value(f"{row.mask_ratio:g}", row.mask_ratio),
    }


def _outcome(row: Standing | Entry, entry: Entry) -> dict[str, Value]:
    return {
        "setting": Value(str(row.setting)),
        "verdict": Value(row.verdict),
        LEAKAGE_HEADING: _metric(entry, LEAKAGE),
        "against no defence, dB": _difference(entry, "twin"),
        "weights": Value(numbers.weights(row.weights)),
        "protocol": Value(row.protocol),
    }


def _figures(entry: Entry) -> dict[str, Value]:
    recognisable = entry.recognisable
    top1 = entry.utility.top1 if entry.utility else None
    return {
        "n": Value(str(entry.n), entry.n),
        "p95": _statistic(entry, "p95"),
        "worst": _statistic(entry, "worst"),
        "recognisable": _number(
            recognisable.share if recognisable else None,
            numbers.share(recognisable) if recognisable else "",
            _no_score(entry),
        ),
        "top-1 %": _number(top1, f"{top1:.1f}" if top1 is not None else "", "no accuracy is known for these weights"),
        "attack s": _number(entry.cost.attack_seconds, numbers.seconds(entry.cost), "not timed"),
        "upload": _number(entry.cost.upload_bytes, numbers.size(entry.cost), "not known"),
    }


def _number(order: float | None, text: str, why: str) -> Value:
    return Value("", None, why) if order is None else Value(text, order)


def _metric(entry: Entry, name: str) -> Value:
    statistics = entry.metrics.get(name)
    if statistics is None:
        return Value("", None, _no_score(entry))
    return Value(numbers.mean(statistics, name), statistics.mean, "" if statistics.low is not None else NO_INTERVAL)


def _statistic(entry: Entry, name: str) -> Value:
    if LEAKAGE not in entry.metrics:
        return Value("", None, _no_score(entry))
    value = float(getattr(entry.metrics[LEAKAGE], name))
    return Value(numbers.score(value, LEAKAGE), value)


def _difference(entry: Entry, of: str) -> Value:
    found = entry.over_twin if of == "twin" else entry.over_floor
    if found:
        return Value(numbers.difference(found), found.mean)
    if of == "twin" and entry.defence == "none":
        return Value("", None, "not defended")
    return Value("", None, f"nothing to compare with: no scored {'undefended twin' if of == 'twin' else 'grey guess'}")


def _no_score(entry: Entry) -> str:
    return entry.reason if not entry.n else "not computed"


def reported_rows(board: Board) -> list[Row]:
    """A paper's figures, each with the nearest of ours named and measured beside it."""
    names = reported_metrics(board)
    return [_reported_row(board, row, names) for row in board.reported]


def reported_metrics(board: Board) -> list[str]:
    """Metrics that some reported row has, in the order in which they appear."""
    return list(dict.fromkeys(name for row in board.reported for name in row.metrics))


def _reported_row(board: Board, row: Reported, names: Sequence[str]) -> Row:
    nearest = nearest_of_ours(board, row)
    values = {
        "source": Value(row.source),
        "row": Value(row.row),
        "model": Value(row.model),
        "defence": Value(row.defence),
        "attack": Value(row.attack),
        "setting": Value(str(row.setting)),
        "n": Value(str(row.n), row.n),
        "top-1 %": _number(row.top1, f"{row.top1}", "not reported"),
        **{heading(name): _number(row.metrics.get(name), _reported(row, name), "not reported") for name in names},
        "nearest of ours": Value(_named(nearest) if nearest else "", why="nothing of ours comes near"),
        **{f"ours: {heading(name)}": _ours(nearest, name) for name in names},
        "differs": Value(row.differs),
    }
    return Row(values, nearest, "")


def nearest_of_ours(board: Board, row: Reported) -> Entry | None:
    """The entry that comes nearest a reported row: same setting and defence, the model that it names.

    The attack of the same name if it was run, and otherwise the one that revealed most.
    """
    candidates = [
        entry
        for entry in board.entries
        if (entry.model, entry.setting) == (row.compares_with, row.setting)
        and entry.defence == row.defence.casefold()
        and entry.role == "attack"
        and LEAKAGE in entry.metrics
    ]
    return max(
        candidates,
        key=lambda entry: (_shared_name(entry.attack, row.attack), entry.metrics[LEAKAGE].mean),
        default=None,
    )


def _shared_name(ours: str, theirs: str) -> int:
    """Words of our attack's name, if the paper's holds them all: ``breaching_april`` is in "APRIL (breaching)"."""
    words = _words(ours)
    return len(words) if words <= _words(theirs) else 0


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def _named(entry: Entry) -> str:
    return f"{entry.model}, {entry.defence}, {entry.attack}, {numbers.weights(entry.weights)}, n = {entry.n}"


def _reported(row: Reported, name: str) -> str:
    # As printed there: never rounded by us.
    return f"{row.metrics[name]:g}" if name in row.metrics else ""


def _ours(entry: Entry | None, name: str) -> Value:
    if entry is None:
        return Value("", None, "nothing of ours comes near")
    return _metric(entry, name)
