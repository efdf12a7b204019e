"""The tables of a leaderboard as rows of shown values, whatever they are then written as."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry, Standing, Verdict
from benchmarks.report import numbers
from benchmarks.report.findings import findings, strongest
from benchmarks.report.legend import (
    ADDED_HEADING,
    AGAINST_HEADING,
    COMPARED,
    HEADINGS,
    LEAKAGE_HEADING,
    threat_title,
    told_of,
)
from fedmjp.threat import ThreatModel

FILTERED = ("model", "weights", "defence", "attack", "strongest attack", "setting", "verdict", "protocol")
TEXT = (*FILTERED, ADDED_HEADING, "origin", "source", "row", "differs", "nearest of ours")
CHANGED = "This is what it sees where clients leave their updates as they are; defences change it."
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
    """One cell: a number or name, what it sorts by, and why it is empty where it is.

    ``interval`` stands behind the number, in brackets; ``test`` behind both, where no details follow.
    """

    main: str
    order: float | None = None
    why: str = ""
    interval: str = ""
    test: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.main}{self.interval}{self.test}"


@dataclass(frozen=True)
class Row:
    """One row: values by heading, the entry behind it, its verdict; references are ``dim``."""

    values: Mapping[str, Value]
    entry: Entry | None
    verdict: str
    dim: bool = False


@dataclass(frozen=True)
class Ranking:
    """Standings that are ranked together; ``title`` says what they are compared with."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Section:
    """What one server has to show, whatever clients do to defend themselves.

    ``server`` is its view of clients without defences; ``sentence`` adds what it is told of the defences here.
    ``findings`` are sentences, ``summary`` counts the standings.
    """

    server: ThreatModel
    title: str
    sentence: str
    findings: tuple[str, ...]
    summary: str
    rankings: tuple[Ranking, ...]
    cells: tuple[Row, ...]


def sections(board: Board) -> list[Section]:
    """One per server, in the order of the entries."""
    return [_section(board, server, place) for place, server in enumerate(servers(board), start=1)]


def _section(board: Board, server: ThreatModel, place: int) -> Section:
    shown = [one for one in board.standings if one.server == server]
    entries = [entry for entry in board.entries if entry.server == server]
    return Section(
        server,
        f"Threat model {place}: {threat_title(server)}",
        _sentence(server, entries),
        tuple(findings(board, shown)),
        summary(shown),
        _rankings(board, shown),
        tuple(_cell_row(board, entry) for entry in entries),
    )


def _sentence(server: ThreatModel, entries: Sequence[Entry]) -> str:
    changed = [CHANGED] if any(entry.threat.defences for entry in entries) else []
    told = told_of(entry.pipeline for entry in entries)
    return " ".join(filter(None, [server.sentence(), *changed, told]))


def _rankings(board: Board, standings: Sequence[Standing]) -> tuple[Ranking, ...]:
    together: dict[str, list[Standing]] = {}
    several = len({standing.protocol for standing in standings}) > 1
    for standing in standings:
        scored = f", scored as {standing.protocol}" if several else ""
        together.setdefault(f"{COMPARED[standing.setting.compared_with]}{scored}", []).append(standing)
    return tuple(
        Ranking(title, tuple(_standing_row(board, standing) for standing in group)) for title, group in together.items()
    )


def servers(board: Board) -> list[ThreatModel]:
    """The threat models without defences, in the order of the entries."""
    return list(dict.fromkeys(entry.server for entry in board.entries))


def summary(standings: Sequence[Standing]) -> str:
    """The verdicts before one server in one sentence."""
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
        "rank": number(standing.rank, rank, "this verdict has no rank"),
        **_model(standing),
        **_defence(standing),
        **_leakage(entry),
        AGAINST_HEADING: _difference(entry, "twin"),
        ADDED_HEADING: _added(entry),
        "strongest attack": Value(standing.strongest),
        **_circumstances(entry),
        "reason": Value(standing.reason),
    }
    return Row(values, entry, standing.verdict)


