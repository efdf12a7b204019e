"""What attacks that know MJP say to somebody who deploys it: whom it stops, whom not, and what else to do."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
from benchmarks.report import numbers
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel

EXACT = 40.0  # dB: the error's root mean square is a hundredth of the range
BROKEN = 0.5  # share of pictures recovered exactly from which on nobody would rely on a defence
PAPERS_RATIO = 0.27  # of MJP's evaluation of privacy


def advice(board: Board) -> list[str]:
    """Three sentences about MJP, out of the board's figures; none without attacks that know it on several uploads.

    They speak of setting c (the clean picture in true order) on the first such model, at the mask ratio
    nearest to the paper's.
    """
    plain = [entry for entry in _on_mjp(board) if _is_plain(entry.threat)]
    if len({_uploads(entry) for entry in plain}) < 2:
        return []
    system, weights, protocol = plain[0].model, plain[0].weights, plain[0].protocol
    ratio = min({entry.mask_ratio for entry in plain}, key=lambda found: abs(found - PAPERS_RATIO))
    own = [
        entry
        for entry in _on_mjp(board)
        if (entry.model, entry.weights, entry.protocol, entry.mask_ratio) == (system, weights, protocol, ratio)
    ]
    strongest = _strongest_by_threat(own)
    by_count = {threat.uploads_per_picture: entry for threat, entry in strongest.items() if _is_plain(threat)}
    where = f"mask ratio {ratio:g} on {system} ({numbers.weights(weights)})"
    protected = [entry for threat, entry in strongest.items() if not _is_plain(threat)]
    return [
        _once(board, by_count, where),
        _again(board, by_count, where),
        *([_instead(board, protected)] if protected else []),
    ]


def _once(board: Board, by_count: dict[int, Entry], where: str) -> str:
    fewest = by_count[min(by_count)]
    naive = _strongest_by_threat(
        each
        for each in board.entries
        if not each.adapted and each.role == "attack" and each.leakage and _same_cell(each, fewest)
    )
    known = f"; attacks that do not know MJP recover {_middle(next(iter(naive.values())))}" if naive else ""
    exact = f", {_exact(fewest)} of them exactly" if _exact_share(fewest) else ""
    stops = _median(fewest) < board.recognisable_at and _exact_share(fewest) < BROKEN
    return (
        f"MJP {'helps' if stops else 'does not help'} against a server that sees a picture {_times(min(by_count))}: "
        f"at {where} the strongest attack "
        f"({fewest.attack}) recovers {_middle(fewest)}{_references(board, fewest)}{exact}{known}."
    )


def _again(board: Board, by_count: dict[int, Entry], where: str) -> str:
    said = [f"{_exact(entry)} after {count}" for count, entry in sorted(by_count.items()) if count > 1]
    most = by_count[max(by_count)]
    stops = _median(most) < board.recognisable_at and _exact_share(most) < BROKEN
    return (
        f"It {'helps' if stops else 'does not help'} against a server that sees the picture again under other masks: "
        f"at {where} {most.attack} "
        f"recovers exactly ({EXACT:g} dB or more, in true order) this share of the pictures: {_listed(said)} uploads"
        f"{_cost(most)}."
    )


def _instead(board: Board, protected: Sequence[Entry]) -> str:
    grouped: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(protected, key=lambda each: (_uploads(each), each.n)):
        grouped[_protection(entry.threat)].append(entry)
    ascending = sorted(grouped.items(), key=lambda item: max(map(_median, item[1])))
    said = [f"{name}: {_by_uploads(board, entries)}" for name, entries in ascending]
    guess = _floor(board, protected[0])
    against = f" (grey guess {guess})" if guess else ""
    return f"What was measured besides MJP, each with the strongest attack that applies{against}: {'; '.join(said)}."


def _by_uploads(board: Board, entries: Sequence[Entry]) -> str:
    """Medians of one protection, by number of uploads; below the guess it is the attack that failed."""
    found = [
        f"{numbers.score(_median(entry), LEAKAGE)} dB from "
        f"{'1 upload' if _uploads(entry) == 1 else f'{_uploads(entry)} uploads'}"
        for entry in entries
    ]
    counts = sorted({entry.n for entry in entries})
    floors = [_floor_entry(board, entry) for entry in entries]
    beaten = all(
        floor is not None and floor.leakage and _median(entry) < _median(floor)
        for entry, floor in zip(entries, floors, strict=True)
    )
    failed = "; less than the guess: the attack failed, which proves nothing" if beaten else ""
    return f"{_listed(found)} (median of {_listed([str(count) for count in counts])} pictures{failed})"


def _on_mjp(board: Board) -> list[Entry]:
    return [
        entry
        for entry in board.entries
        if entry.defence == "mjp"
        and entry.setting is Setting.C
        and entry.role == "attack"
        and entry.adapted
        and entry.leakage
        and entry.origin == "reproduced"
    ]


def _is_plain(threat: ThreatModel) -> bool:
    """Whether uploads are clean gradients of single pictures."""
    return threat == ThreatModel(uploads_per_picture=threat.uploads_per_picture)


def _strongest_by_threat(entries: Iterable[Entry]) -> dict[ThreatModel, Entry]:
    found: dict[ThreatModel, Entry] = {}
    for entry in entries:
        known = found.get(entry.threat)
        if known is None or _median(entry) > _median(known):
            found[entry.threat] = entry
    return found


def _same_cell(one: Entry, other: Entry) -> bool:
    fields = ("model", "weights", "defence", "mask_ratio", "setting", "protocol", "threat", "origin")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _uploads(entry: Entry) -> int:
    return entry.threat.uploads_per_picture


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _median(entry: Entry) -> float:
    return float(np.median(list(entry.leakage.values())))


def _middle(entry: Entry) -> str:
    return f"{numbers.score(_median(entry), LEAKAGE)} dB in the median of {entry.n} pictures"


def _exact(entry: Entry) -> str:
    return f"{100 * _exact_share(entry):.0f} %"


def _exact_share(entry: Entry) -> float:
    return float(np.mean([value >= EXACT for value in entry.leakage.values()]))


def _cost(entry: Entry) -> str:
    seconds = entry.cost.attack_seconds
    return "" if seconds is None else f", in {numbers.seconds(entry.cost)} s per picture"


def _references(board: Board, entry: Entry) -> str:
    guess, twin = _floor(board, entry), next((each for each in board.entries if each.id == entry.twin), None)
    parts = [f"grey guess {guess}"] if guess else []
    if twin is not None and twin.leakage:
        parts.append(f"without MJP {numbers.score(_median(twin), LEAKAGE)} dB")
    return f" ({', '.join(parts)})" if parts else ""


def _floor_entry(board: Board, entry: Entry) -> Entry | None:
    return next((each for each in board.entries if each.id == entry.floor), None)


def _floor(board: Board, entry: Entry) -> str:
    found = _floor_entry(board, entry)
    return f"{numbers.score(_median(found), LEAKAGE)} dB" if found is not None and found.leakage else ""


def _protection(threat: ThreatModel) -> str:
    """How a threat model differs from clean gradients of single pictures."""
    parts = [f"batches of {threat.batch_size}"] if threat.batch_size > 1 else []
    if threat.update == "delta":
        parts.append(f"weight deltas of {threat.local_steps} steps")
    if threat.degradation:
        parts.append(threat.degradation)
    return ", ".join(parts)


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
