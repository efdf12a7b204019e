"""Labels and thumbnails that concentrated weights get, by defence, beside what epsilon allows.

``python results/concentrated/by_epsilon.py RESULTS``, of the campaign ``concentrated`` as a run left it or as it was
published. *Allowed* is the share of labels that Gaussian noise of the defence's size leaves to the best guess: the most
likely of as many equally far points. *Gain* is the mean PSNR over the grey guess, with its 95 % interval.
"""

import math
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from scipy.integrate import quad
from scipy.stats import norm

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.study import open_results
from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.leaderboard.headline import exactly
from fedmjp.benchmarks.report.render import board_in
from fedmjp.defences.pipeline import NONE, pipeline_of
from fedmjp.defences.privacy import Calibrated
from fedmjp.running import run_function

CLASSES = 32


def allowed(entry: BoardEntry) -> float | None:
    """Return the largest share of labels that noise allows any attack to tell; None without a guarantee.

    Args:
        entry: Of uploads of one client, each of one picture and clipped to a norm.
    """
    pipeline = pipeline_of(entry.defences)
    noisy = [defence for defence in pipeline.defences if isinstance(defence, Calibrated)]
    if not noisy or pipeline.clients > 1:
        return None
    uploads = entry.threat.uploads_per_picture
    distance = math.sqrt(2 * uploads) * float(noisy[0].options.clipping_norm) / noisy[0].deviation
    share, _ = quad(lambda z: norm.pdf(z - distance / math.sqrt(2)) * norm.cdf(z) ** (CLASSES - 1), -12, 40)
    return float(share)


def main(results: Annotated[Path, typer.Argument(help="Folder of the campaign.", metavar="RESULTS")]) -> None:
    """Print the table, a row per defence and number of uploads."""
    ledger, store = open_results(OutputFolder(results))
    board = board_in(ledger, store, results)
    rows: dict[tuple[str, int], dict[str, object]] = {}
    for entry in board.entries:
        if entry.role != "attack" or entry.threat is None:
            continue
        key = (pipeline_of(entry.defences).label, entry.threat.uploads_per_picture)
        row = rows.setdefault(key, {"defence": key[0] or NONE, "uploads": key[1]})
        row.update(_labels(entry) if entry.reveals == "labels" else _thumbnails(entry))
    typer.echo(pd.DataFrame(rows.values()).fillna("-").to_markdown(index=False, disable_numparse=True))


def _labels(entry: BoardEntry) -> dict[str, object]:
    right, share = entry.exact, allowed(entry)
    return {
        "labels": "-" if right is None else f"{exactly(entry)} ({100 * right.low:.0f} to {100 * right.high:.0f} %)",
        "allowed": "-" if share is None else f"{100 * share:.0f} %",
        "of labels": entry.verdict,
    }


def _thumbnails(entry: BoardEntry) -> dict[str, object]:
    over = entry.over_floor
    gain = "-" if over is None or over.low is None else f"{over.mean:.1f} dB ({over.low:.1f} to {over.high:.1f})"
    return {"gain": gain, "of thumbnails": entry.verdict}


if __name__ == "__main__":
    run_function(main)
