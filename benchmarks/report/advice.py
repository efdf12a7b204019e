"""What attacks that know a defence say to somebody who deploys it: whom it stops, whom not, and what else to do."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
from benchmarks.report import numbers
from benchmarks.report.findings import deployed
from fedmjp.threat import ThreatModel

EXACT = 40.0  # dB: the error's root mean square is a hundredth of the range
BROKEN = 0.5  # share of pictures recovered exactly from which on nobody would rely on a defence
USUAL_RATIO = 0.27  # of shuffled patches where privacy is evaluated: Ren et al., CVPR 2023, section 5.4
SYSTEM = ("model", "weights", "protocol")


def advice(board: Board) -> list[str]:
    """Three sentences about a defence, out of the board's figures.

    They speak of one defence that the board shows before a server that sees several uploads of a picture: the shortest
    pipeline, of several the first. They speak of the first such model, at the usual mask ratio or the one nearest to
    it. There are none without attacks that know the defence.
    """
    known = [entry for entry in board.entries if _is_evidence(entry)]
    counts: defaultdict[str, set[int]] = defaultdict(set)
    for entry in filter(_is_plain, known):
        counts[entry.defence].add(_uploads(entry))
    several = [entry for entry in known if _is_plain(entry) and len(counts[entry.defence]) > 1]
    if not several:
        return []
    subject = min(several, key=lambda entry: len(entry.defences)).defence
    plain = [entry for entry in several if entry.defence == subject]
    ratio = min({entry.mask_ratio for entry in plain}, key=lambda found: abs(found - USUAL_RATIO))
    system = _system(plain[0])
    own = [entry for entry in known if _system(entry) == system and entry.mask_ratio in (0.0, ratio)]
    strongest = _strongest(entry for entry in own if entry.defence == subject and entry.mask_ratio == ratio)
    by_count = {_uploads(entry): entry for entry in strongest if _is_plain(entry)}
    where = (f"at mask ratio {ratio:g} " if ratio else "") + f"on {system[0]} ({numbers.weights(system[1])})"
    others = [entry for entry in _strongest(own) if entry.defence != subject]
    others += [entry for entry in strongest if not _is_plain(entry)]
    return [
        _once(board, by_count, where),
        _again(board, by_count, where),
        *([_instead(board, subject, others)] if others else []),
    ]


def _once(board: Board, by_count: Mapping[int, Entry], where: str) -> str:
    fewest = by_count[min(by_count)]
    naive = _strongest(
        each
        for each in board.entries
        if not each.adapted and each.role == "attack" and each.leakage and _same_cell(each, fewest)
    )
    blind = f"; attacks that do not know {fewest.defence} recover {_middle(naive[0])}" if naive else ""
    exact = f", {_exact(fewest)} of them exactly" if _exact_share(fewest) else ""
    return (
        f"{fewest.defence} {_verb(board, fewest)} against a server that sees a picture {_times(min(by_count))}: "
        f"{where} the strongest attack ({fewest.attack}) recovers {_middle(fewest)}{_references(board, fewest)}{exact}"
        f"{blind}."
    )


def _again(board: Board, by_count: Mapping[int, Entry], where: str) -> str:
    said = [f"{_exact(entry)} after {count}" for count, entry in sorted(by_count.items()) if count > 1]
    most = by_count[max(by_count)]
    masks = " under other masks" if most.mask_ratio else ""
    return (
        f"It {_verb(board, most)} against a server that sees the picture again{masks}: {where} {most.attack} "
        f"recovers exactly ({EXACT:g} dB or more, in true order) this share of the pictures: {_listed(said)} uploads"
        f"{_cost(most)}."
    )


def _verb(board: Board, entry: Entry) -> str:
    """Whether a defence stops its strongest attack."""
    stops = _median(entry) < board.recognisable_at and _exact_share(entry) < BROKEN
    return "helps" if stops else "does not help"


def _instead(board: Board, subject: str, others: Sequence[Entry]) -> str:
    grouped: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(others, key=lambda each: (_uploads(each), each.n)):
        grouped[_protection(entry, subject)].append(entry)
    ascending = sorted(grouped.items(), key=lambda item: max(map(_median, item[1])))
    said = [f"{name}: {_by_uploads(board, entries)}" for name, entries in ascending]
    guess = _floor(board, others[0])
    against = f" (grey guess {guess})" if guess else ""
    opening = f"What was measured besides {subject}, each with the strongest attack that applies"
    return f"{opening}{against}: {'; '.join(said)}."


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


def _is_evidence(entry: Entry) -> bool:
    """An attack of ours that knows the defences, on what somebody would deploy."""
    known = entry.role == "attack" and entry.adapted and entry.origin == "reproduced"
    return known and bool(entry.leakage) and deployed(entry)


def _is_plain(entry: Entry) -> bool:
    """Whether uploads are gradients of single pictures, whatever was done to them."""
    return entry.server == ThreatModel(uploads_per_picture=_uploads(entry))


def _system(entry: Entry) -> tuple[str, ...]:
    return tuple(getattr(entry, field) for field in SYSTEM)


def _strongest(entries: Iterable[Entry]) -> list[Entry]:
    """The one that recovers most of each defence before each server."""
    found: dict[tuple[object, ...], Entry] = {}
    for entry in entries:
        known = found.get((entry.defences, entry.threat))
        if known is None or _median(entry) > _median(known):
            found[entry.defences, entry.threat] = entry
    return list(found.values())


def _same_cell(one: Entry, other: Entry) -> bool:
    fields = (*SYSTEM, "defences", "setting", "threat", "origin")
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
        parts.append(f"without {entry.defence} {numbers.score(_median(twin), LEAKAGE)} dB")
    return f" ({', '.join(parts)})" if parts else ""


def _floor_entry(board: Board, entry: Entry) -> Entry | None:
    return next((each for each in board.entries if each.id == entry.floor), None)


def _floor(board: Board, entry: Entry) -> str:
    found = _floor_entry(board, entry)
    return f"{numbers.score(_median(found), LEAKAGE)} dB" if found is not None and found.leakage else ""


def _protection(entry: Entry, subject: str) -> str:
    """How a cell differs from the subject on gradients of single pictures."""
    server = entry.server
    parts = [entry.defence] if entry.defence != subject else []
    if server.batch_size > 1:
        parts.append(f"batches of {server.batch_size}")
    if server.update == "delta":
        parts.append(f"weight deltas of {server.local_steps} {'step' if server.local_steps == 1 else 'steps'}")
    if server.labels_known:
        parts.append("labels told")
    return ", ".join(parts)


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
