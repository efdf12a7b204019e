"""What a server recovers of each picture as a federated training run shows it the same pictures again.

``python results/recurring/study.py RECORDS --output FOLDER``, after
``fedmjp simulate --config benchmarks/training/recurring_pictures.yaml --output FOLDER``, whose records are in
``FOLDER/records``. After every upload of a picture, ``mjp_intersection`` is given that upload and all that the
server has kept of the client until then, of whatever picture: which of them are of this one, it finds out.
Writes ``trials.parquet``, ``uploads.svg`` and ``manifest.json``.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import pandas as pd
import torch
import typer
from matplotlib.figure import Figure

from fedmjp.attacks.mjp.intersection import MjpIntersection
from fedmjp.benchmarks.report.drawing import CEILING, STYLE, Scale
from fedmjp.benchmarks.scripts import keep_table, timed
from fedmjp.benchmarks.uploads.rounds import RecordedRounds
from fedmjp.errors import BadInputError
from fedmjp.metrics import RECOGNISABLE, metric
from fedmjp.records import Upload
from fedmjp.running import run_function


def main(
    records: Annotated[Path, typer.Argument(help="Folder of recorded rounds.", metavar="RECORDS")],
    output: Annotated[Path, typer.Option(help="Folder for the table and the figure.", metavar="FOLDER")] = Path(
        "results/recurring"
    ),
) -> None:
    """Attack each picture after each of its uploads."""
    table = recovered(RecordedRounds.open(records))
    keep_table(output, table, {})
    with mpl.rc_context(STYLE):
        figure(table).savefig(output / "uploads.svg", metadata={"Date": None})
    typer.echo(summary(table).to_string())


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """By number of uploads: linked ones, PSNR over the pictures, seconds."""
    groups = table.groupby("uploads")
    figures = groups["psnr"].agg(["count", "min", "median", "max"]).rename(columns={"count": "pictures"})
    figures.insert(1, "linked", groups["linked"].mean())
    return figures.assign(seconds=groups["seconds"].mean()).round(1)


def recovered(rounds: RecordedRounds) -> pd.DataFrame:
    """One row per upload, all of one picture: which it is of its picture, how many were linked, what was recovered."""
    (scenario,) = rounds.attacked(None, device="cpu")  # of a training run, there is one
    kept: dict[int, list[Upload]] = {}
    seen = Counter[str]()
    rows = []
    for record in rounds.records(scenario):
        private = record.private()
        if len(private.pictures) > 1:
            raise BadInputError(f"{record.path} is of {len(private.pictures)} pictures; record batches of one")
        model = record.model()
        attack = MjpIntersection()
        upload = record.upload()
        upload = replace(upload, tensors={name: upload.tensors[name] for name in attack.tensors(model)})
        before = kept.setdefault(record.node, [])
        (picture,) = private.pictures
        seen[picture] += 1
        given = replace(upload, others=tuple(before))
        generator = torch.Generator().manual_seed(0)
        (made,), seconds = timed(partial(attack.run, [given], model, scenario.threat, generator=generator))
        rows.append(
            {
                "client": record.node,
                "round": upload.server_round,
                "picture": picture,
                "uploads": seen[picture],
                "kept": len(before) + 1,
                "linked": int(made.diagnostics["uploads_linked"]),
                "masked_in_all": int(made.diagnostics["masked_in_all"]),
                "psnr": float(metric("psnr").function(made.images, private.clean)),
                "seconds": seconds,
            }
        )
        before.append(upload)
    return pd.DataFrame(rows)


def figure(table: pd.DataFrame) -> Figure:
    """Build a line per picture."""
    drawn = Figure(figsize=(5.2, 3.2))
    axes = drawn.subplots()
    for _, rows in table.groupby("picture"):
        axes.plot(rows["uploads"], rows["psnr"].clip(upper=CEILING), marker="o", markersize=4, linewidth=1.2)
    Scale("y", RECOGNISABLE, table["psnr"].tolist(), {}).draw(axes, "c")
    axes.set(
        xlabel="uploads of the picture, each in another round",
        ylabel="PSNR of the clean picture in dB",
        xticks=sorted(table["uploads"].unique()),
    )
    return drawn


if __name__ == "__main__":
    run_function(main)
