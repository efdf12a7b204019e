"""The figure of reconstructions: what the attacker got, beside what the client had."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmjp.benchmarks.folder.pictures import load_png
from fedmjp.benchmarks.folder.trials import TrialResult
from fedmjp.benchmarks.plan.cells import Cell
from fedmjp.drawings import save_photographs

if TYPE_CHECKING:
    from fedmjp.benchmarks.plan.trial_plan import PlannedTrial

CELL_INCHES = 1.15
LABEL_INCHES = 1.45
LABEL_LETTERS = 26
DOTS_PER_INCH = 100
COLUMNS = 8
CAPTION_INCHES = 0.18  # below each picture


@dataclass(frozen=True)
class _Row:
    label: str
    files: dict[str, Path] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)


def write_figure(planned: Sequence[PlannedTrial], trials: Sequence[TrialResult], pictures: Path, path: Path) -> None:
    """Draw original, shuffled and reconstructed pictures: a column per picture, a row per attack and defence.

    Only the first pictures are shown. Defences that shuffle are shown in settings b and c, which share one upload,
    unless only a was run. Under each reconstruction stands its PSNR per setting.

    Args:
        planned: Trials of an experiment.
        trials: What was recorded of them.
        pictures: The folder of kept pictures.
        path: The figure, a JPEG file.
    """
    one_each = {plan.picture.name: plan for plan in planned}
    shuffled = {p.picture.name: p for p in planned if p.cell.pipeline.shuffles or p.cell.setting != "a"}
    names = list(one_each)[:COLUMNS]
    rows = [_Row("original x", {n: pictures / plan.files["clean"] for n, plan in one_each.items()})]
    if shuffled:
        rows.append(_Row("shuffled x~", {n: pictures / plan.files["shuffled"] for n, plan in shuffled.items()}))
    rows += _reconstruction_rows(planned, trials, pictures)
    figure = Figure(figsize=(LABEL_INCHES + CELL_INCHES * len(names), (CELL_INCHES + CAPTION_INCHES) * len(rows)))
    axes = figure.subplots(len(rows), len(names), squeeze=False)
    for row, row_axes in zip(rows, axes, strict=True):
        for name, cell_axes in zip(names, row_axes, strict=True):
            _show(cell_axes, row, name)
        row_axes[0].text(-0.08, 0.5, row.label, transform=row_axes[0].transAxes, ha="right", va="center", fontsize=7.5)
    label_width, caption_height = LABEL_INCHES / figure.get_figwidth(), CAPTION_INCHES / figure.get_figheight()
    figure.subplots_adjust(left=label_width, right=0.995, top=0.995, bottom=caption_height, wspace=0.04, hspace=0.16)
    save_photographs(figure, path, dots_per_inch=DOTS_PER_INCH)


def _reconstruction_rows(planned: Sequence[PlannedTrial], trials: Sequence[TrialResult], pictures: Path) -> list[_Row]:
    finished = {trial.key: trial.scores for trial in trials if trial.status == "ok"}
    shuffled = {(plan.cell.model, plan.cell.defence) for plan in planned if plan.cell.pipeline.shuffles}
    rows: dict[str, _Row] = {}
    for plan in planned:
        cell, name = plan.cell, plan.picture.name
        is_shown = cell.pipeline.shuffles or (cell.model, cell.defence) not in shuffled
        if cell.role == "floor" or plan.key not in finished or not is_shown:
            continue
        row = rows.setdefault(_label(cell), _Row(_label(cell)))
        row.files[name] = pictures / plan.files["reconstruction"]
        if "psnr" in finished[plan.key]:
            psnr = f"{cell.setting} {finished[plan.key]['psnr']:.1f}"
            row.captions[name] = f"{row.captions[name]} | {psnr}" if name in row.captions else psnr
    return list(rows.values())


def _label(cell: Cell) -> str:
    defence = cell.defence if cell.defences else "no defence"
    defence += f", mask ratio {cell.mask_ratio:g}" if cell.mask_ratio else ""
    attack = textwrap.fill(cell.attack, LABEL_LETTERS)
    count = cell.threat.uploads_per_picture
    uploads = f"\n{count} uploads of each" if count > 1 else ""
    return f"{attack}{uploads}\n{cell.model}\n{defence}\nsetting, PSNR in dB"


def _show(axes: Axes, row: _Row, name: str) -> None:
    axes.set_axis_off()
    if name in row.files and row.files[name].exists():
        axes.imshow(load_png(row.files[name]))
    else:
        axes.text(0.5, 0.5, "no picture", ha="center", va="center", transform=axes.transAxes, fontsize=7)
    axes.text(0.5, -0.04, row.captions.get(name, ""), ha="center", va="top", transform=axes.transAxes, fontsize=6.5)
