"""The report as one HTML file that needs neither network nor neighbours."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from benchmarks.output import write_text
from benchmarks.report.tables import TEXT_COLUMNS, display


def write_page(
    board: pd.DataFrame,
    metrics: Sequence[str],
    notes: Sequence[str],
    figure: Path,
    manifest: Mapping[str, Any],
    threat: str,
    path: Path,
) -> None:
    """Render the page.

    Args:
        board: The leaderboard.
        metrics: Names, in the order of the columns.
        notes: What the table must not be read without.
        figure: PNG of the reconstructions, embedded.
        manifest: Embedded whole; the essentials are repeated in words.
        threat: The threat model in one sentence.
        path: The HTML file.
    """
    environment = Environment(
        loader=PackageLoader("benchmarks.report", "."), autoescape=True, undefined=StrictUndefined
    )
    shown = display(board, metrics)
    page = environment.get_template("page.html.jinja").render(
        title="Uploads, attacked and scored",
        subtitle=_subtitle(manifest),
        threat=threat,
        columns=list(shown.columns),
        text_columns=TEXT_COLUMNS,
        rows=_rows(shown, list(board["role"])),
        notes=notes,
        figure=base64.b64encode(figure.read_bytes()).decode(),
        origin=_origin(manifest),
        manifest=json.dumps(manifest, indent=2),
    )
    write_text(path, page)


def _rows(shown: pd.DataFrame, roles: Sequence[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    former: tuple[str, str] | None = None
    for values, role in zip(shown.to_dict("records"), roles, strict=True):
        group = (values["model"], values["defence"])
        rows.append({"values": values, "starts_group": group != former, "dim": role != "attack"})
        former = group
    return rows


def _subtitle(manifest: Mapping[str, Any]) -> str:
    trials = manifest["trials"]
    return (
        f"Uploads: {manifest['uploads']}; {len(manifest['pictures'])} pictures, "
        f"{trials['ok']} of {trials['planned']} trials finished, {trials['failed']} failed."
    )


def _origin(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    packages = ("python", "fedmjp", "torch", "timm", "flwr", "scikit-image")
    found = [("Weights", manifest["weights_origin"]), ("Seed", str(manifest["seed"]))]
    for environment in manifest["environments"]:
        versions, hardware, revision = environment["versions"], environment["hardware"], environment["revision"]
        commit = revision["commit"] or "not run from a git checkout"
        gpus = ", ".join(hardware["gpus"]) or "no GPU"
        found += [
            ("Versions", ", ".join(f"{name} {versions[name]}" for name in packages)),
            ("Hardware", f"{hardware['processor']}, {hardware['cores']} cores, {gpus}"),
            ("Revision", f"{commit}{' (modified)' if revision['modified'] else ''}"),
        ]
    return [*found, ("Run", f"{manifest['trials']['first']} to {manifest['trials']['last']}")]
