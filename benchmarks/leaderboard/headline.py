"""Cells and servers in a few words; the headline that orders cells: share recovered exactly, then middle leakage."""

import math

from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.threat import OPTIMISERS, ThreatModel

NOTHING = (0.0, -math.inf)
PLAIN = ThreatModel()


def headline(entry: BoardEntry) -> tuple[float, float]:
    """Return what cells are ordered by: the share recovered exactly, then the middle of the leakage.

    Args:
        entry: A cell.

    Returns:
        The middle is the median PSNR of pictures, or the share of features found among all; ``NOTHING`` without a
        score.
    """
    measure = MEASURES[entry.reveals]
    return (entry.exact.share, getattr(entry.metrics[measure.leakage], measure.centre)) if entry.exact else NOTHING


def exactly(entry: BoardEntry) -> str:
    """Count the pictures recovered exactly: ``12 of 46``.

    Args:
        entry: A cell.
    """
    return f"{_count(entry)} of {entry.n}"


def _count(entry: BoardEntry) -> int:
    return round(entry.exact.share * entry.n) if entry.exact else 0


def recovery(entry: BoardEntry) -> str:
    """Write the headline: ``12 of 46 exactly, median 20.1 dB``, ``12 of 64 exactly from 8 uploads, ...``.

    Args:
        entry: A cell.
    """
    if not entry.exact:
        return "no figures yet"
    measure = MEASURES[entry.reveals]
    counted = measure.exactly.format(count=_count(entry), n=entry.n)
    uploads = f" from {count_uploads(entry.uploads)}" if entry.together else ""
    return counted + uploads + measure.middle.format(value=measure.scale * headline(entry)[1])


def count_uploads(number: int) -> str:
    """Write a number of uploads: ``1 upload``, ``8 uploads``.

    Args:
        number: How many uploads.
    """
    return "1 upload" if number == 1 else f"{number} uploads"


def pictures(entry: BoardEntry) -> str:
    """Count the pictures of a cell: ``64 pictures``, or ``64 pictures of 8 uploads`` where some came together.

    Args:
        entry: A cell.
    """
    counted = "1 picture" if entry.n == 1 else f"{entry.n} pictures"
    return f"{counted} of {count_uploads(entry.uploads)}" if entry.together else counted


def server_name(server: ThreatModel) -> str:
    """Name what a server sees of a picture, as short as a heading: ``12 uploads``, ``1 upload (batch of 8)``.

    Args:
        server: The threat model; what clients do to updates is not named.
    """
    parts = {
        f"{server.local_steps}-step delta": server.update != PLAIN.update,
        OPTIMISERS[server.local_optimiser]: server.local_optimiser != PLAIN.local_optimiser,
        f"rate {server.local_learning_rate:g}": server.local_learning_rate != PLAIN.local_learning_rate,
        f"batch of {server.batch_size}": server.batch_size != PLAIN.batch_size,
        f"label smoothing {server.label_smoothing:g}": server.label_smoothing != PLAIN.label_smoothing,
        f"mixup {server.mixup:g}": server.mixup > 0,
        crops_title(server): server.crop_scale is not None,
        "labels told": server.labels_known,
        server.name: server.name != PLAIN.name,
        "" if server.server is None else server.server.text: server.server is not None,
    }
    differences = ", ".join(part for part, differs in parts.items() if differs)
    return count_uploads(server.uploads_per_picture) + (f" ({differences})" if differences else "")


def describe_origin(entry: BoardEntry) -> str:
    """Say who submitted an entry and what the board recomputed of it; nothing of one that was measured here.

    Args:
        entry: A cell.
    """
    if entry.submitter is None:
        return ""
    return f"submitted by {entry.submitter.name}, {entry.check or 'claimed'}"


def crops_title(server: ThreatModel) -> str:
    """Name random crops: ``crops of 8 % or more``; nothing where clients take none.

    Args:
        server: The threat model.
    """
    return f"crops of {100 * server.crop_scale:g} % or more" if server.crop_scale else ""
