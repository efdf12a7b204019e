"""The tables of a leaderboard as rows of shown values, whatever they are then written as."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry, Difference, Standing, Verdict
from fedmjp.benchmarks.leaderboard.listing import grouped, listed
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.findings import findings, strongest
from fedmjp.benchmarks.report.legend import (
    ADDED_HEADING,
    AGAINST_HEADING,
    COMPARED,
    EXACT_HEADING,
    HEADINGS,
    LEAKAGE_HEADING,
    MEDIAN_HEADING,
    threat_title,
)
from fedmjp.benchmarks.report.numbers import Value
from fedmjp.threat import ThreatModel

FILTERED = ("model", "weights", "defence", "attack", "strongest attack", "setting", "verdict", "protocol")
TEXT = (*FILTERED, ADDED_HEADING, "origin", "source", "row", "differs", "nearest of ours")
NOT_RECORDED = "these trials do not say which pictures are flat"
CHANGED = "What it sees is said of clients that leave their updates as they are; defences change it."

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
class Row:
    """One row: values by heading, the entry behind it, its verdict; references are ``dim``."""

    values: Mapping[str, Value]
    entry: BoardEntry | None
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


def servers(board: Board) -> list[ThreatModel]:
    """The threat models without defences, in the order of the entries."""
    return list(dict.fromkeys(entry.server for entry in board.entries))


def sections(board: Board) -> list[Section]:
    """One per server that pictures leak to, in the order of the entries."""
    board = board.revealing("pictures")
    return [_section(board, server, place) for place, server in enumerate(servers(board), start=1)]


def _section(board: Board, server: ThreatModel, place: int) -> Section:
    standings = [standing for standing in board.standings if standing.server == server]
    entries = [entry for entry in board.entries if entry.server == server]
    changed = CHANGED if any(entry.threat.defences for entry in entries) else ""
    sentences = [server.sentence(entry.pipeline for entry in entries), changed]
    several = len({standing.protocol for standing in standings}) > 1
    rankings = grouped(standings, lambda standing: _compared(standing, scored=several))
    return Section(
        server,
        f"Threat model {place}: {threat_title(server)}",
        " ".join(filter(None, sentences)),
        tuple(findings(board, standings)),
        _summary(standings),
        tuple(
            Ranking(title, tuple(_row(board, strongest(board, standing), standing) for standing in group))
            for title, group in rankings.items()
        ),
        tuple(_row(board, entry) for entry in entries),
    )


def _compared(standing: Standing, *, scored: bool) -> str:
    return COMPARED[standing.setting.compared_with] + (f", scored as {standing.protocol}" if scored else "")


def _summary(standings: Sequence[Standing]) -> str:
    """The verdicts before one server in one sentence."""
    counts = Counter(standing.verdict for standing in standings)
    if not counts:
        return "No model was judged under this threat model."
    parts = [
        f"{counts[verdict]} {one if counts[verdict] == 1 else several}"
        for verdict, (one, several) in _COUNTED.items()
        if counts[verdict]
    ]
    what = "combination" if len(standings) == 1 else "combinations"
    return f"Of {len(standings)} {what} of model, defence and setting, {listed(parts)}."


def _row(board: Board, entry: BoardEntry, standing: Standing | None = None) -> Row:
    """An entry; with its rank and the verdict on the whole where it decides a standing."""
    judged = standing or entry
    named = entry.attack if entry.role == "attack" else f"{entry.attack} ({entry.role})"
    cost, top1 = entry.cost, entry.utility.top1 if entry.utility else None
    over_twin, over_floor = _difference(entry.over_twin, "undefended twin"), _difference(entry.over_floor, "grey guess")
    values = {
        **({"rank": number(standing.rank, f"{standing.rank}", "this verdict has no rank")} if standing else {}),
        "model": Value(entry.model),
        "origin": Value("" if entry.origin == "reproduced" else entry.origin),
        **({} if standing else {"attack": Value(named)}),
        "defence": Value(entry.defence),
        "mask ratio": Value(f"{entry.mask_ratio:g}", entry.mask_ratio),
        "setting": Value(str(entry.setting)),
        "verdict": Value(judged.verdict),
        EXACT_HEADING: numbers.exact(entry) if entry.exact else Value("", why=_no_score(entry)),
        MEDIAN_HEADING: _statistic(entry, "median"),
        LEAKAGE_HEADING: metric(entry, LEAKAGE),
        "worst": _statistic(entry, "worst"),
        "p95": _statistic(entry, "p95"),
        "recognisable": numbers.share(entry.recognisable) if entry.recognisable else Value("", why=_no_score(entry)),
        AGAINST_HEADING: over_twin if entry.defences else Value("", why="not defended"),
        ADDED_HEADING: _added(entry),
        **({"strongest attack": Value(entry.attack)} if standing else {"over grey, dB": over_floor}),
        "top-1 %": number(top1, f"{top1:.1f}" if top1 is not None else "", "no accuracy is known for these weights"),
        "weights": Value(numbers.weights(entry.weights)),
        "protocol": Value(entry.protocol),
        "attack s": number(cost.attack_seconds, numbers.seconds(cost), "not timed"),
        "upload": number(cost.upload_bytes, numbers.size(cost), "not known"),
        "n": numbers.counted(entry),
        "flat": Value("", why=NOT_RECORDED) if entry.flat is None else Value(str(len(entry.flat)), len(entry.flat)),
        "failed": Value(str(entry.failures), entry.failures),
    }
    if standing is None:
        values |= {HEADINGS.get(name, name): metric(entry, name) for name in board.metrics if name != LEAKAGE}
    return Row(values | {"reason": Value(judged.reason)}, entry, judged.verdict, dim=entry.role != "attack")


def number(order: float | None, text: str, why: str) -> Value:
    """A number as it is shown, or why there is none."""
    return Value("", None, why) if order is None else Value(text, order)


def metric(entry: BoardEntry, name: str) -> Value:
    """A metric's mean with its interval, or why there is none."""
    statistics = entry.metrics.get(name)
    return numbers.mean(statistics, name) if statistics else Value("", why=_no_score(entry))


def _statistic(entry: BoardEntry, name: str) -> Value:
    if LEAKAGE not in entry.metrics:
        return Value("", why=_no_score(entry))
    value = float(getattr(entry.metrics[LEAKAGE], name))
    return Value(numbers.score(value, LEAKAGE), value)


def _difference(measured: Difference | None, other: str) -> Value:
    return numbers.difference(measured) if measured else Value("", why=f"nothing to compare with: no scored {other}")


def _added(entry: BoardEntry) -> Value:
    if len(entry.defences) < 2:
        return Value("", why="there are not several defences")
    additions = [
        f"{marginal.defence} {marginal.difference.mean:+.1f}" for marginal in entry.marginal if marginal.difference
    ]
    return Value(
        "; ".join(additions), why="" if additions else "nothing to compare with: no scored twin without one of them"
    )


def _no_score(entry: BoardEntry) -> str:
    return "not computed" if entry.n else entry.reason
