"""What entries of a board come to in a line: the strongest of several, its conditions, and how much it recovers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.leaderboard.entries import Entry, Share
from benchmarks.leaderboard.listing import grouped
from benchmarks.leaderboard.statistics import share
from benchmarks.report import numbers
from benchmarks.report.advice import EXACT, USUAL_RATIO, median
from benchmarks.report.findings import deployed
from benchmarks.report.legend import update_title
from fedmjp.settings import Picture


@dataclass(frozen=True)
class Answer:
    """What is recovered of what somebody might deploy, and without any defence, by the strongest attack on each."""

    defended: Entry | None
    undefended: Entry | None

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "Answer":
        """Of these entries; at the usual mask ratio, or the nearest to it."""
        tried = [entry for entry in entries if entry.leakage]
        defended = [entry for entry in tried if deployed(entry)]
        ratios = {entry.mask_ratio for entry in defended} - {0.0}
        usual = min(ratios, key=lambda found: abs(found - USUAL_RATIO), default=0.0)
        return cls(
            strongest(entry for entry in defended if entry.mask_ratio in (0.0, usual)),
            strongest(entry for entry in tried if not entry.defences and entry.setting.compared_with is Picture.CLEAN),
        )


def exactly(entry: Entry) -> Share:
    """The share of pictures recovered exactly."""
    return share(sum(value >= EXACT for value in entry.leakage.values()), len(entry.leakage))


def strongest(entries: Iterable[Entry]) -> Entry | None:
    """The one that recovers the largest share exactly; of those, the highest median, and the fewest uploads."""
    return max(
        entries,
        key=lambda entry: (exactly(entry).share, round(median(entry), 1), -entry.threat.uploads_per_picture),
        default=None,
    )


def by_defence(entries: Iterable[Entry]) -> list[Entry]:
    """The strongest attack on each model without a defence, and on each defence as somebody might deploy it."""
    attacks = [entry for entry in entries if entry.role == "attack" and entry.leakage]
    shown = [entry for entry in attacks if deployed(entry) or (not entry.defences and entry.setting == "a")]
    groups = grouped(shown, lambda entry: (entry.model, entry.weights, entry.defence, entry.mask_ratio)).values()
    return [found for group in groups if (found := strongest(group))]


def conditions(entry: Entry) -> str:
    """What else the result depends on: ``mask ratio 0.27, 12 uploads of each picture``."""
    server, uploads = entry.server, entry.threat.uploads_per_picture
    parts = {
        f"mask ratio {entry.mask_ratio:g}": entry.mask_ratio > 0,
        f"{uploads} uploads of each picture" if uploads > 1 else "1 upload": True,
        f"batches of {server.batch_size}": server.batch_size > 1,
        update_title(server): server.update == "delta",
        "labels told": server.labels_known,
        "compared with the shuffled picture": entry.setting.compared_with is Picture.SHUFFLED,
        "masked, not shuffled": bool(entry.mask_ratio) and entry.setting == "a",
        "submitted": entry.origin == "submitted",
    }
    return ", ".join(part for part, holds in parts.items() if holds)


def decibels(entry: Entry) -> str:
    """The median, with a minus sign where it is below zero."""
    return numbers.score(median(entry), "psnr").replace("-", "−")


def heat(entry: Entry) -> int:
    """How dark a cell is: 0 where nothing is exact, 4 where nearly all is."""
    found = exactly(entry).share
    return sum(found > bound for bound in (0.0, 0.1, 0.5, 0.9))
