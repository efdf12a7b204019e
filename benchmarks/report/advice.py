"""What attacks that know a defence say to somebody who deploys it: whom it stops, whom not, and what else to do."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import crops_title, exactly, headline, pictures, recovery
from fedmjp.benchmarks.leaderboard.listing import grouped, listed
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.findings import is_deployed
from fedmjp.benchmarks.report.legend import update_title
from fedmjp.metrics import EXACT
from fedmjp.threat import ThreatModel

BROKEN = 0.5  # share of pictures recovered exactly from which on nobody would rely on a defence
USUAL_RATIO = 0.27  # of shuffled patches where privacy is evaluated: Ren et al., CVPR 2023, section 5.4
_system = attrgetter("model", "weights", "protocol")
_cell = attrgetter("model", "weights", "protocol", "defences", "setting", "threat", "origin")


def write_advice(board: Board) -> list[str]:
    """Write three sentences about a defence, out of the board's figures.

    They are about the shortest pipeline that meets a server with several uploads of a picture, on the first such model,
    at the usual mask ratio or the nearest.

    Args:
        board: The board.

    Returns:
        No sentences without attacks that know the defence, or where a battery tried several defences alike.
    """
    board = board.revealing("pictures")
    evidence = [entry for entry in board.entries if _is_evidence(entry)]
    by_defence = grouped(filter(_is_plain, evidence), lambda entry: entry.defence).values()
    several = [entries for entries in by_defence if len(set(map(_uploads, entries))) > 1]
    if not several:
        return []
    shortest = min(len(entries[0].defences) for entries in several)
    plain, *as_short = (entries for entries in several if len(entries[0].defences) == shortest)
    if as_short and board.about.get("battery"):
        return []
    subject, system = plain[0].defence, _system(plain[0])
    ratio = min({entry.mask_ratio for entry in plain}, key=lambda candidate: abs(candidate - USUAL_RATIO))
    strongest = _strongest(entry for entry in evidence if _system(entry) == system and entry.mask_ratio in (0.0, ratio))
    of_subject = [entry for entry in strongest if entry.defence == subject and entry.mask_ratio == ratio]
    by_count = sorted({_uploads(entry): entry for entry in of_subject if _is_plain(entry)}.values(), key=_uploads)
    alternatives = [entry for entry in strongest if entry.defence != subject]
    alternatives += [entry for entry in of_subject if not _is_plain(entry)]
    where = (f"at mask ratio {ratio:g} " if ratio else "") + f"on {system[0]} ({numbers.weights(system[1])})"
    return [
        _once(board, by_count[0], where),
        _again(by_count, where),
        *([_instead(board, subject, alternatives)] if alternatives else []),
    ]


def _once(board: Board, fewest: BoardEntry, where: str) -> str:
    naive = _strongest(
        entry
        for entry in board.entries
        if not entry.adapted and entry.role == "attack" and entry.n and _cell(entry) == _cell(fewest)
    )
    blind = f"; attacks that do not know {fewest.defence} recover {_middle(naive[0])}" if naive else ""
    times = "once" if _uploads(fewest) == 1 else f"{_uploads(fewest)} times"
    references = {"grey guess": fewest.floor, f"without {fewest.defence}": fewest.twin}
    measured = {name: _decibels(board.by_id.get(entry_id)) for name, entry_id in references.items()}
    against = ", ".join(f"{name} {decibels}" for name, decibels in measured.items() if decibels)
    return (
        f"{fewest.defence} {where}, before a server that sees a picture {times}: the strongest attack "
        f"({fewest.attack}) recovers {exactly(fewest)} exactly ({EXACT:g} dB or more), {_middle(fewest)}"
        f"{f' ({against})' if against else ''}{blind}."
    )


def _again(by_count: Sequence[BoardEntry], where: str) -> str:
    counts = [f"{exactly(entry)} after {_uploads(entry)}" for entry in by_count if _uploads(entry) > 1]
    most = by_count[-1]
    masks = " under other masks" if most.mask_ratio else ""
    seconds = numbers.seconds(most.cost.attack_seconds)
    follows = (
        f"{most.defence} {where} does not protect pictures that are shown again"
        if headline(most)[0] >= BROKEN
        else "where attacks end is no evidence of protection"
    )
    return (
        f"Before a server that sees the picture again{masks}, {most.attack} recovers exactly, in true order, "
        f"{listed(counts)} uploads{f', in {seconds} s per picture' if seconds else ''}: {follows}."
    )


def _instead(board: Board, subject: str, alternatives: Sequence[BoardEntry]) -> str:
    ordered = sorted(alternatives, key=lambda entry: (_uploads(entry), entry.n))
    protections = grouped(ordered, lambda entry: _protection(entry, subject))
    ascending = sorted(protections.items(), key=lambda item: max(map(headline, item[1])))
    results = [f"{name}: {_by_uploads(board, entries)}" for name, entries in ascending]
    guess = _decibels(board.by_id.get(alternatives[0].floor))
    against = f" (grey guess {guess})" if guess else ""
    opening = f"What was measured besides {subject}, each with the strongest attack that applies"
    return f"{opening}{against}: {'; '.join(results)}. What an attack does not recover is no evidence of protection."


def _protection(entry: BoardEntry, subject: str) -> str:
    """Name how a cell differs from the subject on gradients of single pictures."""
    server = entry.server
    parts = {
        entry.defence: entry.defence != subject,
        f"batches of {server.batch_size}": server.batch_size > 1,
        update_title(server).replace("delta after", "deltas of"): server.update == "delta",
        f"label smoothing {server.label_smoothing:g}": server.label_smoothing > 0,
        f"mixup {server.mixup:g}": server.mixup > 0,
        crops_title(server): server.crop_scale is not None,
        server.local_optimiser: server.local_optimiser != "sgd",
        f"a server that changes weights ({server.server and server.server.text})": server.server is not None,
        "labels told": server.labels_known,
    }
    return ", ".join(part for part, differs in parts.items() if differs)


def _by_uploads(board: Board, entries: Sequence[BoardEntry]) -> str:
    """Write what most uploads of one protection gave, and whether it was the attack that failed."""
    fewest, most = entries[0], entries[-1]
    count, guess = _uploads(most), board.by_id.get(most.floor)
    failed = ""
    if guess and guess.n and headline(most) < headline(guess):
        failed = " (less than the guess: the attack failed, which proves nothing)"
    elif _uploads(fewest) < count and recovery(most) == recovery(fewest):
        failed = f" (what {_uploads(fewest)} gave: the attack makes nothing of the others, which proves nothing)"
    return f"{recovery(most)}, from {count} {'upload' if count == 1 else 'uploads'}{failed}"


def _is_evidence(entry: BoardEntry) -> bool:
    """Tell whether an attack of ours knows the defences, on what somebody would deploy."""
    is_adapted = entry.role == "attack" and entry.adapted and entry.origin == "reproduced"
    return is_adapted and entry.n > 0 and is_deployed(entry)


def _is_plain(entry: BoardEntry) -> bool:
    """Tell whether uploads are gradients of single pictures, whatever was done to them."""
    return entry.server == ThreatModel(uploads_per_picture=_uploads(entry))


def _strongest(entries: Iterable[BoardEntry]) -> list[BoardEntry]:
    """Select the attack that recovers most, for each defence and server."""
    return [max(group, key=headline) for group in grouped(entries, attrgetter("defences", "threat")).values()]


def _uploads(entry: BoardEntry) -> int:
    return entry.threat.uploads_per_picture


def _decibels(entry: BoardEntry | None) -> str:
    return f"{numbers.score(headline(entry)[1], LEAKAGE)} dB" if entry and entry.n else ""


def _middle(entry: BoardEntry) -> str:
    return f"{_decibels(entry)} in the median of {pictures(entry)}"