def _cell_row(board: Board, entry: Entry) -> Row:
    others = [name for name in board.metrics if name != LEAKAGE]
    values = {
        **_model(entry),
        "attack": Value(entry.attack if entry.role == "attack" else f"{entry.attack} ({entry.role})"),
        **_defence(entry),
        **_leakage(entry),
        AGAINST_HEADING: _difference(entry, "twin"),
        ADDED_HEADING: _added(entry),
        "over grey, dB": _difference(entry, "floor"),
        **_circumstances(entry),
        **{HEADINGS.get(name, name): metric(entry, name) for name in others},
        "reason": Value(entry.reason),
    }
    return Row(values, entry, entry.verdict, dim=entry.role != "attack")


def _model(row: Standing | Entry) -> dict[str, Value]:
    return {"model": Value(row.model), "origin": Value("" if row.origin == "reproduced" else row.origin)}


def _defence(row: Standing | Entry) -> dict[str, Value]:
    return {
        "defence": Value(row.defence),
        "mask ratio": Value(f"{row.mask_ratio:g}", row.mask_ratio),
        "setting": Value(str(row.setting)),
        "verdict": Value(row.verdict),
    }


def _leakage(entry: Entry) -> dict[str, Value]:
    found = entry.recognisable
    return {
        LEAKAGE_HEADING: metric(entry, LEAKAGE),
        "worst": _statistic(entry, "worst"),
        "p95": _statistic(entry, "p95"),
        "recognisable": Value(
            f"{found.share:.0%}".replace("%", " %"), found.share, interval=numbers.share_interval(found)
        )
        if found
        else Value("", why=_no_score(entry)),
    }


def _circumstances(entry: Entry) -> dict[str, Value]:
    top1 = entry.utility.top1 if entry.utility else None
    return {
        "top-1 %": number(top1, f"{top1:.1f}" if top1 is not None else "", "no accuracy is known for these weights"),
        "weights": Value(numbers.weights(entry.weights)),
        "protocol": Value(entry.protocol),
        "attack s": number(entry.cost.attack_seconds, numbers.seconds(entry.cost), "not timed"),
        "upload": number(entry.cost.upload_bytes, numbers.size(entry.cost), "not known"),
        "n": Value(str(entry.n), entry.n),
        "failed": Value(str(entry.failures), entry.failures),
    }


def number(order: float | None, text: str, why: str) -> Value:
    """A number as it is shown, or why there is none."""
    return Value("", None, why) if order is None else Value(text, order)


def metric(entry: Entry, name: str) -> Value:
    """A metric's mean with its interval, or why there is none."""
    statistics = entry.metrics.get(name)
    if statistics is None:
        return Value("", None, _no_score(entry))
    interval = numbers.interval(statistics, name)
    return Value(numbers.score(statistics.mean, name), statistics.mean, "" if interval else NO_INTERVAL, interval)


def _statistic(entry: Entry, name: str) -> Value:
    if LEAKAGE not in entry.metrics:
        return Value("", None, _no_score(entry))
    value = float(getattr(entry.metrics[LEAKAGE], name))
    return Value(numbers.score(value, LEAKAGE), value)


def _difference(entry: Entry, of: str) -> Value:
    found = entry.over_twin if of == "twin" else entry.over_floor
    if found:
        return Value(
            f"{found.mean:+.1f}",
            found.mean,
            interval=numbers.difference_interval(found),
            test=numbers.p_value(found.p_value),
        )
    if of == "twin" and not entry.defences:
        return Value("", None, "not defended")
    return Value("", None, f"nothing to compare with: no scored {'undefended twin' if of == 'twin' else 'grey guess'}")


def _added(entry: Entry) -> Value:
    if len(entry.defences) < 2:
        return Value("", why="there are not several defences")
    found = [f"{each.defence} {each.difference.mean:+.1f}" for each in entry.marginal if each.difference]
    return Value("; ".join(found), why="" if found else "nothing to compare with: no scored twin without one of them")


def _no_score(entry: Entry) -> str:
    return entry.reason if not entry.n else "not computed"
