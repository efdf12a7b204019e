"""What the audit says of an app as it stands, and of the same app with the upload gate in its first line.

``python results/gated_app/study.py --app tests/apps/small-site --output FOLDER``. Bundled pictures stand
in for
the app's own. A row for each upload that was attacked, and a picture of both runs.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import pandas as pd
import typer
from matplotlib import pyplot as plt
from torch import Tensor

from fedmjp.benchmarks.audit.app import read_app
from fedmjp.benchmarks.audit.audit import Findings, audit
from fedmjp.benchmarks.audit.running import RunOptions
from fedmjp.benchmarks.audit.verdict import exit_code
from fedmjp.benchmarks.scripts import keep_table
from fedmjp.clients.gate.ledger import GateLedger
from fedmjp.errors import AppError
from fedmjp.running import run_function

POLICY = "pictures: defend\ndefences: [{name: local_dp, epsilon: 8, clipping_norm: 1, rounds: 10}]\n"
ATTACK = "patch_embedding"
ROUNDS, LIMIT = 2, 600.0
BEFORE, AFTER = "as it stands", "behind the gate"
FIGURE = "before_after.jpg"


def main(
    app: Annotated[Path, typer.Option(help="A Flower app whose ClientApp() has no mods.", metavar="FOLDER")],
    output: Annotated[Path, typer.Option(help="Folder for the table and the picture.", metavar="FOLDER")] = Path(
        "results/gated_app"
    ),
) -> None:
    """Audit both, keep the rows, and draw what came back."""
    rows: list[dict[str, Any]] = []
    shown: list[tuple[str, float, Sequence[Tensor]]] = []
    with tempfile.TemporaryDirectory() as folder:
        policy, gated = Path(folder) / "policy.yaml", Path(folder) / "gated" / app.name
        policy.write_text(POLICY)
        put_behind_gate(app, gated, policy)
        for title, place in ((BEFORE, app), (AFTER, gated)):
            findings = audit(place, stand_in=True, rounds=ROUNDS, options=RunOptions(limit=LIMIT))
            rows += [{"app": title, "exit_code": exit_code(findings.report), **row} for row in rows_of(findings)]
            shown += [
                (title, row["psnr"], pictures)
                for row, pictures in zip(rows_of(findings), strips(findings), strict=True)
            ]
            typer.echo(f"{title}: exit code {exit_code(findings.report)}")
        verdicts = [str(entry.verdict) for entry in GateLedger(Path(folder) / "gate.jsonl").entries()]
    table = pd.DataFrame(rows)
    keep_table(output, table, {"policy": POLICY, "ledger": {verdict: verdicts.count(verdict) for verdict in verdicts}})
    draw(shown, output / FIGURE)
    typer.echo(table.to_markdown(index=False, disable_numparse=True))


def put_behind_gate(app: Path, target: Path, policy: Path) -> None:
    """Copy an app, with the gate as the only mod of its ClientApp; AppError if it makes none without mods."""
    shutil.copytree(app, target)
    module = read_app(app).client.partition(":")[0]
    source = target / Path(*module.split(".")).with_suffix(".py")
    line = f'from fedmjp.clients.mods import UploadGate\n\n\\1ClientApp(mods=[UploadGate("{policy}")])'
    text, count = re.subn(r"(?m)^(\w+\s*=\s*)ClientApp\(\)", line, source.read_text())
    if count != 1:
        raise AppError(f"{module} makes no ClientApp() without mods, in which the gate could be put")
    source.write_text(text)


def rows_of(findings: Findings) -> list[dict[str, Any]]:
    """Return an upload and what the closed form made of it, for each that was attacked."""
    recovered = [row for row in findings.report["recovered"] if row["attack"] == ATTACK]
    columns = {"upload": "upload", "psnr": "psnr_worst_case", "floor": "floor_median"}
    return [{name: row[key] for name, key in columns.items()} for row in recovered]


def strips(findings: Findings) -> Iterator[Sequence[Tensor]]:
    """Private picture and reconstruction of the same uploads."""
    return (pictures for title, pictures in findings.strips if title.endswith(f", {ATTACK}") and "control" not in title)


def draw(shown: Sequence[tuple[str, float, Sequence[Tensor]]], path: Path) -> None:
    """Private pictures above, what the server makes of their uploads below."""
    mpl.use("Agg")
    figure, axes = plt.subplots(2, len(shown), figsize=(2 * len(shown), 4.6), squeeze=False, layout="constrained")
    for column, (title, psnr, pictures) in enumerate(shown):
        for row, picture in enumerate(pictures):
            axes[row, column].imshow(picture.permute(1, 2, 0).clamp(0, 1).numpy())
            axes[row, column].set_xticks([])
            axes[row, column].set_yticks([])
        axes[0, column].set_title(title, fontsize=10)
        axes[1, column].set_xlabel(f"{psnr:.0f} dB", fontsize=10)
    axes[0, 0].set_ylabel("private", fontsize=10)
    axes[1, 0].set_ylabel("what the server gets", fontsize=10)
    figure.savefig(path, dpi=110, pil_kwargs={"quality": 88})
    plt.close(figure)


if __name__ == "__main__":
    run_function(main)
